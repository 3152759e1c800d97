// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package nomad_test

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	nomadapi "github.com/oxidecomputer/oxide-csi-plugin/metadata/nomad"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator/nomad"
)

// wellNomad is a Nomad without ACLs in which all is well.
func wellNomad() answers {
	a := waiting()
	a["/v1/acl/token/self"] = refusal(http.StatusBadRequest)
	a["/v1/plugins"] = []object{pluginOf(1, 1, 2, 2), {"ID": "x", "Provider": "other.example", "NodesExpected": 1}}
	a["/v1/volumes"] = []object{
		{"ID": "data", "Namespace": "shop", "ExternalID": idB, "Provider": "csi.oxide.computer", "CurrentWriters": 1},
		{"ID": "free", "Namespace": "shop", "ExternalID": idA, "Provider": "csi.oxide.computer"},
	}
	a["/v1/nodes"] = []object{{"ID": nodeA, "Name": "client-1"}}
	return a
}

func pluginOf(controllers, ofControllers, nodes, ofNodes int) object {
	return object{
		"ID": "oxide", "Provider": "csi.oxide.computer", "ControllersHealthy": controllers,
		"ControllersExpected": ofControllers, "NodesHealthy": nodes, "NodesExpected": ofNodes,
	}
}

// withPolicy has ACLs on, and a token with policies of these rules.
func withPolicy(a answers, policies ...object) {
	a["/v1/acl/token/self"] = object{"Type": "client"}
	var list []object
	for i, rules := range policies {
		name := fmt.Sprint("mine-", i)
		list = append(list, object{"Name": name})
		a["/v1/acl/policy/"+name] = object{"Name": name, "RulesJSON": rules}
	}
	a["/v1/acl/policies"] = list
}

