// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build identity

package identity_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"

	client "github.com/oxidecomputer/oxide-csi-plugin/metadata/kubernetes"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/metadatatest"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator/kubernetes"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator/orchestratortest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
)

const (
	manifests  = "../../deploy/k8s/"
	controller = "oxide-csi-controller"
	otherName  = "worker-4.example"
)

// restarts is a cluster with the rights of the component for planned restarts, and with tokens of the plugin's pods.
type restarts struct {
	*cluster
	// accounts are the folders with each pod's credentials, by account and node.
	accounts map[string]string
	tokens   []string
}

func TestKubernetesRestarts(t *testing.T) {
	r := &restarts{cluster: newCluster(t), accounts: map[string]string{}}
	r.makeNodes()
	r.grant(manifests+"base/controller.yaml", "ServiceAccount", "ClusterRole", "ClusterRoleBinding")
	r.widen(manifests + "restart/kustomization.yaml")
	r.grant(manifests+"restart/policy.yaml", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
	r.pod(controller, nodeName)
	r.pod(account, nodeName)
	r.pod(account, otherName)
	r.awaitPolicy()
	t.Run("conformance", r.conformance)
	t.Run("rights", r.rights)
	t.Run("report", r.report)
	t.Run("drain", r.drain)
}

// makeNodes creates both Nodes again, with the status that a kubelet writes.
func (r *restarts) makeNodes() {
	for name, id := range map[string]string{nodeName: idA, otherName: idB} {
		for _, path := range []string{"/api/v1/nodes/" + name, "/apis/storage.k8s.io/v1/csinodes/" + name} {
			if status := r.try("DELETE", path, nil); status != http.StatusOK && status != http.StatusNotFound {
				r.t.Errorf("delete %s: HTTP %d", path, status)
			}
		}
		r.do(
			"POST",
			"/api/v1/nodes",
			object{"metadata": object{"name": name, "labels": object{"a": "b"}, "annotations": object{"other": "stays"}}},
			nil,
		)
		r.do(
			"POST",
			"/apis/storage.k8s.io/v1/csinodes",
			object{"metadata": object{"name": name}, "spec": object{"drivers": []object{
				{"name": "csi.oxide.computer", "nodeID": id, "topologyKeys": []string{"topology.csi.oxide.computer/rack"}},
			}}},
			nil,
		)
	}
}

// paths are the API paths by kind.
var paths = map[string]string{
	"ServiceAccount": "/api/v1/namespaces/" + namespace + "/serviceaccounts",
	"ClusterRole":    "/apis/rbac.authorization.k8s.io/v1/clusterroles", "ClusterRoleBinding": bindings,
	"ValidatingAdmissionPolicy":        "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies",
	"ValidatingAdmissionPolicyBinding": "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings",
}

// grant creates the objects of a manifest that are of these kinds.
func (r *restarts) grant(file string, kinds ...string) {
	text, err := os.ReadFile(file)
	must(r.t, err)
	made := map[string]bool{}
	for decoder := yaml.NewDecoder(bytes.NewReader(text)); ; {
		var o object
		if err := decoder.Decode(&o); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			r.t.Fatal(err)
		}
		for _, kind := range kinds {
			if o["kind"] == kind {
				r.do("POST", paths[kind], o, nil)
				made[kind] = true
			}
		}
	}
	if len(made) != len(kinds) {
		r.t.Fatalf("%s has of %v only %v", file, kinds, made)
	}
}

// widen adds a component's rules to the cluster roles.
func (r *restarts) widen(file string) {
	text, err := os.ReadFile(file)
	must(r.t, err)
	var component struct {
		Patches []struct {
			Target struct{ Kind, Name string }
			Patch  string
		}
	}
	must(r.t, yaml.Unmarshal(text, &component))
	widened := 0
	for _, p := range component.Patches {
		if p.Target.Kind != "ClusterRole" {
			continue
		}
		var rules []object
		must(r.t, yaml.Unmarshal([]byte(p.Patch), &rules))
		var role object
		path := paths["ClusterRole"] + "/" + p.Target.Name
		r.do("GET", path, nil, &role)
		for _, rule := range rules {
			role["rules"] = append(role["rules"].([]any), rule["value"])
			widened++
		}
		r.do("PUT", path, role, nil)
	}
	if widened == 0 {
		r.t.Fatalf("%s adds no rules", file)
	}
}

