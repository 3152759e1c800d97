// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package kubernetes_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	client "github.com/oxidecomputer/oxide-csi-plugin/metadata/kubernetes"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/kubernetes/kubetest"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/metadatatest"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator/kubernetes"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator/orchestratortest"
)

// cluster simulates the API server with Nodes, CSINodes, Pods and Events, as far as planned restarts use it.
// test/identity runs a real API server.
type cluster struct {
	*httptest.Server
	t           *testing.T
	credentials *kubetest.Server

	mu       sync.Mutex
	version  int
	nodes    map[string]object
	csiNodes map[string]object
	pods     map[string]object // by namespace/name
	// covered are the pods with a PodDisruptionBudget. The value is the HTTP status of an eviction.
	covered map[string]int
	events  []object
	calls   []string
	fault   metadatatest.Fault
	status  int // if not 0, the status of every answer
	token   string
	peers   map[string]bool
	repairs chan struct{}
	// meddle is called once, when a Node is read. It makes a concurrent change.
	meddle func(c *cluster)
}

const otherName = "worker-4.example"

func newCluster(t *testing.T) *cluster {
	c := &cluster{
		t: t, nodes: map[string]object{}, csiNodes: map[string]object{}, pods: map[string]object{},
		covered: map[string]int{}, repairs: make(chan struct{}), token: token, peers: map[string]bool{},
	}
	c.Server = httptest.NewTLSServer(c)
	t.Cleanup(c.Close)
	c.credentials = kubetest.Credentials(t, c.Server)
	for name, id := range map[string]string{nodeName: idA, otherName: idB} {
		c.nodes[name] = object{
			"kind":     "Node",
			"metadata": object{"name": name, "uid": "uid-of-" + name, "resourceVersion": "1"},
			"spec":     object{},
		}
		c.register(name, id)
	}
	return c
}

// register writes the CSINode that the kubelet writes for registered plugins.
func (c *cluster) register(name, instanceID string) {
	c.csiNodes[name] = object{"metadata": object{"name": name}, "spec": object{"drivers": []object{
		{"name": "other.example", "nodeID": "i-0123"}, {"name": "csi.oxide.computer", "nodeID": instanceID},
	}}}
}

func (c *cluster) options(node string) client.Options {
	options := c.credentials.Options()
	options.NodeName = node
	return options
}

func (c *cluster) set(do func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	do()
}

