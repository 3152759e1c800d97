// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package nomad_test

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	client "github.com/oxidecomputer/oxide-csi-plugin/metadata/nomad"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator/nomad"
)

const (
	allocWaits = "5a7d9b11-0000-4000-8000-000000000001"
	allocEnded = "6b7d9b11-0000-4000-8000-000000000002"
	allocOurs  = "7c7d9b11-0000-4000-8000-000000000003"
	allocNode  = "8d7d9b11-0000-4000-8000-000000000004"
)

// answers are what a simulated Nomad answers by path. A missing path is 404.
type answers map[string]any

// refusal is an answer without a body.
type refusal int

// serveNomad serves a Nomad that only reads, and returns the requests that it got.
func serveNomad(t *testing.T, a answers) (options client.Options, calls *[]string) {
	t.Helper()
	calls = &[]string{}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		*calls = append(*calls, r.Method+" "+r.URL.Path)
		a.handler(t)(w, r)
	}))
	t.Cleanup(server.Close)
	return client.Options{Address: server.URL, Token: token}, calls
}

func (a answers) handler(t *testing.T) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Nomad-Index", "1")
		answer, has := a[r.URL.Path]
		answer = within(answer, r.URL.Query().Get("namespace"))
		status, refused := answer.(refusal)
		digits := strings.ReplaceAll(r.URL.Query().Get("prefix"), "-", "")
		switch text, plain := answer.(string); {
		case r.Header.Get("X-Nomad-Token") != token:
			w.WriteHeader(http.StatusForbidden)
		case len(digits)%2 != 0: // as go-memdb v1.3.5, UUIDFieldIndex
			w.WriteHeader(http.StatusInternalServerError)
		case refused:
			w.WriteHeader(int(status))
		case !has:
			w.WriteHeader(http.StatusNotFound)
		case plain:
			_, _ = io.WriteString(w, text)
		default:
			if err := json.NewEncoder(w).Encode(answer); err != nil {
				t.Error(err)
			}
		}
	}
}

// within leaves out of a list, and of the list in a plugin, what is in another namespace, as Nomad does.
// A request without a namespace asks for the namespace default, which has nothing here.
func within(answer any, namespace string) any {
	switch whole := answer.(type) {
	case []object:
		return slices.DeleteFunc(slices.Clone(whole), func(o object) bool {
			return namespace != "*" && o["Namespace"] != nil && o["Namespace"] != namespace
		})
	case object:
		if whole["Nodes"] != nil {
			whole = maps.Clone(whole)
			whole["Allocations"] = within(whole["Allocations"], namespace)
		}
		return whole
	}
	return answer
}

func stub(id, client, status string) object {
	return object{
		"ID": id, "Name": "db.cache[0]", "Namespace": "shop", "NodeID": nodeA, "NodeName": client, "JobID": "db",
		"ClientStatus": status, "CreateTime": 1767322000000000000,
		"TaskStates": object{"redis": object{"Events": []object{{"Type": "Received", "DisplayMessage": "received"}}}},
	}
}

// ourStub is an allocation of the plugin.
func ourStub(id, job string) object {
	s := stub(id, "client-1", "running")
	s["JobID"], s["Namespace"], s["TaskStates"] = job, "oxide-csi", object{"plugin": object{}}
	return s
}