// pod creates a pod of an account on a node, and requests the pod's token.
func (r *restarts) pod(account, node string) {
	token := r.podToken(namespace, account, node)
	dir := r.t.TempDir()
	must(r.t, os.WriteFile(filepath.Join(dir, "ca.crt"), r.ca.pem, 0o600))
	must(r.t, os.WriteFile(filepath.Join(dir, "token"), []byte(token), 0o600))
	r.accounts[account+" "+node] = dir
	r.tokens = append(r.tokens, token)
}

// podToken is the token of a new pod of an account on a node.
func (r *restarts) podToken(namespace, account, node string) string {
	name := account + "-" + strings.SplitN(node, ".", 2)[0]
	in := "/api/v1/namespaces/" + namespace
	var made struct{ Metadata struct{ UID string } }
	r.do("POST", in+"/pods", object{"metadata": object{"name": name}, "spec": object{
		"serviceAccountName": account, "nodeName": node, "containers": []object{{"name": "oxide-plugin", "image": "none"}},
	}}, &made)
	var answer struct{ Status struct{ Token string } }
	r.do(
		"POST",
		in+"/serviceaccounts/"+account+"/token",
		object{"spec": object{"expirationSeconds": 3600, "boundObjectRef": object{
			"kind": "Pod", "apiVersion": "v1", "name": name, "uid": made.Metadata.UID,
		}}},
		&answer,
	)
	return answer.Status.Token
}

func (r *restarts) options(account, node string) client.Options {
	host, port, err := net.SplitHostPort(r.gate.address)
	must(r.t, err)
	return client.Options{NodeName: node, Host: host, Port: port, ServiceAccount: r.accounts[account+" "+node]}
}

func (r *restarts) requester() *kubernetes.Restarts {
	return kubernetes.NewRestarts(r.options(controller, nodeName))
}

// awaitPolicy waits until the admission policy is enforced and the rights apply.
func (r *restarts) awaitPolicy() {
	tries := 0
	r.server.eventually("the policy is enforced", func() bool {
		tries++ // A change without effect is allowed.
		return r.patch(
			account,
			nodeName,
			nodeName,
			fmt.Sprintf(`{"metadata":{"labels":{"x":"%d"}}}`, tries),
		) == http.StatusForbidden
	})
	r.server.eventually("the rights apply", func() bool {
		return r.patch(
			account,
			nodeName,
			nodeName,
			`{"metadata":{"annotations":{"csi.oxide.computer/restart-reply":null}}}`,
		) == http.StatusOK
	})
}

// patch patches a Node with the token of the plugin's pod on a node, and returns the HTTP status.
func (r *restarts) patch(account, from, node, text string) int {
	token, err := os.ReadFile(filepath.Join(r.accounts[account+" "+from], "token"))
	must(r.t, err)
	request, err := http.NewRequest("PATCH", r.url+"/api/v1/nodes/"+node, strings.NewReader(text))
	must(r.t, err)
	request.Header.Set("Authorization", "Bearer "+string(token))
	request.Header.Set("Content-Type", "application/merge-patch+json")
	response, err := r.ca.client(r.t, keyPair{}).Do(request)
	must(r.t, err)
	_ = response.Body.Close() // the body is not used
	return response.StatusCode
}

func (r *restarts) conformance(t *testing.T) {
	var fault metadatatest.Fault
	orchestratortest.RunRestart(t, func(t *testing.T) orchestratortest.RestartHarness {
		r.makeNodes()
		return orchestratortest.RestartHarness{
			NewRequester: func() orchestrator.RestartRequester { return r.requester() },
			NewListener:  func() orchestrator.RestartListener { return kubernetes.NewListener(r.options(account, nodeName)) },
			NewOther:     func() orchestrator.RestartListener { return kubernetes.NewListener(r.options(account, otherName)) },
			Instance:     idA, Other: idB,
			Break: func(f metadatatest.Fault) {
				fault = f
				switch f {
				case metadatatest.Down:
					r.gate.shut()
				case metadatatest.Slow:
					r.gate.hold()
				case metadatatest.Denied:
					r.bindAll(false)
				}
			},
			Repair: func() {
				switch fault {
				case metadatatest.Down:
					r.gate.open()
				case metadatatest.Slow:
					r.gate.release()
				case metadatatest.Denied:
					r.bindAll(true)
				}
			},
			Secrets: r.tokens,
		}
	})
}