func (c *cluster) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c.mu.Lock()
	fault, repaired := c.fault, c.repairs
	c.mu.Unlock()
	switch fault {
	case metadatatest.Down:
		panic(http.ErrAbortHandler)
	case metadatatest.Slow:
		select {
		case <-repaired:
		case <-r.Context().Done():
			return
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls = append(c.calls, r.Method+" "+r.URL.Path)
	c.peers[r.RemoteAddr] = true
	status, answer := c.status, any(nil)
	switch {
	case r.Header.Get("Authorization") != "Bearer "+c.token:
		status = http.StatusUnauthorized
	case fault == metadatatest.Denied:
		status = http.StatusForbidden
	}
	if status == 0 && r.URL.Query().Has("watch") {
		c.watch(w, r)
		return
	}
	if status == 0 {
		status, answer = c.handle(r)
	}
	w.WriteHeader(status)
	if answer == nil {
		answer = object{"kind": "Status", "message": "canary " + r.Header.Get("Authorization")}
	}
	if err := json.NewEncoder(w).Encode(answer); err != nil {
		c.t.Error(err)
	}
}

// watch sends a Node each time that its version changes. The caller holds mu.
func (c *cluster) watch(w http.ResponseWriter, r *http.Request) {
	name := strings.TrimPrefix(r.URL.Query().Get("fieldSelector"), "metadata.name=")
	for last := r.URL.Query().Get("resourceVersion"); r.Context().Err() == nil; {
		n := c.nodes[name]
		if now := n["metadata"].(object)["resourceVersion"].(string); now != last {
			last = now
			_ = json.NewEncoder(w).
				Encode(object{"type": "MODIFIED", "object": n})
			// an error means that the client has disconnected
		}
		_ = http.NewResponseController(w).Flush()
		// A poll: the changes of a Node come from many places, and no channel tells of them.
		c.mu.Unlock()
		time.Sleep(time.Millisecond)
		c.mu.Lock()
	}
}

func (c *cluster) handle(r *http.Request) (status int, answer any) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		c.t.Error(err)
	}
	path := strings.Split(strings.TrimPrefix(r.URL.Path, "/"), "/")
	switch what := path[len(path)-1]; {
	case r.URL.Path == "/api/v1/nodes" && r.URL.Query().Has("fieldSelector"):
		name, items := strings.TrimPrefix(r.URL.Query().Get("fieldSelector"), "metadata.name="), []object{}
		if n := c.nodes[name]; n != nil {
			items = append(items, n)
		}
		return http.StatusOK, object{"kind": "NodeList", "metadata": object{"resourceVersion": "1"}, "items": items}
	case r.URL.Path == "/api/v1/nodes":
		return http.StatusOK, page(c.nodes, r.URL.Query())
	case r.URL.Path == "/apis/storage.k8s.io/v1/csinodes":
		return http.StatusOK, page(c.csiNodes, r.URL.Query())
	case strings.HasPrefix(r.URL.Path, "/apis/storage.k8s.io/v1/csinodes/"):
		if n := c.csiNodes[what]; n != nil {
			return http.StatusOK, n
		}
	case strings.HasPrefix(r.URL.Path, "/api/v1/nodes/") && c.nodes[what] != nil:
		if r.Method == http.MethodPatch {
			return c.patch(c.nodes[what], r.Header.Get("Content-Type"), body)
		}
		n := clone(c.t, c.nodes[what])
		if strings.Contains(r.Header.Get("Accept"), "as=PartialObjectMetadata") {
			delete(n, "spec")
		}
		if c.meddle != nil {
			meddle := c.meddle
			c.meddle = nil
			meddle(c)
		}
		return http.StatusOK, n
	case r.URL.Path == "/api/v1/pods":
		node, ok := strings.CutPrefix(r.URL.Query().Get("fieldSelector"), "spec.nodeName=")
		if !ok {
			return http.StatusBadRequest, nil
		}
		items := []object{}
		for _, p := range c.pods {
			if p["spec"].(object)["nodeName"] == node {
				items = append(items, p)
			}
		}
		return http.StatusOK, object{"items": items}
	case what == "eviction":
		return c.evict(path[3]+"/"+path[5], body), nil
	case len(path) > 4 && path[2] == "namespaces" && path[4] == "events":
		return c.event(r, path[3], what, body)
	}
	return http.StatusNotFound, nil
}

// page returns a list with one object per page, the smallest page that limit allows.
func page(all map[string]object, query url.Values) object {
	var names []string
	for name := range all {
		names = append(names, name)
	}
	slices.Sort(names)
	i := slices.Index(names, query.Get("continue"))
	if query.Get("continue") == "" {
		i = 0
	}
	if i < 0 || i >= len(names) {
		return object{"items": []object{}}
	}
	meta := object{}
	if i+1 < len(names) {
		meta["continue"] = names[i+1]
	}
	return object{"metadata": meta, "items": []object{all[names[i]]}}
}

// patch applies a patch to a Node as the API server does, completely or not at all.
func (c *cluster) patch(n object, mediaType string, body []byte) (status int, answer any) {
	changed := clone(c.t, n)
	switch mediaType {
	case "application/merge-patch+json":
		var p object
		c.decode(body, &p)
		if want, ok := p["metadata"].(object)["resourceVersion"]; ok &&
			want != n["metadata"].(object)["resourceVersion"] {
			return http.StatusConflict, nil
		}
		merge(changed, p)
	default:
		return http.StatusUnsupportedMediaType, nil
	}
	c.version++
	changed["metadata"].(object)["resourceVersion"] = fmt.Sprint("v", c.version)
	for key := range n {
		n[key] = changed[key]
	}
	return http.StatusOK, n
}