// waiting is a Nomad in which an allocation waits for the volume shop/data, and the controller says why.
func waiting() answers {
	return answers{
		"/v1/volumes": []object{
			{"ID": "data", "Namespace": "shop", "ExternalID": idB, "Provider": "csi.oxide.computer"},
			{"ID": "data", "Namespace": "lab", "ExternalID": idA, "Provider": "csi.oxide.computer"},
			{"ID": "only", "Namespace": "lab", "ExternalID": "other", "Provider": "other.example"},
		},
		"/v1/volume/csi/data": object{
			"ID": "data", "Namespace": "shop", "ExternalID": idB, "PluginID": "oxide", "Schedulable": true,
			"ControllersHealthy": 1, "Allocations": []object{stub(allocWaits, "client-1", "pending")},
		},
		"/v1/plugin/csi/oxide": object{
			"ID":          "oxide",
			"Controllers": object{nodeB: object{"Healthy": true, "AllocID": allocOurs}},
			"Nodes":       object{nodeA: object{"Healthy": true, "AllocID": allocNode, "NodeInfo": object{"ID": idA}}},
			"Allocations": []object{ourStub(allocNode, "oxide-csi-node"), ourStub(allocOurs, "oxide-csi-controller")},
		},
		"/v1/plugins":                     []object{{"ID": "oxide", "Provider": "csi.oxide.computer"}},
		"/v1/node/" + nodeA:               object{"Name": "client-1", "Status": "ready"},
		"/v1/allocations":                 []object{{"ID": allocWaits, "Namespace": "shop"}},
		"/v1/client/fs/logs/" + allocNode: "",
		"/v1/client/fs/logs/" + allocOurs: `time=2026-01-02T03:04:05Z level=INFO msg=responded method=X volume_id=` + idB + ` code=OK
time=2026-01-02T03:04:06Z level=WARN msg=responded method=ControllerPublishVolume volume_id=` + idB + ` code=FailedPrecondition error="cannot attach \"x\": stop it"
time=2026-01-02T03:04:07Z level=WARN msg=responded method=ControllerPublishVolume volume_id=` + idA + ` code=Internal error=another
`,
		"/v1/allocation/" + allocWaits: object{
			"ID": allocWaits, "Name": "db.cache[0]", "Namespace": "shop", "NodeID": nodeA, "ClientStatus": "pending",
			"TaskGroup": "cache", "CreateTime": 1767322000000000000, "Job": object{"TaskGroups": []object{
				{"Name": "other", "Volumes": object{"v": object{"Type": "csi", "Source": "none"}}},
				{"Name": "cache", "Volumes": object{
					"h": object{"Type": "host", "Source": "data"}, "v": object{"Type": "csi", "Source": "data"},
				}},
			}},
		},
	}
}

func (a answers) at(path string) object { return a[path].(object) }

// The same volume is found by its external ID, its namespace and ID, and its allocation. Why it waits is in the log.
func TestTrace(t *testing.T) {
	options, calls := serveNomad(t, waiting())
	for _, subject := range []orchestrator.Subject{
		{VolumeID: idB}, {Claim: "shop/data"}, {VolumeID: allocWaits}, {Name: allocWaits[:8]}, {Name: allocWaits[:5]},
		{Name: allocWaits[:9]}, {Name: allocWaits[:10]}, {Name: allocWaits[:11]}, {Name: allocWaits[:15]},
	} {
		got, err := nomad.NewOperator(options).Trace(t.Context(), subject)
		if err != nil {
			t.Fatalf("%+v: %v", subject, err)
		}
		var links []string
		for _, step := range got.Steps {
			links = append(links, step.Link)
		}
		if diff := cmp.Diff([]string{"volume", "attachment", "node", "workload"}, links); diff != "" {
			t.Errorf("%+v: -want +got:\n%s", subject, diff)
		}
		if got.VolumeID != idB || got.NodeID != idA || got.Node != "client-1" || got.Claim != "shop/data" ||
			len(got.Conditions) > 0 {
			t.Errorf("%+v: %+v", subject, got)
		}
		if len(got.Messages) != 1 || got.Messages[0].Text != `ControllerPublishVolume: cannot attach "x": stop it` {
			t.Errorf("%+v: %+v", subject, got.Messages)
		}
	}
	for _, call := range *calls {
		if !strings.HasPrefix(call, "GET ") {
			t.Errorf("it sent %s", call)
		}
	}
}