// Each problem of a Nomad is one line, and the examination only reads.
func TestExamine(t *testing.T) {
	const warning, failure = orchestrator.StatusWarning, orchestrator.StatusFailure
	for name, test := range map[string]struct {
		change func(a answers)
		want   map[string]orchestrator.Status
		says   string
	}{
		"all is well": {func(answers) {}, map[string]orchestrator.Status{}, "1 are claimed; of the 1 "},
		"a node down": {func(a answers) {
			a["/v1/plugins"] = []object{pluginOf(1, 1, 1, 2)}
			a.at("/v1/plugin/csi/oxide")["Nodes"].(object)[nodeA] = object{"HealthDescription": "socket is gone"}
		}, map[string]orchestrator.Status{"plugins": warning}, "1 of 2 nodes are healthy; not on a0000000 (socket is gone)"},
		"an update took a node plugin away": {func(a answers) {
			a["/v1/plugins"] = []object{pluginOf(1, 1, 1, 1)}
			a["/v1/nodes"] = []object{{"ID": nodeA, "Name": "client-1"}, {"ID": nodeB, "Name": "client-2"}}
			a["/v1/node/"+nodeB] = object{}
		}, map[string]orchestrator.Status{"clients without node plugin": warning}, "client-2: their metadata names a rack"},
		"no controller": {func(a answers) { a["/v1/plugins"] = []object{pluginOf(0, 1, 2, 2)} },
			map[string]orchestrator.Status{"plugins": failure}, "0 of 1 controllers"},
		"not installed": {func(a answers) { a["/v1/plugins"] = []object{{"ID": "x", "Provider": "other.example"}} },
			map[string]orchestrator.Status{"plugins": failure}, "no plugin of this driver"},
		"not allowed": {func(a answers) { a["/v1/plugins"] = refusal(http.StatusForbidden) },
			map[string]orchestrator.Status{"plugins": failure}, "HTTP 403"},
		"dead claim": {func(a answers) {
			a.at("/v1/volume/csi/data")["Allocations"] = []object{stub(allocEnded, "client-2", "lost")}
		}, map[string]orchestrator.Status{"claims of volumes": warning}, "shop/data is claimed by allocation 6b7d9b11"},
		"report": {func(a answers) {
			a.at("/v1/node/" + nodeA)["Meta"] = object{"unique.oxide.restart_report": "2026 RestartRefused: why"}
		}, map[string]orchestrator.Status{}, "client client-1: 2026 RestartRefused: why"},
		"clients cannot be read": {func(a answers) { a["/v1/nodes"] = refusal(http.StatusInternalServerError) },
			map[string]orchestrator.Status{"reports about clients": warning, "clients without node plugin": warning}, "HTTP 500"},
		"management token": {func(a answers) { a["/v1/acl/token/self"] = object{"Type": "management"} },
			map[string]orchestrator.Status{}, "management token"},
		"invalid token": {func(a answers) {
			a["/v1/acl/token/self"], a["/v1/acl/policies"] = refusal(http.StatusForbidden), refusal(http.StatusForbidden)
		}, map[string]orchestrator.Status{"ACLs": warning}, "HTTP 403"},
		"enough": {func(a answers) {
			withPolicy(a, object{
				"Node": object{"Policy": "write"}, "Plugin": object{"Policy": "read"},
				"Namespaces": []object{{"Name": "*", "Policy": "write"}},
			})
		}, map[string]orchestrator.Status{}, "what restart-drain.policy.hcl grants"},
		"one namespace where all are needed": {func(a answers) {
			withPolicy(a, object{
				"Node": object{"Policy": "write"}, "Plugin": object{"Policy": "read"},
				"Namespaces": []object{{"Name": "shop", "Policy": "write"}},
			})
		}, map[string]orchestrator.Status{"ACLs": failure}, "the token lacks: capability read-job, capability alloc-lifecycle"},
		"too little": {func(a answers) {
			withPolicy(a, object{
				"Node": object{"Policy": "read"}, "Namespaces": []object{
					{"Name": "*", "Capabilities": []string{"read-job"}}, {"Name": "shop", "Policy": "write"},
				},
			})
		}, map[string]orchestrator.Status{"ACLs": failure},
			`the token lacks: node { policy = "write" }, plugin { policy = "read" }`},
		"capabilities of two namespaces": {func(a answers) {
			withPolicy(a, object{
				"Node": object{"Policy": "write"}, "Plugin": object{"Policy": "read"}, "Namespaces": []object{
					{"Name": "*", "Capabilities": []string{
						"read-job", "alloc-lifecycle", "csi-list-volume", "csi-read-volume", "csi-write-volume", "csi-mount-volume",
						"list-jobs",
					}},
					{"Name": "shop", "Capabilities": []string{"submit-job", "read-logs"}},
				},
			})
		}, map[string]orchestrator.Status{"ACLs": failure}, "the token lacks: capability submit-job, capability read-logs\n"},
		"capabilities of two policies": {func(a answers) {
			withPolicy(a, object{
				"Node": object{"Policy": "write"}, "Plugin": object{"Policy": "read"},
				"Namespaces": []object{{"Name": "*", "Policy": "read"}},
			}, object{"Namespaces": []object{{"Name": "*", "Capabilities": []string{
				"alloc-lifecycle", "csi-write-volume", "csi-mount-volume", "submit-job", "read-logs",
			}}}})
		}, map[string]orchestrator.Status{}, "what restart-drain.policy.hcl grants"},
		"another policy denies a namespace": {func(a answers) {
			all := object{
				"Node": object{"Policy": "write"}, "Plugin": object{"Policy": "read"},
				"Namespaces": []object{{"Name": "*", "Policy": "write"}},
			}
			withPolicy(a, all, object{"Namespaces": []object{{"Name": "*", "Capabilities": []string{"deny"}}}})
		}, map[string]orchestrator.Status{"ACLs": failure}, "the token lacks: capability read-job, capability alloc-lifecycle\n"},
		"another policy denies": {func(a answers) {
			all := object{
				"Node": object{"Policy": "write"}, "Plugin": object{"Policy": "read"},
				"Namespaces": []object{{"Name": "*", "Policy": "write"}},
			}
			withPolicy(a, object{
				"Node": object{"Policy": "deny"}, "Plugin": object{"Policy": "deny"},
				"Namespaces": []object{{"Name": "*", "Policy": "deny"}},
			}, all)
		}, map[string]orchestrator.Status{"ACLs": failure},
			`the token lacks: node { policy = "write" }, plugin { policy = "read" }`},
	} {
		t.Run(name, func(t *testing.T) {
			a := wellNomad()
			test.change(a)
			options, calls := serveNomad(t, a)
			operator := nomad.NewOperator(options)
			operator.Needs = []string{nomad.PolicyRestartController, nomad.PolicyRestartDrain, nomad.PolicyOperator}
			got, text := map[string]orchestrator.Status{}, ""
			findings, _ := operator.Examine(t.Context())
			for _, f := range findings {
				if f.Status != orchestrator.StatusOK {
					got[f.Looked] = f.Status
				}
				if f.Found == "" || f.Area != "nomad" || (f.Next == "") != (f.Status == orchestrator.StatusOK) {
					t.Errorf("incomplete: %+v", f)
				}
				text += f.Found + "\n"
			}
			if diff := cmp.Diff(test.want, got); diff != "" || !strings.Contains(text, test.says) ||
				strings.Contains(text, token) {
				t.Errorf("-want +got:\n%s\n%s", diff, text)
			}
			for _, call := range *calls {
				if !strings.HasPrefix(call, "GET ") {
					t.Errorf("it sent %s", call)
				}
			}
		})
	}
}