// merge applies a JSON merge patch (RFC 7386).
func merge(into, patch object) {
	for key, value := range patch {
		switch value := value.(type) {
		case nil:
			delete(into, key)
		case object:
			inner, ok := into[key].(object)
			if !ok {
				inner = object{}
				into[key] = inner
			}
			merge(inner, value)
		default:
			into[key] = value
		}
	}
}

func (c *cluster) evict(name string, body []byte) (status int) {
	var e struct {
		Kind, APIVersion string
		DeleteOptions    struct{ Preconditions struct{ UID string } }
	}
	c.decode(body, &e)
	p := c.pods[name]
	switch {
	case e.Kind != "Eviction" || e.APIVersion != "policy/v1":
		return http.StatusBadRequest
	case p == nil:
		return http.StatusNotFound
	case p["metadata"].(object)["uid"] != e.DeleteOptions.Preconditions.UID:
		return http.StatusConflict
	case c.covered[name] != 0:
		return c.covered[name]
	}
	p["metadata"].(object)["deletionTimestamp"] = "2026-01-02T03:04:05Z"
	return http.StatusCreated
}

func (c *cluster) decode(body []byte, into any) {
	if err := json.Unmarshal(body, into); err != nil {
		c.t.Errorf("%v: %s", err, body)
	}
}

func clone(t *testing.T, o object) (out object) {
	text, err := json.Marshal(o)
	if err == nil {
		err = json.Unmarshal(text, &out)
	}
	if err != nil {
		t.Error(err)
	}
	return out
}

func TestRestartConformance(t *testing.T) {
	orchestratortest.RunRestart(t, func(t *testing.T) orchestratortest.RestartHarness {
		c := newCluster(t)
		return orchestratortest.RestartHarness{
			NewRequester: func() orchestrator.RestartRequester { return kubernetes.NewRestarts(c.options("")) },
			NewListener:  func() orchestrator.RestartListener { return kubernetes.NewListener(c.options(nodeName)) },
			NewOther:     func() orchestrator.RestartListener { return kubernetes.NewListener(c.options(otherName)) },
			Instance:     idA, Other: idB,
			Break: func(f metadatatest.Fault) { c.set(func() { c.fault = f }) },
			Repair: func() {
				c.set(func() {
					c.fault = ""
					close(c.repairs)
					c.repairs = make(chan struct{})
				})
			},
			Secrets: []string{token, "canary"},
		}
	})
}

