// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package diagnose

import (
	"fmt"
	"slices"
	"strings"
)

// pageBegin is the introduction of docs/how-to/troubleshooting.md.
const pageBegin = `# A volume that does not work

Ask first. The command needs nothing but a look at the orchestrator and at the rack:

` + "```sh" + `
oxide-csi explain default/data                 # the claim "data" in the namespace "default"
oxide-csi explain pod/default/postgres-0       # a pod
oxide-csi explain 0b19a3c4-6a0e-4c52-9f0a-0e5f3a7d9b11
oxide-csi doctor                               # everything that is not about one volume
oxide-csi orphans                              # disks that nobody knows, and volumes whose disk is gone
` + "```" + `

` + "`explain`" + ` begins with a verdict: one permanent word, what is wrong, who has to act, and the next command. This page has a
heading for each word. Of the node it reads what the orchestrator repeats of the node plugin's answers: the events of the
pod. So it needs no right to run or reach anything on a node.

In Kubernetes the controller's own container has no credentials for the API server. Run the commands where a kubeconfig is,
with the settings of the rack in the environment ([configuration.md](../reference/configuration.md)). Without the settings of
a rack, ` + "`explain`" + ` tells the orchestrator's part.

<!-- Made from the table in cmd/oxide-csi/diagnose/symptoms.go by: UPDATE=1 go test ./cmd/oxide-csi/diagnose -run TestTroubleshootingPage -->
`

// Page is docs/how-to/troubleshooting.md.
func Page() string {
	var b strings.Builder
	b.WriteString(pageBegin)
	sorted := slices.Clone(Symptoms)
	slices.SortFunc(sorted, func(x, y Symptom) int { return strings.Compare(x.Reason, y.Reason) })
	placeholders := strings.NewReplacer(
		"{volume}", "VOLUME", "{disk}", "DISK", "{instance}", "INSTANCE", "{node}", "NODE", "{claim}", "CLAIM",
	)
	for _, s := range sorted {
		fmt.Fprintf(&b, "\n## %s\n\n%s. %s\n\n", s.Reason, capitalised(placeholders.Replace(s.Verdict)), s.Why)
		fmt.Fprintf(
			&b,
			"- **Broken:** the link %s\n- **Who acts:** %s\n- **Next:** %s\n",
			s.Link,
			s.Actor,
			placeholders.Replace(s.Next),
		)
	}
	return b.String()
}

func capitalised(text string) string { return strings.ToUpper(text[:1]) + text[1:] }
