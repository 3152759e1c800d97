// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package nomad_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/metadatatest"
	client "github.com/oxidecomputer/oxide-csi-plugin/metadata/nomad"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator/nomad"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator/orchestratortest"
)

const (
	idA   = "6f3a1c9e-2b7d-4e58-9a41-0d5c8e7f1a23"
	idB   = "b81d0f42-77c3-4c0a-8e6f-93a5d2b4c716"
	token = "canary0a-8c1e-4f6e-9d33-5a2b7c9e1f04"
)

type object = map[string]any

// region simulates the servers of a region and two clients with their agents, as far as planned restarts use them.
// test/identity runs a real Nomad.
type region struct {
	t *testing.T

	mu      sync.Mutex
	changed *sync.Cond
	index   uint64
	// meta is the metadata that each client has, and known is the metadata that the servers have of it, by node.
	meta, known map[string]map[string]string
	lag         bool // the servers do not receive changes of the clients' metadata
	down        map[string]bool
	hangs       map[string]bool // the clients that do not answer, which is no error
	eligibility map[string]string
	instances   map[string]string // instance IDs that node plugins report, by node
	unhealthy   map[string]bool   // the nodes whose node plugin is not healthy
	allocations []object
	stopped     []string
	fault       metadatatest.Fault
	repairs     chan struct{}
}

const nodeA, nodeB = "a0000000-0000-4000-8000-00000000000a", "b0000000-0000-4000-8000-00000000000b"

func newRegion(t *testing.T) *region {
	r := &region{
		t:       t,
		index:   10,
		repairs: make(chan struct{}),
		down:    map[string]bool{},
		hangs:   map[string]bool{},
		meta: map[string]map[string]string{
			nodeA: {"vault": "canary"},
			nodeB: {},
		},
		known: map[string]map[string]string{nodeA: {}, nodeB: {}},
		eligibility: map[string]string{
			nodeA: "eligible",
			nodeB: "eligible",
		},
		instances: map[string]string{nodeA: idA, nodeB: idB},
	}
	r.changed = sync.NewCond(&r.mu)
	return r
}

// agent is the HTTP API of a node's agent.
func (r *region) agent(node string) client.Options {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) { r.serve(w, q, node) }))
	r.t.Cleanup(s.Close)
	return client.Options{Address: s.URL, Token: token}
}

func (r *region) set(do func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	do()
	r.index++
	r.changed.Broadcast()
}

func (r *region) serve(w http.ResponseWriter, q *http.Request, local string) {
	r.mu.Lock()
	fault, repaired := r.fault, r.repairs
	r.mu.Unlock()
	switch fault {
	case metadatatest.Down:
		panic(http.ErrAbortHandler)
	case metadatatest.Slow:
		select {
		case <-repaired:
		case <-q.Context().Done():
			return
		}
	}
	stop := make(chan struct{})
	defer close(stop)
	go func() { // wakes the blocking query of a client that has disconnected
		select {
		case <-q.Context().Done():
			r.changed.Broadcast()
		case <-stop:
		}
	}()
	r.mu.Lock()
	defer r.mu.Unlock()
	if q.Header.Get("X-Nomad-Token") != token || fault == metadatatest.Denied {
		http.Error(w, "Permission denied for "+q.Header.Get("X-Nomad-Token"), http.StatusForbidden)
		return
	}
	status, answer := r.handle(q, local)
	w.Header().Set("X-Nomad-Index", fmt.Sprint(r.index))
	w.WriteHeader(status)
	if err := json.NewEncoder(w).Encode(answer); err != nil {
		r.t.Error(err)
	}
}