// The Node of an instance is found by the node ID in a CSINode, which the kubelet writes. Otherwise it is found by the
// provider ID of a Node, which the cloud controller manager writes.
func TestNodeOfAnInstance(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(c *cluster)
		on     string // the Node that gets the request, or empty
		says   string
	}{
		"registered": {func(*cluster) {}, nodeName, ""},
		"registered on another Node now": {func(c *cluster) {
			c.register(nodeName, idB)
			c.register(otherName, idA)
		}, otherName, ""},
		"not registered": {func(c *cluster) {
			delete(c.csiNodes, nodeName)
			c.nodes[nodeName]["spec"] = object{"providerID": "oxide://" + strings.ToUpper(idA)}
		}, nodeName, ""},
		"registered on two Nodes": {func(c *cluster) {
			c.register(otherName, idA)
		}, "", "the Nodes " + nodeName + ", " + otherName + " have the node ID " + idA + ": sources contradict each other; delete the Node that is gone"},
		"another instance by its provider ID": {func(c *cluster) {
			c.nodes[nodeName]["spec"] = object{"providerID": "oxide://" + idB}
		}, "", "Node " + nodeName + " is instance " + idA + " by its CSINode, and instance " + idB + " by its provider ID: sources contradict each other; find out"},
		"two Nodes with the provider ID": {func(c *cluster) {
			delete(c.csiNodes, nodeName)
			for _, n := range c.nodes {
				n["spec"] = object{"providerID": "oxide://" + idA}
			}
		}, "", "the Nodes "},
		"nowhere": {func(c *cluster) { delete(c.csiNodes, nodeName) }, "", "no Node is instance " + idA + ": no CSINode has this node ID, and no Node this provider ID; check that the node plugin runs there"},
		"provider ID of another cloud": {func(c *cluster) {
			delete(c.csiNodes, nodeName)
			c.nodes[nodeName]["spec"] = object{"providerID": "aws://" + idA}
		}, "", "no Node is instance"},
		"node ID of another driver": {func(c *cluster) {
			c.csiNodes[nodeName]["spec"].(object)["drivers"].([]object)[1]["name"] = "csi.oxide.computer.example"
		}, "", "no Node is instance"},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(t)
			r := kubernetes.NewRestarts(c.options(""))
			if err := r.Request(t.Context(), idA, "1"); err != nil {
				t.Fatal(err)
			}
			c.set(func() { tt.change(c) })
			err := r.Request(t.Context(), idA, "2")
			if tt.says != "" {
				if err == nil || !strings.Contains(err.Error(), tt.says) {
					t.Errorf("error %v, want one that says %q", err, tt.says)
				}
				if _, err := r.Drain(t.Context(), idA, "2"); err == nil || !strings.Contains(err.Error(), tt.says) {
					t.Errorf("a drain has the error %v, want one that says %q", err, tt.says)
				}
				// What the first restart has written can be removed all the same.
				if strings.Contains(tt.says, "contradict") {
					if _, err := r.Withdraw(t.Context(), idA, "1"); err != nil {
						t.Error(err)
					}
				}
				if err := r.Forget(t.Context(), idA, "1"); err != nil {
					t.Error(err)
				}
				if got := c.annotations(nodeName)["csi.oxide.computer/restart"]; got != nil {
					t.Errorf("the request %v is left on the Node", got)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if got := c.annotations(tt.on)["csi.oxide.computer/restart"]; got != "2" {
				t.Errorf("Node %s has the request %v", tt.on, got)
			}
		})
	}
}

func (c *cluster) annotations(name string) object {
	marks, _ := c.nodes[name]["metadata"].(object)["annotations"].(object)
	return marks
}

