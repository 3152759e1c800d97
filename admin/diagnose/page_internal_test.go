// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package diagnose

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// pageBegin is the introduction of docs/how-to/troubleshooting.md.
const pageBegin = `# A volume that does not work

Ask first. The command needs nothing but a look at the orchestrator and at the rack:

<!-- not run: its names are examples; TestExplainFollowsKubernetes, TestDoctor and TestOrphansCommand run the commands -->
` + "```sh" + `
oxide-csi explain default/data                 # the claim "data" in the namespace "default"
oxide-csi explain pod/default/postgres-0       # a pod
oxide-csi explain 0b19a3c4-6a0e-4c52-9f0a-0e5f3a7d9b11
oxide-csi explain shop/data                    # Nomad: the volume "data" in the namespace "shop"
oxide-csi explain 5a7d9b11                     # Nomad: an allocation
oxide-csi doctor                               # everything that is not about one volume
oxide-csi orphans                              # disks without a volume, and volumes without a disk
` + "```" + `

` + "`explain`" + ` begins with a line that says all: one permanent word, what is wrong, and the next step. The second
line says who acts. This page has a heading for each word, and for each reason of
[the plugin's events](../reference/events.md). At its end is [the text of each error](#the-text-of-an-error).

What the command says of the node comes from the events of the pod, in which the orchestrator repeats the node plugin's
answers. So it needs no right to run or reach anything on a node. Nomad repeats none of these answers. There the command
reads the logs of the plugin's allocations, which takes the capabilities ` + "`read-job` and `read-logs`" + ` in the namespace of the plugin's jobs. As
root on the instance that has the disk, it also shows the device, the filesystem and the mounts there.

In Kubernetes the controller's own container has no credentials for the API server. Run the commands where a kubeconfig is,
with the settings of the rack in the environment ([configuration.md](../reference/configuration.md)). Without the settings of
a rack, ` + "`explain`" + ` reports only what the orchestrator knows.

[stories.md](../development/stories.md) says for twenty of these verdicts how the situation was made in a real cluster.

<!-- Made from the table in admin/diagnose/symptoms.go by: UPDATE=1 go test ./admin/diagnose -run TestTroubleshootingPage -->
`

// Page is docs/how-to/troubleshooting.md.
func Page() string {
	entries := map[string]string{} // by their reason
	for _, e := range orchestrator.Events() {
		entries[e.Reason] = fmt.Sprintf("%s\n\n- **Event of:** the %s\n- **Next:** %s\n", e.When, e.Object, e.Next)
	}
	for _, s := range Symptoms {
		entries[s.Reason] = s.entry()
	}
	var b strings.Builder
	b.WriteString(pageBegin)
	for _, reason := range slices.Sorted(maps.Keys(entries)) {
		fmt.Fprintf(&b, "\n## %s\n\n%s", reason, entries[reason])
	}
	writeErrors(&b)
	return b.String()
}

func (s Symptom) entry() string {
	placeholders := strings.NewReplacer(
		"{volume}", "VOLUME", "{disk}", "DISK", "{instance}", "INSTANCE", "{node}", "NODE", "{claim}", "CLAIM",
		"{holder}", "INSTANCE", "{namespace}", "NAMESPACE", "{pod}", "pod -n NAMESPACE POD", "{allocation}", "ALLOCATION",
	)
	broken := "nothing"
	if s.Link != "" {
		broken = "the link " + s.Link
	}
	text := fmt.Sprintf(
		"%s. %s\n\n- **Broken:** %s\n- **Who acts:** %s\n- **Next:** %s\n",
		capitalised(placeholders.Replace(s.Verdict)),
		s.Why,
		broken,
		s.Actor,
		placeholders.Replace(s.Next),
	)
	for _, other := range []struct{ orchestrator, name string }{
		{orchestrator.Nomad, "on Nomad"}, {orchestrator.None, "on plain hosts"},
	} {
		if next, differs := nextElsewhere[other.orchestrator][s.Reason]; differs {
			text += fmt.Sprintf("- **Next, %s:** %s\n", other.name, placeholders.Replace(next))
		}
	}
	return text
}

func capitalised(text string) string { return strings.ToUpper(text[:1]) + text[1:] }

// writeErrors writes the section with the errors. The entry of an error without a text of its own is its symptom.
func writeErrors(b *strings.Builder) {
	b.WriteString("\n## The text of an error\n\n" +
		"Each answer of the plugin that is an error contains one of these texts, or names what is wrong with the request.\n\n" +
		"| the message contains | what to do |\n|---|---|\n")
	written := map[string]bool{}
	for _, e := range pageErrors {
		text, next := e.err.Error(), e.next
		if written[text] {
			continue
		}
		written[text] = true
		if next == "" {
			reason := Verdict(Facts{RackError: text}).Reason
			next = fmt.Sprintf("As for [%s](#%s).", reason, strings.ToLower(reason))
		}
		fmt.Fprintf(b, "| `%s` | %s |\n", text, next)
	}
}