// Each thing that only Nomad knows is a condition.
func TestTraceConditions(t *testing.T) {
	const volume, plugin = "/v1/volume/csi/data", "/v1/plugin/csi/oxide"
	for name, test := range map[string]struct {
		change   func(a answers)
		want     []orchestrator.TraceCondition
		messages int
	}{
		"runs": {func(a answers) {
			a.at(volume)["Allocations"] = []object{stub(allocWaits, "client-1", "running")}
		}, []orchestrator.TraceCondition{orchestrator.Attached, orchestrator.Running}, 0},
		"claim of an allocation that has ended": {func(a answers) {
			a.at(volume)["Allocations"] = []object{
				stub(allocEnded, "client-2", "lost"), stub(allocWaits, "client-1", "pending"),
			}
		}, []orchestrator.TraceCondition{orchestrator.ClaimOfEnded}, 1},
		"client is down": {func(a answers) { a.at("/v1/node/" + nodeA)["Status"] = "down" },
			[]orchestrator.TraceCondition{orchestrator.NodeNotReady}, 1},
		"client is purged": {func(a answers) { delete(a, "/v1/node/"+nodeA) },
			[]orchestrator.TraceCondition{orchestrator.NodeNotReady}, 1},
		"no node plugin": {func(a answers) { a.at(plugin)["Nodes"] = object{} },
			[]orchestrator.TraceCondition{orchestrator.NotRegistered}, 1},
		"node plugin is not healthy": {func(a answers) {
			a.at(plugin)["Nodes"].(object)[nodeA].(object)["Healthy"] = false
		}, []orchestrator.TraceCondition{orchestrator.NotRegistered}, 1},
		"no controller": {func(a answers) { a.at(volume)["ControllersHealthy"] = 0 },
			[]orchestrator.TraceCondition{orchestrator.NoController}, 1},
		"nobody uses it": {func(a answers) { a.at(volume)["Allocations"] = []object{} }, nil, 0},
		"no right to the allocations of the plugin": {func(a answers) { delete(a.at(plugin), "Allocations") }, nil, 1},
		"no right to logs":                          {func(a answers) { delete(a, "/v1/client/fs/logs/"+allocOurs) }, nil, 1},
		"a restart was refused": {func(a answers) {
			a.at("/v1/node/" + nodeA)["Meta"] = object{"unique.oxide.restart_report": "RestartRefused: why"}
		}, nil, 2},
		"task failed": {func(a answers) {
			failed := stub(allocWaits, "client-1", "pending")
			failed["TaskStates"] = object{"redis": object{"Events": []object{{"Type": "Setup Failure", "DisplayMessage": "no"}}}}
			a.at(volume)["Allocations"] = []object{failed}
		}, nil, 2},
		"answered since": {func(a answers) {
			log := "/v1/client/fs/logs/" + allocOurs
			a[log] = a[log].(string) + `{"time":"2026-01-02T03:05:00Z","msg":"responded","method":"ControllerPublishVolume","volume_id":"` + idB + `","code":"OK"}`
		}, nil, 0},
		"a snapshot was made since": {func(a answers) {
			log := "/v1/client/fs/logs/" + allocOurs
			a[log] = a[log].(string) + `{"time":"2026-01-02T03:05:00Z","msg":"responded","method":"CreateSnapshot","volume_id":"` +
				idB + `","code":"OK"}`
		}, nil, 1},
		"said about an earlier allocation": {func(a answers) {
			later := stub(allocWaits, "client-1", "pending")
			later["CreateTime"] = 1777322000000000000
			a.at(volume)["Allocations"] = []object{later}
		}, nil, 0},
	} {
		t.Run(name, func(t *testing.T) {
			a := waiting()
			test.change(a)
			options, _ := serveNomad(t, a)
			got, err := nomad.NewOperator(options).Trace(t.Context(), orchestrator.Subject{Claim: "shop/data"})
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, got.Conditions); diff != "" || len(got.Messages) != test.messages {
				t.Errorf("-want +got:\n%s\n%+v", diff, got)
			}
		})
	}
}

// An allocation that waits while another one has the claim, such as a canary. All volumes of an allocation are
// followed.
func TestTraceOfACanary(t *testing.T) {
	a := waiting()
	a.at("/v1/volume/csi/data")["Allocations"] = []object{stub(allocEnded, "client-2", "running")}
	a["/v1/volumes"] = append(a["/v1/volumes"].([]object), object{
		"ID": "logs", "Namespace": "shop", "ExternalID": "more", "Provider": "csi.oxide.computer",
	})
	groups := a.at("/v1/allocation/" + allocWaits)["Job"].(object)["TaskGroups"].([]object)
	groups[1]["Volumes"].(object)["w"] = object{"Type": "csi", "Source": "logs"}
	options, _ := serveNomad(t, a)
	got, err := nomad.NewOperator(options).Trace(t.Context(), orchestrator.Subject{VolumeID: allocWaits})
	others := []orchestrator.Subject{{Claim: "shop/logs", Workload: allocWaits}}
	if err != nil || !slices.Equal(got.Conditions, []orchestrator.TraceCondition{orchestrator.ClaimOfAnother}) ||
		!slices.Equal(got.Others, others) || !strings.HasPrefix(got.Workload, "allocation 5a7d9b11") {
		t.Errorf("%+v, %v", got, err)
	}
	again := orchestrator.Subject{Claim: "shop/data", Workload: allocWaits}
	got, err = nomad.NewOperator(options).Trace(t.Context(), again)
	if err != nil || !strings.HasPrefix(got.Workload, "allocation 5a7d9b11") {
		t.Errorf("%+v, %v", got, err)
	}
}