// The policy that doctor asks an operator for is enough for doctor. It does not show the clients.
func TestExamineWithTheOperatorsPolicy(t *testing.T) {
	for _, hidden := range []string{"/v1/nodes", "/v1/node/" + nodeA} {
		a := wellNomad()
		withPolicy(a, object{
			"Plugin": object{"Policy": "read"},
			"Namespaces": []object{{"Name": "default", "Capabilities": []string{
				"csi-list-volume", "csi-read-volume", "csi-write-volume", "csi-mount-volume", "list-jobs", "read-job",
				"submit-job", "read-logs",
			}}},
		})
		a[hidden] = refusal(http.StatusForbidden)
		options, _ := serveNomad(t, a)
		operator := nomad.NewOperator(options)
		operator.Needs = []string{nomad.PolicyOperator}
		reports := 0
		findings, _ := operator.Examine(t.Context())
		for _, f := range findings {
			if f.Status != orchestrator.StatusOK {
				t.Errorf("without %s: %+v", hidden, f)
			}
			if f.Looked == "reports about clients" && strings.Contains(f.Found, "not known") {
				reports++
			}
		}
		if reports != 1 {
			t.Errorf("without %s it says %d times that the reports are not known", hidden, reports)
		}
	}
}

// The rules that doctor looks for are those of the files.
func TestRulesAreThoseOfThePolicies(t *testing.T) {
	files, err := filepath.Glob("../../deploy/nomad/policies/*.policy.hcl")
	if err != nil || len(files) < 5 {
		t.Fatal(files, err)
	}
	block := regexp.MustCompile(`(?ms)^(node|plugin|namespace) ?(?:"([^"]*)" )?\{(.*?)^\}`)
	words := regexp.MustCompile(`"([^"]*)"`)
	want := map[string][]string{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		name := strings.TrimSuffix(filepath.Base(file), ".policy.hcl")
		for _, b := range block.FindAllStringSubmatch(string(text), -1) {
			for _, word := range words.FindAllStringSubmatch(b[3], -1) {
				kind := b[1]
				if kind == "namespace" && b[2] == "*" {
					kind += " *"
				}
				want[name] = append(want[name], kind+" "+word[1])
			}
		}
		slices.Sort(want[name])
	}
	if diff := cmp.Diff(want, nomad.PolicyRules()); diff != "" {
		t.Errorf("-files +doctor:\n%s", diff)
	}
}

// The page of rights has what each command of an operator needs: Nomad shows an allocation only with "read-job".
func TestRightsOfCommands(t *testing.T) {
	page, err := os.ReadFile("../../docs/reference/rights.md")
	if err != nil {
		t.Fatal(err)
	}
	for command, needs := range map[string]string{
		"doctor": "operator.policy.hcl", "explain": "`read-job` and `read-logs`",
		"support-bundle": "`read-job` and `read-logs`",
	} {
		row := regexp.MustCompile("(?m)^\\| Nomad \\| who runs `oxide-csi " + command + "` \\| .*$").Find(page)
		if !strings.Contains(string(row), needs) {
			t.Errorf("the row of %s does not name %s: %s", command, needs, row)
		}
	}
}

// With the identity of a job doctor asks for nothing that the job may not read.
func TestExamineWithTheIdentityOfAJob(t *testing.T) {
	for policy, want := range map[string]string{
		"":                            "", // a controller without planned restarts asks Nomad for nothing
		nomad.PolicyNode:              "/v1/acl/token/self",
		nomad.PolicyRestartController: "/v1/acl/token/self /v1/plugins",
	} {
		options, calls := serveNomad(t, wellNomad())
		operator := nomad.NewOperator(options)
		if policy != "" {
			operator.Needs = []string{policy}
		}
		operator.Examine(t.Context())
		if got := strings.ReplaceAll(strings.Join(*calls, " "), "GET ", ""); got != want {
			t.Errorf("%s: it asked for %s", policy, got)
		}
	}
}

// An agent that does not respond is no matter of tokens: the next step is that of the error.
func TestExamineWithoutAnAgent(t *testing.T) {
	operator := nomad.NewOperator(nomadapi.Options{Address: "http://127.0.0.1:1"})
	operator.Needs = []string{nomad.PolicyOperator}
	findings, _ := operator.Examine(t.Context())
	for _, f := range findings {
		if strings.Contains(f.Next, "token") || strings.Contains(f.Found, "; ") ||
			!strings.HasPrefix(f.Next, "check that it runs") {
			t.Errorf("%+v", f)
		}
	}
	if len(findings) == 0 {
		t.Error("nothing was found")
	}
}