// The Node that has accepted a restart answers for it, also after another Node has got the instance's ID. Otherwise the
// restart would count as withdrawn, and nothing would start the instance again.
func TestAnswerOfTheNodeThatWasAsked(t *testing.T) {
	c := newCluster(t)
	r := kubernetes.NewRestarts(c.options(""))
	if err := r.Request(t.Context(), idA, "1"); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Drain(t.Context(), idA, "1"); err != nil {
		t.Fatal(err)
	}
	accepted := orchestrator.RestartReply{State: orchestrator.RestartAccepted}
	if err := kubernetes.NewListener(c.options(nodeName)).Reply(t.Context(), "1", accepted); err != nil {
		t.Fatal(err)
	}
	c.set(func() {
		delete(c.csiNodes, nodeName)
		c.register(otherName, idA)
	})
	reply, err := r.Reply(t.Context(), idA, "1")
	if err != nil || reply.State != orchestrator.RestartAccepted {
		t.Errorf("reply: %v, %v", reply, err)
	}
	if reply, err = r.Withdraw(t.Context(), idA, "1"); err != nil || reply.State != orchestrator.RestartAccepted {
		t.Errorf("withdrawal: %v, %v", reply, err)
	}
	if reply, err = r.Withdraw(t.Context(), idA, "2"); err != nil || reply.State != orchestrator.RestartUnanswered {
		t.Errorf("withdrawal of another restart: %v, %v", reply, err)
	}
	for what, end := range map[string]func(context.Context, string, string) error{
		"forget": r.Forget, "undrain": r.Undrain,
	} {
		if err := end(t.Context(), idA, "1"); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	if left := c.annotations(nodeName); len(left) > 0 || c.nodes[nodeName]["spec"].(object)["unschedulable"] != nil {
		t.Errorf("after the restart the Node keeps %v, and is cordoned: %v", left, c.nodes[nodeName]["spec"])
	}
}

// Later calls for an instance do not list all Nodes of the cluster again.
func TestNodesAreRemembered(t *testing.T) {
	c := newCluster(t)
	r := kubernetes.NewRestarts(c.options(""))
	if err := r.Request(t.Context(), idA, "1"); err != nil {
		t.Fatal(err)
	}
	c.set(func() { c.calls = nil })
	for range 3 {
		if _, err := r.Reply(t.Context(), idA, "1"); err != nil {
			t.Fatal(err)
		}
	}
	want := []string{
		"GET /apis/storage.k8s.io/v1/csinodes/" + nodeName, "GET /api/v1/nodes/" + nodeName,
		"GET /apis/storage.k8s.io/v1/csinodes/" + nodeName, "GET /api/v1/nodes/" + nodeName,
		"GET /apis/storage.k8s.io/v1/csinodes/" + nodeName, "GET /api/v1/nodes/" + nodeName,
	}
	if diff := cmp.Diff(want, c.calls); diff != "" {
		t.Error(diff)
	}
}

// The calls change only the annotations of a restart. Forget removes the request and the reply.
func TestAnnotations(t *testing.T) {
	c := newCluster(t)
	r, l := kubernetes.NewRestarts(c.options("")), kubernetes.NewListener(c.options(nodeName))
	c.nodes[nodeName]["metadata"].(object)["annotations"] = object{"other": "stays"}
	if err := r.Request(t.Context(), idA, "1"); err != nil {
		t.Fatal(err)
	}
	if err := l.Reply(
		t.Context(),
		"1",
		orchestrator.RestartReply{State: orchestrator.RestartAccepted, Boot: "b"},
	); err != nil {
		t.Fatal(err)
	}
	want := object{
		"other":                            "stays",
		"csi.oxide.computer/restart":       "1",
		"csi.oxide.computer/restart-reply": `{"restart":"1","state":"accepted","boot":"b"}`,
	}
	if diff := cmp.Diff(want, c.annotations(nodeName)); diff != "" {
		t.Error(diff)
	}
	if err := r.Forget(t.Context(), idA, "1"); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(object{"other": "stays"}, c.annotations(nodeName)); diff != "" {
		t.Error(diff)
	}
}

// If an admission policy rejects a change, the call returns an error.
func TestRefusedChanges(t *testing.T) {
	c := newCluster(t)
	r := kubernetes.NewRestarts(c.options(""))
	for status, says := range map[int]string{
		http.StatusForbidden: "grant the plugin's service account the verb \"list\" on \"csinodes\"", http.StatusServiceUnavailable: "check the API server",
		http.StatusConflict: "HTTP 409", http.StatusUnauthorized: "does not accept the credentials",
	} {
		c.set(func() { c.status = status })
		for what, call := range map[string]func() error{
			"Request":  func() error { return r.Request(t.Context(), idA, "1") },
			"Withdraw": func() error { _, err := r.Withdraw(t.Context(), idA, "1"); return err },
			"Forget":   func() error { return r.Forget(t.Context(), idA, "1") },
		} {
			if err := call(); err == nil || !strings.Contains(err.Error(), says) ||
				strings.Contains(err.Error(), "canary") {
				t.Errorf("%s, HTTP %d: error %v, want one that says %q", what, status, err, says)
			}
		}
	}
}

// workload adds a pod with these changes to the Node.
func (c *cluster) workload(name string, changes ...func(p object)) {
	p := object{
		"metadata": object{
			"namespace":       "shop",
			"name":            name,
			"uid":             "uid-of-" + name,
			"ownerReferences": []object{{"kind": "ReplicaSet", "controller": true}},
		},
		"spec": object{
			"nodeName": nodeName,
			"volumes":  []object{{"name": "data", "persistentVolumeClaim": object{"claimName": "data"}}},
		},
		"status": object{"phase": "Running", "containerStatuses": []object{{"state": object{"running": object{}}}}},
	}
	for _, change := range changes {
		change(p)
	}
	c.pods["shop/"+name] = p
}

func status(phase string, containers ...object) func(p object) {
	return func(p object) { p["status"] = object{"phase": phase, "containerStatuses": containers} }
}

func TestDrain(t *testing.T) {
	waiting := object{"state": object{"waiting": object{"reason": "ContainerCreating"}}}
	owner := func(kind string) func(p object) {
		return func(p object) {
			p["metadata"].(object)["ownerReferences"] = []object{{"kind": "Other"}, {"kind": kind, "controller": true}}
		}
	}
	c := newCluster(t)
	c.workload("app")
	c.workload("guarded")
	c.workload("guarded-twice")
	c.workload("ending", func(p object) { p["metadata"].(object)["deletionTimestamp"] = "2026-01-02T03:04:05Z" })
	c.workload("bare", func(p object) { delete(p["metadata"].(object), "ownerReferences") })
	c.workload(
		"pulls-no-claim",
		status("Pending", waiting),
		func(p object) { p["spec"].(object)["volumes"] = []object{{"name": "config"}} },
	)
	c.workload("initialises", func(p object) {
		p["status"] = object{
			"phase":                 "Pending",
			"initContainerStatuses": []object{{"state": object{"running": object{}}}},
			"containerStatuses":     []object{waiting},
		}
	})
	c.workload(
		"crashes",
		status(
			"Running",
			object{
				"restartCount": 3,
				"state":        object{"waiting": object{"reason": "CrashLoopBackOff"}},
				"lastState":    object{"terminated": object{}},
			},
		),
	)
	c.workload("replaced")
	c.covered["shop/guarded"], c.covered["shop/guarded-twice"] = http.StatusTooManyRequests, http.StatusInternalServerError
	// Drain neither evicts nor returns these.
	c.workload("waits", status("Pending", waiting))
	c.workload("waits-unseen", status("Pending"))
	c.workload("waits-ephemeral", status("Pending", waiting), func(p object) {
		p["spec"].(object)["volumes"] = []object{{"name": "scratch", "ephemeral": object{}}}
	})
	c.workload("completed", status("Succeeded"))
	c.workload("failed", status("Failed"))
	c.workload("daemon", owner("DaemonSet"))
	c.workload("mirror", owner("Node"), func(p object) {
		p["metadata"].(object)["annotations"] = object{"kubernetes.io/config.mirror": "x"}
	})
	c.workload("elsewhere", func(p object) { p["spec"].(object)["nodeName"] = otherName })
	r := kubernetes.NewRestarts(c.options(""))
	drain := func(want ...string) {
		t.Helper()
		left, err := r.Drain(t.Context(), idA, "1")
		if diff := cmp.Diff(want, left); err != nil || diff != "" {
			t.Errorf("%v\n%s", err, diff)
		}
	}
	drain(
		"pod shop/app is ending",
		"pod shop/bare has no controller that would create it again: delete it manually",
		"pod shop/crashes is ending",
		"pod shop/ending is ending",
		"pod shop/guarded cannot be evicted yet: a PodDisruptionBudget allows no disruption",
		"pod shop/guarded-twice cannot be evicted: more than one PodDisruptionBudget covers it, or the API server fails",
		"pod shop/initialises is ending",
		"pod shop/pulls-no-claim is ending",
		"pod shop/replaced is ending",
	)
	if c.nodes[nodeName]["spec"].(object)["unschedulable"] != true {
		t.Error("the Node is not cordoned")
	}
	for _, gone := range []string{"app", "crashes", "ending", "initialises", "pulls-no-claim", "bare", "replaced"} {
		delete(c.pods, "shop/"+gone)
	}
	clear(c.covered)
	drain("pod shop/guarded is ending", "pod shop/guarded-twice is ending")
	delete(c.pods, "shop/guarded")
	delete(c.pods, "shop/guarded-twice")
	drain()
	for _, stays := range []string{"waits", "waits-unseen", "waits-ephemeral", "daemon", "mirror", "elsewhere", "completed", "failed"} {
		if c.pods["shop/"+stays]["metadata"].(object)["deletionTimestamp"] != nil {
			t.Errorf("pod %s was evicted", stays)
		}
	}
}

// Undrain removes a cordon only if a drain of the same restart, or of an earlier one, cordoned the Node.
func TestCordon(t *testing.T) {
	for name, tt := range map[string]struct {
		before func(c *cluster)
		drain  string
		undone string
		want   bool // the Node is cordoned at the end
	}{
		"undrained by the same restart":     {func(*cluster) {}, "1", "1", false},
		"undrained by another restart":      {func(*cluster) {}, "1", "2", true},
		"cordoned by an administrator":      {func(c *cluster) { c.nodes[nodeName]["spec"] = object{"unschedulable": true} }, "1", "1", true},
		"left behind by an earlier restart": {leftBehind, "1", "1", false},
		"undrained by the earlier restart":  {leftBehind, "1", "0", true},
		"by an administrator, then left behind": {func(c *cluster) {
			leftBehind(c)
			delete(c.nodes[nodeName]["spec"].(object), "unschedulable")
		}, "1", "1", false},
		"while the kubelet changes the Node": {func(c *cluster) { c.meddle = heartbeat }, "1", "1", false},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(t)
			tt.before(c)
			r := kubernetes.NewRestarts(c.options(""))
			for range 2 {
				if left, err := r.Drain(t.Context(), idA, tt.drain); err != nil || len(left) > 0 {
					t.Fatal(left, err)
				}
			}
			if c.nodes[nodeName]["spec"].(object)["unschedulable"] != true {
				t.Error("the Node is not cordoned")
			}
			c.set(func() { c.meddle = heartbeat })
			for range 2 {
				if err := r.Undrain(t.Context(), idA, tt.undone); err != nil {
					t.Fatal(err)
				}
			}
			if got := c.nodes[nodeName]["spec"].(object)["unschedulable"] == true; got != tt.want {
				t.Errorf("cordoned: %v, want %v", got, tt.want)
			}
			if _, ours := c.annotations(nodeName)["csi.oxide.computer/restart-cordon"]; ours && !tt.want {
				t.Error("the annotation of the drain is left")
			}
		})
	}
}