// bindAll grants or revokes the rights of both accounts, and waits until the API server applies that.
func (r *restarts) bindAll(granted bool) {
	want := http.StatusForbidden
	if granted {
		want = http.StatusOK
	}
	for _, name := range []string{controller, account} {
		if granted {
			r.do("POST", bindings, object{
				"metadata": object{"name": name},
				"roleRef":  object{"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
				"subjects": []object{{"kind": "ServiceAccount", "name": name, "namespace": namespace}},
			}, nil)
		} else {
			r.do("DELETE", bindings+"/"+name, nil, nil)
		}
		token, err := os.ReadFile(filepath.Join(r.accounts[name+" "+nodeName], "token"))
		must(r.t, err)
		await.Within(r.t, waitLimit, "the API server applies the binding", func() bool {
			return r.as(r.ca.client(r.t, keyPair{}), string(token), "GET", "/api/v1/nodes/"+nodeName) == want
		})
	}
}

// rights checks that a node's token can write the reply on its own Node and nothing else.
func (r *restarts) rights(t *testing.T) {
	r.makeNodes()
	const answers = `{"metadata":{"annotations":{"csi.oxide.computer/restart-reply":"x"}}}`
	for name, tt := range map[string]struct {
		node, patch string
		want        int
	}{
		"its answer":                     {nodeName, answers, http.StatusOK},
		"another node's reply":           {otherName, answers, http.StatusForbidden},
		"a question":                     {nodeName, `{"metadata":{"annotations":{"csi.oxide.computer/restart":"x"}}}`, http.StatusForbidden},
		"a request to another node":      {otherName, `{"metadata":{"annotations":{"csi.oxide.computer/restart":"x"}}}`, http.StatusForbidden},
		"an annotation":                  {nodeName, `{"metadata":{"annotations":{"other":"changes"}}}`, http.StatusForbidden},
		"an annotation removed":          {nodeName, `{"metadata":{"annotations":{"other":null}}}`, http.StatusForbidden},
		"an annotation, empty":           {nodeName, `{"metadata":{"annotations":{"more":""}}}`, http.StatusForbidden},
		"a reply and more":               {nodeName, `{"metadata":{"annotations":{"csi.oxide.computer/restart-reply":"x","more":"x"}}}`, http.StatusForbidden},
		"a label":                        {nodeName, `{"metadata":{"labels":{"a":"c"}}}`, http.StatusForbidden},
		"itself cordoned":                {nodeName, `{"spec":{"unschedulable":true}}`, http.StatusForbidden},
		"a taint":                        {nodeName, `{"spec":{"taints":[{"key":"a","effect":"NoSchedule"}]}}`, http.StatusForbidden},
		"the own reply removed":          {nodeName, `{"metadata":{"annotations":{"csi.oxide.computer/restart-reply":null}}}`, http.StatusOK},
		"an empty patch of another Node": {otherName, `{}`, http.StatusForbidden},
		"nothing":                        {nodeName, `{}`, http.StatusOK},
		"a provider ID":                  {nodeName, `{"spec":{"providerID":"oxide://x"}}`, http.StatusForbidden},
		"an address range for pods":      {nodeName, `{"spec":{"podCIDR":"10.9.0.0/24","podCIDRs":["10.9.0.0/24"]}}`, http.StatusForbidden},
		"an owner that does not exist":   {nodeName, `{"metadata":{"ownerReferences":[{"apiVersion":"v1","kind":"Namespace","name":"x","uid":"x"}]}}`, http.StatusForbidden},
		"a finalizer":                    {nodeName, `{"metadata":{"finalizers":["example.com/x"]}}`, http.StatusForbidden},
		"a provider ID of another":       {otherName, `{"spec":{"providerID":"oxide://x"}}`, http.StatusForbidden},
		"an unknown Node's reply":        {"worker-5.example", answers, http.StatusNotFound},
		"all annotations removed":        {nodeName, `{"metadata":{"annotations":null}}`, http.StatusForbidden},
	} {
		if got := r.patch(account, nodeName, tt.node, tt.patch); got != tt.want {
			t.Errorf("%s: HTTP %d, want %d", name, got, tt.want)
		}
	}
	token, err := os.ReadFile(filepath.Join(r.accounts[controller+" "+nodeName], "token"))
	must(t, err)
	for request, want := range map[string]int{
		"GET /api/v1/nodes":                    http.StatusOK,
		"DELETE /api/v1/nodes/" + nodeName:     http.StatusForbidden,
		"GET /api/v1/pods":                     http.StatusForbidden,
		"GET /api/v1/secrets":                  http.StatusForbidden,
		"GET /apis/storage.k8s.io/v1/csinodes": http.StatusOK,
	} {
		method, path, _ := strings.Cut(request, " ")
		if got := r.as(r.ca.client(t, keyPair{}), string(token), method, path); got != want {
			t.Errorf("the controller: %s: HTTP %d, want %d", request, got, want)
		}
	}
}

// report checks what an operator sees with kubectl describe node.
func (r *restarts) report(t *testing.T) {
	r.makeNodes()
	must(
		t,
		r.requester().
			Report(t.Context(), idA, orchestrator.Report{Event: orchestrator.EventRestartRefused, Message: "why and what to do"}),
	)
	var node struct{ Metadata struct{ UID string } }
	r.do("GET", "/api/v1/nodes/"+nodeName, nil, &node)
	var events struct {
		Items []struct{ Type, Reason, Message string }
	}
	r.do(
		"GET",
		"/api/v1/events?fieldSelector=involvedObject.kind=Node,involvedObject.name="+nodeName+",involvedObject.uid="+node.Metadata.UID,
		nil,
		&events,
	)
	if got := fmt.Sprint(events.Items); got != "[{Warning RestartRefused why and what to do}]" {
		t.Errorf("events of the Node: %s", got)
	}
}

// drain checks evictions by the API server's own rules.
func (r *restarts) drain(t *testing.T) {
	r.makeNodes()
	requester := r.requester()
	if _, err := requester.Drain(
		t.Context(),
		idA,
		"1",
	); err == nil ||
		!strings.Contains(err.Error(), `the verb "list" on "pods"`) {
		t.Errorf("without the rights to drain: %v", err)
	}
	must(t, requester.Undrain(t.Context(), idA, "1"))
	r.widen(manifests + "restart-drain/kustomization.yaml")
	await.Within(t, waitLimit, "the API server applies the rights", func() bool {
		_, err := requester.Drain(context.Background(), idA, "1")
		return err == nil
	})
	// The plugin's pods have no controller in this test.
	own := []string{
		"pod " + namespace + "/oxide-csi-controller-worker-3 has no controller that would create it again: delete it manually",
		"pod " + namespace + "/oxide-csi-node-worker-3 has no controller that would create it again: delete it manually",
	}
	for _, name := range []string{"app", "guarded"} {
		r.do("POST", "/api/v1/namespaces/default/serviceaccounts", object{"metadata": object{"name": name}}, nil)
		r.do("POST", "/api/v1/namespaces/default/pods", object{
			"metadata": object{
				"name":   name,
				"labels": object{"app": name},
				"ownerReferences": []object{
					{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "rs", "uid": "u", "controller": true},
				},
			},
			"spec": object{
				"serviceAccountName": name,
				"nodeName":           nodeName,
				"containers":         []object{{"name": "c", "image": "none"}},
			},
		}, nil)
		r.do("PATCH", "/api/v1/namespaces/default/pods/"+name+"/status", object{"status": object{
			"phase":      "Running",
			"conditions": []object{{"type": "Ready", "status": "True"}},
			"containerStatuses": []object{
				{"name": "c", "image": "none", "imageID": "", "ready": true, "state": object{"running": object{}}},
			},
		}}, nil)
	}
	r.do(
		"POST",
		"/apis/policy/v1/namespaces/default/poddisruptionbudgets",
		object{
			"metadata": object{"name": "guarded"},
			"spec":     object{"minAvailable": 1, "selector": object{"matchLabels": object{"app": "guarded"}}},
		},
		nil,
	)
	left, err := requester.Drain(t.Context(), idA, "1")
	want := append(
		[]string{
			"pod default/app is ending",
			"pod default/guarded cannot be evicted yet: a PodDisruptionBudget allows no disruption",
		},
		own...)
	if diff := cmp.Diff(want, left); err != nil || diff != "" {
		t.Errorf("%v\n%s", err, diff)
	}
	if !r.unschedulable() {
		t.Error("the Node is not cordoned")
	}
	r.do("DELETE", "/apis/policy/v1/namespaces/default/poddisruptionbudgets/guarded", nil, nil)
	await.Within(t, waitLimit, "the pod is evicted after its budget was deleted", func() bool {
		left, err = requester.Drain(context.Background(), idA, "1")
		return err == nil && strings.Contains(strings.Join(left, "\n"), "default/guarded is ending")
	})
	must(t, requester.Undrain(t.Context(), idA, "2"))
	if !r.unschedulable() {
		t.Error("another restart has uncordoned the Node")
	}
	must(t, requester.Undrain(t.Context(), idA, "1"))
	if r.unschedulable() {
		t.Error("the Node is still cordoned")
	}
}

func (r *restarts) unschedulable() bool {
	var node struct{ Spec struct{ Unschedulable bool } }
	status, text := r.send("GET", "/api/v1/nodes/"+nodeName, nil)
	if err := json.Unmarshal(text, &node); status != http.StatusOK || err != nil {
		r.t.Error(status, err)
	}
	return node.Spec.Unschedulable
}