// A subject that does not exist, or that is not one volume, is an error without the token.
func TestTraceErrors(t *testing.T) {
	options, _ := serveNomad(t, waiting())
	for subject, want := range map[orchestrator.Subject]string{
		{Name: "data"}:        "2 namespaces",
		{Name: "none"}:        "does not exist",
		{Name: "only"}:        "does not exist", // another driver's
		{Claim: "shop/none"}:  "does not exist",
		{Pod: "default/db"}:   "pod",
		{VolumeID: allocOurs}: "does not exist",
		{Name: "5a7d-9b"}:     "does not exist", // no beginning of an ID
		{Name: "5a7d9b11-1"}:  "does not exist", // only the first digits are those of an allocation
	} {
		got, err := nomad.NewOperator(options).Trace(t.Context(), subject)
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), token) {
			t.Errorf("%+v: %+v, %v", subject, got, err)
		}
	}
}

// The logs of the controllers come first, and one that cannot be read says so.
func TestLogs(t *testing.T) {
	a := waiting()
	delete(a, "/v1/client/fs/logs/"+allocNode)
	a["/v1/client/fs/logs/"+allocOurs] = strings.Repeat("x", orchestrator.MaxLogBytes-5) + "\nlast\nmore"
	options, _ := serveNomad(t, a)
	logs, err := nomad.NewOperator(options).Logs(t.Context())
	if err != nil || len(logs) != 2 {
		t.Fatalf("%+v, %v", logs, err)
	}
	if logs[0].Name != "oxide-csi-controller_7c7d9b11_plugin" || logs[0].Err != nil ||
		!strings.HasPrefix(logs[0].Text, "last") {
		t.Errorf("%s, %.20q, %v", logs[0].Name, logs[0].Text, logs[0].Err)
	}
	if logs[1].Name != "oxide-csi-node_8d7d9b11_plugin" || logs[1].Err == nil {
		t.Errorf("%+v", logs[1])
	}
}

// Nomad leaves out the allocations that a token may not see, without an error.
func TestLogsOfAllocationsThatAreHidden(t *testing.T) {
	a := waiting()
	a.at("/v1/plugin/csi/oxide")["Allocations"] = nil
	options, _ := serveNomad(t, a)
	logs, err := nomad.NewOperator(options).Logs(t.Context())
	if err == nil || !strings.Contains(err.Error(), "no allocations of the plugin are visible") || len(logs) > 0 {
		t.Errorf("%+v, %v", logs, err)
	}
}

// An allocation has a log for each of its tasks.
func TestMostLogs(t *testing.T) {
	many, tasks := ourStub(allocOurs, "oxide-csi"), object{}
	for i := range orchestrator.MaxLogs - 1 {
		tasks[fmt.Sprintf("task-%02d", i)] = object{}
	}
	many["TaskStates"] = tasks
	a := waiting()
	a.at("/v1/plugin/csi/oxide")["Allocations"] = []object{many, many}
	options, _ := serveNomad(t, a)
	logs, err := nomad.NewOperator(options).Logs(t.Context())
	if err != nil || len(logs) != orchestrator.MaxLogs {
		t.Errorf("%d logs, %v", len(logs), err)
	}
}

// The ID of a job may hold what a file name may not.
func TestNameOfALog(t *testing.T) {
	a := waiting()
	a.at("/v1/plugin/csi/oxide")["Allocations"] = []object{ourStub(allocOurs, `../../a\b c`)}
	options, _ := serveNomad(t, a)
	logs, err := nomad.NewOperator(options).Logs(t.Context())
	if err != nil || len(logs) != 1 || logs[0].Name != "..%2F..%2Fa%5Cb%20c_7c7d9b11_plugin" {
		t.Errorf("%+v, %v", logs, err)
	}
}