// The calls that end a restart succeed when the Node does not come back. They find a Node whose plugin is not
// registered, and a deleted Node has nothing to undo.
func TestUndoneWithoutItsNode(t *testing.T) {
	for name, change := range map[string]func(c *cluster){
		"not registered": func(c *cluster) { delete(c.csiNodes, nodeName) },
		"deleted": func(c *cluster) {
			delete(c.csiNodes, nodeName)
			delete(c.nodes, nodeName)
		},
		"deleted and made anew": func(c *cluster) {
			c.nodes[nodeName]["metadata"].(object)["annotations"] = object{}
			c.nodes[nodeName]["spec"] = object{}
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(t)
			r := kubernetes.NewRestarts(c.options(""))
			for instanceID, restartID := range map[string]string{idA: "1", idB: "2"} {
				if err := r.Request(t.Context(), instanceID, restartID); err != nil {
					t.Fatal(err)
				}
				if left, err := r.Drain(t.Context(), instanceID, restartID); err != nil || len(left) > 0 {
					t.Fatal(left, err)
				}
			}
			c.set(func() { change(c) })
			for range 2 {
				if err := r.Forget(t.Context(), idA, "1"); err != nil {
					t.Error(err)
				}
				if err := r.Undrain(t.Context(), idA, "1"); err != nil {
					t.Error(err)
				}
			}
			if n := c.nodes[nodeName]; n != nil &&
				(len(c.annotations(nodeName)) > 0 || n["spec"].(object)["unschedulable"] != nil) {
				t.Errorf("something of the restart is left: %v", n)
			}
			if len(c.annotations(otherName)) != 2 || c.nodes[otherName]["spec"].(object)["unschedulable"] != true {
				t.Errorf("the drain of another restart is undone: %v", c.nodes[otherName])
			}
		})
	}
}