func (r *region) handle(q *http.Request, local string) (status int, answer any) {
	path := strings.Split(q.URL.Path, "/")
	switch {
	case q.URL.Path == "/v1/client/metadata" && q.Method == http.MethodGet:
		node := q.URL.Query().Get("node_id")
		if node == "" {
			node = local
		}
		for r.hangs[node] && q.Context().Err() == nil {
			r.changed.Wait()
		}
		if r.down[node] || r.hangs[node] {
			return http.StatusInternalServerError, "No path to node"
		}
		return http.StatusOK, object{"Meta": r.meta[node]}
	case q.URL.Path == "/v1/client/metadata":
		var change struct {
			NodeID string
			Meta   map[string]*string
		}
		r.decode(q, &change)
		if change.NodeID == "" {
			change.NodeID = local
		}
		if r.down[change.NodeID] {
			return http.StatusInternalServerError, "No path to node"
		}
		meta := r.meta[change.NodeID]
		for key, value := range change.Meta {
			if delete(meta, key); value != nil {
				meta[key] = *value
			}
		}
		if !r.lag {
			r.learn(change.NodeID)
		}
		return http.StatusOK, object{"Meta": meta}
	case q.URL.Path == "/v1/plugins":
		return http.StatusOK, []object{
			{"ID": "other", "Provider": "other.example"},
			{"ID": "oxide", "Provider": "csi.oxide.computer"},
			{"ID": "monolith", "Provider": "csi.oxide.computer"},
		}
	case q.URL.Path == "/v1/plugin/csi/oxide", q.URL.Path == "/v1/plugin/csi/monolith":
		nodes := object{}
		for node, instance := range r.instances {
			nodes[node] = object{"NodeInfo": object{"ID": instance}, "Healthy": !r.unhealthy[node]}
		}
		return http.StatusOK, object{"ID": "oxide", "Nodes": nodes}
	case q.URL.Path == "/v1/nodes":
		list := []object{}
		for node, eligibility := range r.eligibility {
			list = append(list, object{"ID": node, "SchedulingEligibility": eligibility})
		}
		return http.StatusOK, list
	case len(path) == 4 && path[2] == "node" && r.known[path[3]] == nil:
		return http.StatusNotFound, "node not found"
	case len(path) == 4 && path[2] == "node":
		var after uint64
		if _, err := fmt.Sscan(q.URL.Query().Get("index"), &after); err == nil {
			for r.index <= after && q.Context().Err() == nil {
				r.changed.Wait()
			}
		}
		return http.StatusOK, object{"Meta": r.known[path[3]], "SchedulingEligibility": r.eligibility[path[3]]}
	case len(path) == 5 && path[4] == "allocations":
		return http.StatusOK, r.allocations
	case len(path) == 5 && path[4] == "eligibility":
		var change struct{ NodeID, Eligibility string }
		r.decode(q, &change)
		r.eligibility[path[3]] = change.Eligibility
		return http.StatusOK, object{}
	case len(path) == 5 && path[2] == "allocation" && path[4] == "stop":
		for _, a := range r.allocations {
			if a["ID"] == path[3] {
				a["DesiredTransition"] = object{"Migrate": true}
				r.stopped = append(r.stopped, path[3])
			}
		}
		return http.StatusOK, object{}
	}
	return http.StatusNotFound, "no such page"
}

func (r *region) decode(q *http.Request, into any) {
	if err := json.NewDecoder(q.Body).Decode(into); err != nil {
		r.t.Error(err)
	}
}

// learn copies a client's metadata to the servers.
func (r *region) learn(node string) {
	r.known[node] = maps.Clone(r.meta[node])
	r.index++
	r.changed.Broadcast()
}

func TestRestartConformance(t *testing.T) {
	orchestratortest.RunRestart(t, func(t *testing.T) orchestratortest.RestartHarness {
		r := newRegion(t)
		controller, a, b := r.agent("none"), r.agent(nodeA), r.agent(nodeB)
		return orchestratortest.RestartHarness{
			NewRequester: func() orchestrator.RestartRequester { return nomad.NewRestarts(controller) },
			NewListener:  func() orchestrator.RestartListener { return nomad.NewListener(a, idA) },
			NewOther:     func() orchestrator.RestartListener { return nomad.NewListener(b, idB) },
			Instance:     idA,
			Other:        idB,
			Break:        func(f metadatatest.Fault) { r.set(func() { r.fault = f }) },
			Repair: func() {
				r.set(func() {
					r.fault = ""
					close(r.repairs)
					r.repairs = make(chan struct{})
				})
			},
			Secrets: []string{token, "canary"},
			Cannot: map[metadatatest.Ability]string{
				orchestratortest.CanReportChanges: "its client's metadata has no blocking query",
			},
		}
	})
}

