// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package helm_test

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"
)

const (
	chart     = "../../deploy/helm/oxide-csi"
	manifests = "../../deploy/k8s"
)

var update = flag.Bool("update", false, "write the generated pages, and what helm renders into testdata")

type object = map[string]any

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// checkPage compares the generated end of a page. With -update it writes the page.
func checkPage(t *testing.T, page, test, generated string) {
	t.Helper()
	begin := "<!-- From here on made by: go test ./test/helm -run " + test + " -update -->\n"
	text, err := os.ReadFile(page)
	must(t, err)
	written, _, found := strings.Cut(string(text), begin)
	if !found {
		t.Fatalf("%s lacks the line %s", page, begin)
	}
	want := written + begin + generated
	if *update {
		must(t, os.WriteFile(page, []byte(want), 0o644))
		return
	}
	if diff := cmp.Diff(want, string(text)); diff != "" {
		t.Errorf("%s is not up to date, run this test with -update: as generated (-), as it is (+):\n%s", page, diff)
	}
}

// sentences returns the last paragraph of a comment as one line, without an example below it.
func sentences(comment string) string {
	paragraphs := strings.Split(comment, "\n\n")
	var words []string
	for line := range strings.Lines(paragraphs[len(paragraphs)-1]) {
		text := strings.TrimPrefix(line, "#")
		if strings.HasPrefix(text, "   ") {
			break
		}
		words = append(words, strings.Fields(text)...)
	}
	return strings.ReplaceAll(strings.Join(words, " "), "|", "\\|")
}

// right is a rule of a role.
type right struct {
	Groups    []string `yaml:"apiGroups"`
	Resources []string `yaml:"resources"`
	Verbs     []string `yaml:"verbs"`
	// why is the comment on the rule.
	why string
	// role is the name of the role, which is that of its service account. cluster is false if it is for one namespace.
	role    string
	cluster bool
	// component is the folder that adds the rule. It is empty for the base.
	component string
}

// TestRightsPage makes the list of rights from the manifests and the comments on their rules. [TestKustomize] holds the
// chart equal to them.
func TestRightsPage(t *testing.T) {
	rights := slices.Concat(rightsIn(t, "base/controller.yaml"), rightsIn(t, "base/node-identity.yaml"),
		rightsIn(t, "buckets/driver.yaml"))
	components, err := filepath.Glob(filepath.Join(manifests, "*", "kustomization.yaml"))
	must(t, err)
	for _, file := range components {
		rights = append(rights, addedRights(t, file)...)
	}
	var page strings.Builder
	for _, account := range []struct{ title, name string }{
		{"The controller's pods", "oxide-csi-controller"}, {"The node's pods", "oxide-csi-node"},
		{"The sidecar of the COSI driver, with `buckets`", "oxide-cosi"},
	} {
		fmt.Fprintf(&page, "\n## %s: service account `%s`\n\n", account.title, account.name)
		fmt.Fprint(&page, "| with | in | resources | verbs | why |\n|---|---|---|---|---|\n")
		for _, r := range rights {
			if r.role == account.name {
				page.WriteString(r.row(t))
			}
		}
	}
	if len(rights) < 20 {
		t.Errorf("%d rights were found", len(rights))
	}
	checkPage(t, "../../docs/reference/kubernetes-rights.md", "TestRightsPage", page.String())
}

func (r right) row(t *testing.T) string {
	t.Helper()
	if r.why == "" {
		t.Errorf("no comment says why %s needs %v on %v", r.role, r.Verbs, r.Resources)
	}
	if len(r.Groups) != 1 {
		t.Errorf("the rule for %v has the groups %q", r.Resources, r.Groups)
	}
	with, in := "always", "cluster"
	if r.component != "" {
		with = "`" + r.component + "`"
	}
	if !r.cluster {
		in = "namespace"
	}
	var resources []string
	for _, resource := range r.Resources {
		if group := r.Groups[0]; group != "" {
			plural, sub, found := strings.Cut(resource, "/")
			if resource = plural + "." + group; found {
				resource += "/" + sub
			}
		}
		resources = append(resources, "`"+resource+"`")
	}
	return fmt.Sprintf("| %s | %s | %s | %s | %s |\n",
		with, in, strings.Join(resources, ", "), strings.Join(r.Verbs, ", "), r.why)
}

// rightsIn returns the rights in the roles of a file.
func rightsIn(t *testing.T, file string) (rights []right) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(manifests, file))
	must(t, err)
	for _, document := range strings.Split(string(text), "\n---\n") {
		var role struct {
			Kind     string
			Metadata struct{ Name string }
			Rules    yaml.Node
		}
		must(t, yaml.Unmarshal([]byte(document), &role))
		if !strings.HasSuffix(role.Kind, "Role") {
			continue
		}
		for _, rule := range role.Rules.Content {
			r := right{why: sentences(rule.HeadComment), role: role.Metadata.Name, cluster: role.Kind == "ClusterRole"}
			must(t, rule.Decode(&r))
			rights = append(rights, r)
		}
	}
	return rights
}

// addedRights returns the rights that a component's patches add to roles.
func addedRights(t *testing.T, file string) (rights []right) {
	t.Helper()
	text, err := os.ReadFile(file)
	must(t, err)
	var component struct {
		Patches []struct {
			Target struct{ Kind, Name string }
			Patch  string
		}
	}
	must(t, yaml.Unmarshal(text, &component))
	for _, patch := range component.Patches {
		if !strings.HasSuffix(patch.Target.Kind, "Role") {
			continue
		}
		var operations yaml.Node
		must(t, yaml.Unmarshal([]byte(patch.Patch), &operations))
		for _, operation := range operations.Content[0].Content {
			r := right{
				why: sentences(operation.HeadComment), role: patch.Target.Name, cluster: patch.Target.Kind == "ClusterRole",
				component: filepath.Base(filepath.Dir(file)),
			}
			var add struct{ Value yaml.Node }
			must(t, operation.Decode(&add))
			must(t, add.Value.Decode(&r))
			rights = append(rights, r)
		}
	}
	return rights
}