func leftBehind(c *cluster) {
	c.nodes[nodeName]["spec"] = object{"unschedulable": true}
	c.nodes[nodeName]["metadata"].(object)["annotations"] = object{"csi.oxide.computer/restart-cordon": "0"}
}

// heartbeat changes the Node as the kubelet does, between the plugin's read and its write.
func heartbeat(c *cluster) {
	c.version++
	c.nodes[nodeName]["metadata"].(object)["resourceVersion"] = fmt.Sprint("v", c.version)
}

// Without a token file, the calls of a restart return the same error as the provider.
func TestRestartsWithoutCredentials(t *testing.T) {
	c := newCluster(t)
	if err := os.Remove(filepath.Join(c.credentials.Dir, "token")); err != nil {
		t.Fatal(err)
	}
	_, _, err := kubernetes.NewListener(c.options(nodeName)).Requested(t.Context())
	if err == nil || !strings.Contains(err.Error(), "wait for the token in") {
		t.Error(err)
	}
}

// A listener keeps its connection. It reports an expired token, and works again with a new token or after the server
// was down.
func TestConnectionIsKept(t *testing.T) {
	for name, asks := range map[string]func(client.Options) func() error{
		"Listener": func(options client.Options) func() error {
			l := kubernetes.NewListener(options)
			return func() error { _, _, err := l.Requested(t.Context()); return err }
		},
		"Node": func(options client.Options) func() error {
			n := kubernetes.NewNode(options)
			return func() error { _, err := n.RemoveTaint(t.Context(), taintKey, orchestrator.Registration{}); return err }
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(t)
			ask := asks(c.options(nodeName))
			for range 5 {
				if err := ask(); err != nil {
					t.Fatal(err)
				}
			}
			c.set(func() {
				if len(c.peers) != 1 {
					t.Errorf("connections from %v", c.peers)
				}
				c.token = "another"
			})
			if err := ask(); err == nil || !strings.Contains(err.Error(), "HTTP 401") {
				t.Errorf("with an old token: %v", err)
			}
			c.credentials.Write("token", "another\n")
			if err := ask(); err != nil {
				t.Errorf("with a new token: %v", err)
			}
			c.CloseClientConnections()
			c.set(func() { c.fault = metadatatest.Down })
			if err := ask(); err == nil {
				t.Error("the server is down: no error")
			}
			c.set(func() { c.fault = "" })
			if err := ask(); err != nil {
				t.Errorf("the server is up again: %v", err)
			}
		})
	}
}