// Reply returns only when the servers have the reply. The client stops with the guest, and then only the servers
// answer.
func TestReplyWaitsForTheServers(t *testing.T) {
	r := newRegion(t)
	requester, listener := nomad.NewRestarts(r.agent("none")), nomad.NewListener(r.agent(nodeA), idA)
	if err := requester.Request(t.Context(), idA, "1"); err != nil {
		t.Fatal(err)
	}
	r.set(func() { r.lag = true })
	accepted := orchestrator.RestartReply{State: orchestrator.RestartAccepted, Boot: "b"}
	replied := make(chan error, 1)
	go func() { replied <- listener.Reply(t.Context(), "1", accepted) }()
	// Other changes do not end the wait.
	for r.read(nodeA, "unique.oxide.restart_reply") == "" {
		r.set(func() {})
	}
	select {
	case err := <-replied:
		t.Fatalf("Reply returned before the servers had the reply: %v", err)
	default:
	}
	r.set(func() { r.learn(nodeA) })
	if err := <-replied; err != nil {
		t.Fatal(err)
	}
	r.set(func() { r.down[nodeA] = true })
	if got, err := requester.Reply(t.Context(), idA, "1"); err != nil || got != accepted {
		t.Errorf("Reply of a node that is down: %+v, %v", got, err)
	}
	for what, call := range map[string]func() error{
		"Request":  func() error { return requester.Request(t.Context(), idA, "2") },
		"Withdraw": func() error { _, err := requester.Withdraw(t.Context(), idA, "1"); return err },
		"Forget":   func() error { return requester.Forget(t.Context(), idA, "1") },
	} {
		if err := call(); err == nil {
			t.Errorf("%s of a node that is down: no error", what)
		}
	}
	// The node is up, and its plugin is not healthy yet.
	r.set(func() {
		r.down[nodeA] = false
		delete(r.instances, nodeA)
	})
	if got, err := requester.Reply(t.Context(), idA, "1"); err != nil || got != accepted {
		t.Errorf("Reply of a node whose plugin is not healthy: %+v, %v", got, err)
	}
	if _, err := nomad.NewRestarts(r.agent("none")).
		Reply(t.Context(), idA, "1"); err == nil ||
		!strings.Contains(err.Error(), "no Nomad node is instance "+idA) {
		t.Errorf("Reply of an unknown node: %v", err)
	}
}

func (r *region) read(node, key string) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.meta[node][key]
}

// Withdraw returns the reply of a restart that was accepted before. If that answer is lost, Reply returns it again.
func TestWithdrawOfAnAcceptedRestart(t *testing.T) {
	r := newRegion(t)
	requester := nomad.NewRestarts(r.agent("none"))
	accepted := orchestrator.RestartReply{State: orchestrator.RestartAccepted, Boot: "b"}
	r.meta[nodeA]["unique.oxide.restart_reply"] = accepted.Text("1")
	if got, err := requester.Withdraw(t.Context(), idA, "1"); err != nil || got != accepted {
		t.Fatalf("%+v, %v", got, err)
	}
	if got, err := requester.Reply(t.Context(), idA, "1"); err != nil || got != accepted {
		t.Fatalf("%+v, %v", got, err)
	}
}

// A node that reports the instance's ID only since the request does not answer for the node that was asked.
func TestAnswerOfTheNodeThatWasAsked(t *testing.T) {
	accepted := orchestrator.RestartReply{State: orchestrator.RestartAccepted}
	type call = func(r *nomad.Restarts, ctx context.Context, instance, restart string) (orchestrator.RestartReply, error)
	for name, do := range map[string]call{"reply": (*nomad.Restarts).Reply, "withdrawal": (*nomad.Restarts).Withdraw} {
		t.Run(name, func(t *testing.T) {
			r := newRegion(t)
			requester := nomad.NewRestarts(r.agent("none"))
			if err := requester.Request(t.Context(), idA, "1"); err != nil {
				t.Fatal(err)
			}
			if err := nomad.NewListener(r.agent(nodeA), idA).Reply(t.Context(), "1", accepted); err != nil {
				t.Fatal(err)
			}
			r.set(func() {
				delete(r.instances, nodeA)
				r.down[nodeA], r.instances[nodeB] = true, idA
			})
			if got, err := do(requester, t.Context(), idA, "1"); err != nil || got != accepted {
				t.Errorf("%+v, %v", got, err)
			}
			if got, err := requester.Withdraw(t.Context(), idA, "2"); err != nil || got.State != orchestrator.RestartUnanswered {
				t.Errorf("withdrawal of another restart: %+v, %v", got, err)
			}
			r.set(func() { r.down[nodeA] = false })
			if err := requester.Forget(t.Context(), idA, "1"); err != nil || r.read(nodeA, "unique.oxide.restart") != "" {
				t.Errorf("the request stays, %v", err)
			}
		})
	}
}

func TestRestartKeys(t *testing.T) {
	r := newRegion(t)
	requester, listener := nomad.NewRestarts(r.agent("none")), nomad.NewListener(r.agent(nodeA), idA)
	if err := requester.Request(t.Context(), idA, "1"); err != nil {
		t.Fatal(err)
	}
	if err := listener.Reply(
		t.Context(),
		"1",
		orchestrator.RestartReply{State: orchestrator.RestartRefused, Reason: "why"},
	); err != nil {
		t.Fatal(err)
	}
	if err := requester.Report(
		t.Context(),
		idA,
		orchestrator.Report{Event: orchestrator.EventRestartRefused, Message: "why"},
	); err != nil {
		t.Fatal(err)
	}
	report := r.read(nodeA, "unique.oxide.restart_report")
	if !strings.HasSuffix(report, "Z RestartRefused: why") {
		t.Errorf("the report is %q", report)
	}
	want := map[string]string{
		"vault":                       "canary",
		"unique.oxide.restart":        "1",
		"unique.oxide.restart_reply":  `{"restart":"1","state":"refused","reason":"why"}`,
		"unique.oxide.restart_report": report,
	}
	if diff := cmp.Diff(want, r.meta[nodeA]); diff != "" {
		t.Error(diff)
	}
}

// allocate makes an allocation on the node with these changes.
func (r *region) allocate(id string, changes ...func(a object)) {
	a := object{
		"ID":            id,
		"Name":          "db.cache[0]",
		"Namespace":     "shop",
		"JobID":         "db-" + id,
		"TaskGroup":     "cache",
		"DesiredStatus": "run",
		"ClientStatus":  "running",
		"Job": object{
			"Type":       "service",
			"TaskGroups": []object{{"Name": "other"}, {"Name": "cache", "Volumes": object{"data": object{"Type": "csi"}}}},
		},
		"TaskStates": object{"redis": object{"State": "running", "StartedAt": "2026-01-02T03:04:05Z"}},
	}
	for _, change := range changes {
		change(a)
	}
	r.allocations = append(r.allocations, a)
}

func with(key string, value any) func(a object) { return func(a object) { a[key] = value } }

func TestDrain(t *testing.T) {
	r := newRegion(t)
	pending := with("ClientStatus", "pending")
	unstarted := with("TaskStates", object{"redis": object{"State": "pending", "StartedAt": "0001-01-01T00:00:00Z"}})
	job := func(kind string) func(a object) { return func(a object) { a["Job"].(object)["Type"] = kind } }
	r.allocate("00000001")
	r.allocate("00000002", with("JobID", "db-00000001"))
	r.allocate("00000003", with("DesiredStatus", "stop"))
	r.allocate("00000004", job("batch"))
	r.allocate("00000005", pending) // the client restarts its task
	r.allocate("00000006", pending, unstarted, func(a object) { a["TaskGroup"] = "other" })
	// Drain neither stops nor returns these.
	r.allocate("00000007", pending, unstarted)
	r.allocate("00000008", pending, with("TaskStates", nil))
	r.allocate("00000009", job("system"))
	r.allocate("0000000a", job("sysbatch"))
	r.allocate("0000000b", with("ClientStatus", "complete"), with("DesiredStatus", "stop"))
	r.allocate("0000000c", with("ClientStatus", "failed"))
	requester := nomad.NewRestarts(r.agent("none"))
	drain := func(want ...string) {
		t.Helper()
		left, err := requester.Drain(t.Context(), idA, "1")
		if diff := cmp.Diff(want, left); err != nil || diff != "" {
			t.Errorf("%v\n%s", err, diff)
		}
	}
	first := []string{
		"allocation 00000001 (db.cache[0] of job db-00000001) is ending",
		"allocation 00000002 (db.cache[0] of job db-00000001) waits until another allocation of its group has ended",
		"allocation 00000003 (db.cache[0] of job db-00000003) is ending",
		"allocation 00000004 (db.cache[0] of job db-00000004) belongs to a batch job: wait for its end, or stop it",
		"allocation 00000005 (db.cache[0] of job db-00000005) is ending",
		"allocation 00000006 (db.cache[0] of job db-00000006) is ending",
	}
	drain(first...)
	drain(first...)
	if r.eligibility[nodeA] != "ineligible" || r.eligibility[nodeB] != "eligible" {
		t.Errorf("eligibility: %v", r.eligibility)
	}
	for i := range 6 {
		if i != 1 {
			r.allocations[i]["ClientStatus"] = "complete"
		}
	}
	drain("allocation 00000002 (db.cache[0] of job db-00000001) is ending")
	r.allocations[1]["ClientStatus"] = "complete"
	drain()
	slices.Sort(r.stopped)
	if diff := cmp.Diff([]string{"00000001", "00000002", "00000005", "00000006"}, r.stopped); diff != "" {
		t.Error(diff)
	}
}