// A withdrawal and an acceptance at the same time: whichever is written first counts, and the other call finds it.
func TestWithdrawAndAcceptAtTheSameTime(t *testing.T) {
	accepted := orchestrator.RestartReply{State: orchestrator.RestartAccepted, Boot: "b"}
	setup := func() (*cluster, *kubernetes.Restarts, *kubernetes.Listener) {
		c := newCluster(t)
		r, l := kubernetes.NewRestarts(c.options("")), kubernetes.NewListener(c.options(nodeName))
		if err := r.Request(t.Context(), idA, "1"); err != nil {
			t.Fatal(err)
		}
		return c, r, l
	}
	t.Run("withdrawn before it is accepted", func(t *testing.T) {
		c, _, l := setup()
		c.set(func() {
			c.meddle = func(c *cluster) {
				delete(c.annotations(nodeName), "csi.oxide.computer/restart")
				heartbeat(c)
			}
		})
		if err := l.Reply(
			t.Context(),
			"1",
			accepted,
		); err == nil ||
			c.annotations(nodeName)["csi.oxide.computer/restart-reply"] != nil {
			t.Errorf("Reply: %v, %v", err, c.annotations(nodeName))
		}
	})
	t.Run("accepted before it is withdrawn", func(t *testing.T) {
		c, r, _ := setup()
		c.set(func() {
			c.meddle = func(c *cluster) {
				c.annotations(nodeName)["csi.oxide.computer/restart-reply"] = accepted.Text("1")
				heartbeat(c)
			}
		})
		if got, err := r.Withdraw(
			t.Context(),
			idA,
			"1",
		); err != nil || got != accepted ||
			c.annotations(nodeName)["csi.oxide.computer/restart"] != "1" {
			t.Errorf("Withdraw: %+v, %v, %v", got, err, c.annotations(nodeName))
		}
	})
}