// Undrain makes a node eligible only if a drain of the same restart, or of an earlier one, made it ineligible.
func TestEligibility(t *testing.T) {
	leftBehind := func(r *region) {
		r.eligibility[nodeA] = "ineligible"
		r.meta[nodeA]["unique.oxide.restart_drain"] = "0"
	}
	for name, tt := range map[string]struct {
		before func(r *region)
		undone string
		want   string
	}{
		"undrained by the same restart":     {func(*region) {}, "1", "eligible"},
		"undrained by another restart":      {func(*region) {}, "2", "ineligible"},
		"ineligible by an operator":         {func(r *region) { r.eligibility[nodeA] = "ineligible" }, "1", "ineligible"},
		"left behind by an earlier restart": {leftBehind, "1", "eligible"},
		"undrained by the earlier restart":  {leftBehind, "0", "ineligible"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRegion(t)
			tt.before(r)
			requester := nomad.NewRestarts(r.agent("none"))
			for range 2 {
				if left, err := requester.Drain(t.Context(), idA, "1"); err != nil || len(left) > 0 {
					t.Fatal(left, err)
				}
			}
			for range 2 {
				if err := requester.Undrain(t.Context(), idA, tt.undone); err != nil {
					t.Fatal(err)
				}
			}
			if got := r.eligibility[nodeA]; got != tt.want {
				t.Errorf("the node is %s, want %s", got, tt.want)
			}
			if left := r.read(nodeA, "unique.oxide.restart_drain"); left != "" && tt.want == "eligible" {
				t.Errorf("the mark of the drain is left in the metadata: %q", left)
			}
		})
	}
}

// A request or a drain goes to the node whose healthy plugin reports the instance. If two could be meant, it goes to
// none.
func TestNodeOfAnInstance(t *testing.T) {
	unhealthy := func(nodes ...string) func(*region) {
		return func(r *region) {
			r.instances[nodeA], r.instances[nodeB] = idA, idA
			r.unhealthy = map[string]bool{}
			for _, node := range nodes {
				r.unhealthy[node] = true
			}
		}
	}
	for name, tt := range map[string]struct {
		change func(*region)
		seen   bool // the instance was found on nodeA before
		on     string
	}{
		"one":                                 {func(*region) {}, false, nodeA},
		"one that is not healthy":             {func(r *region) { r.unhealthy = map[string]bool{nodeA: true} }, false, nodeA},
		"the old client of the same instance": {unhealthy(nodeA), true, nodeB},
		"an old client beside the right one":  {unhealthy(nodeB), false, nodeA},
		"two healthy":                         {unhealthy(), true, ""},
		"two that are not healthy":            {unhealthy(nodeA, nodeB), false, ""},
		"two, one of them seen before":        {unhealthy(nodeA, nodeB), true, nodeA},
		"another that is not healthy": {func(r *region) {
			delete(r.instances, nodeA)
			r.instances[nodeB], r.unhealthy = idA, map[string]bool{nodeB: true}
		}, true, nodeA},
		"none, but seen before": {func(r *region) { delete(r.instances, nodeA) }, true, nodeA},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRegion(t)
			requester := nomad.NewRestarts(r.agent("none"))
			if tt.seen {
				if _, err := requester.Reply(t.Context(), idA, "1"); err != nil {
					t.Fatal(err)
				}
			}
			r.set(func() { tt.change(r) })
			_, drain := requester.Drain(t.Context(), idA, "1")
			for what, err := range map[string]error{"request": requester.Request(t.Context(), idA, "1"), "drain": drain} {
				if tt.on != "" && err != nil || tt.on == "" && !errors.Is(err, metadata.ErrConflict) {
					t.Errorf("%s: %v", what, err)
				}
			}
			for _, node := range []string{nodeA, nodeB} {
				if got := r.read(node, "unique.oxide.restart") == "1"; got != (node == tt.on) {
					t.Errorf("the request is on node %s: %t", node, got)
				}
				if got := r.eligibility[node] == "ineligible"; got != (node == tt.on) {
					t.Errorf("node %s is drained: %t", node, got)
				}
			}
		})
	}
}

// A client that hangs leaves time to ask the servers, and it does not hold up the end of another node's drain.
func TestClientHangs(t *testing.T) {
	r := newRegion(t)
	requester := nomad.NewRestarts(r.agent("none"))
	if err := requester.Request(t.Context(), idA, "1"); err != nil {
		t.Fatal(err)
	}
	accepted := orchestrator.RestartReply{State: orchestrator.RestartAccepted, Boot: "b"}
	if err := nomad.NewListener(r.agent(nodeA), idA).Reply(t.Context(), "1", accepted); err != nil {
		t.Fatal(err)
	}
	if left, err := requester.Drain(t.Context(), idB, "2"); err != nil || len(left) > 0 {
		t.Fatal(left, err)
	}
	r.set(func() {
		r.hangs[nodeA] = true
		r.eligibility[nodeA] = "ineligible"
	})
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	if got, err := requester.Reply(ctx, idA, "1"); err != nil || got != accepted {
		t.Errorf("Reply of a node that hangs: %+v, %v", got, err)
	}
	for range 3 { // maps have no order
		began := time.Now()
		if err := requester.Undrain(t.Context(), idB, "2"); err != nil || time.Since(began) > time.Second {
			t.Errorf("Undrain: %v, after %s", err, time.Since(began))
		}
	}
}

// Undrain succeeds when the node does not come back. It finds the node without the node's plugin, and a purged node has
// nothing to undo.
func TestUndrainedWithoutItsNode(t *testing.T) {
	purge := func(r *region) {
		delete(r.instances, nodeA)
		delete(r.eligibility, nodeA)
		delete(r.known, nodeA)
		r.down[nodeA] = true
	}
	for name, tt := range map[string]struct {
		change func(r *region)
		anew   bool // the controller has restarted since the drain
	}{
		"plugin not known":        {func(r *region) { delete(r.instances, nodeA) }, true},
		"purged":                  {purge, false},
		"purged, another process": {purge, true},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRegion(t)
			requester := nomad.NewRestarts(r.agent("none"))
			for instanceID, restartID := range map[string]string{idA: "1", idB: "2"} {
				if left, err := requester.Drain(t.Context(), instanceID, restartID); err != nil || len(left) > 0 {
					t.Fatal(left, err)
				}
			}
			r.set(func() { tt.change(r) })
			if tt.anew {
				requester = nomad.NewRestarts(r.agent("none"))
			}
			for range 2 {
				if err := requester.Undrain(t.Context(), idA, "1"); err != nil {
					t.Error(err)
				}
			}
			if got := r.eligibility[nodeA]; got == "ineligible" {
				t.Error("the node is still drained")
			}
			if r.eligibility[nodeB] != "ineligible" || r.read(nodeB, "unique.oxide.restart_drain") != "2" {
				t.Error("the drain of another restart is undone")
			}
		})
	}
}

// Nomad does not report changes of a client's metadata, so Changes signals every five seconds.
func TestChangesArePolled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		changes, began := nomad.NewListener(client.Options{}, idA).Changes(ctx), time.Now()
		for _, want := range []time.Duration{0, 5 * time.Second, 10 * time.Second} {
			if <-changes; time.Since(began) != want {
				t.Errorf("signalled after %s, want %s", time.Since(began), want)
			}
		}
	})
}
