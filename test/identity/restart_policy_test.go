// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build identity

package identity_test

import (
	"bytes"
	"crypto/x509/pkix"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
)

const (
	requestKey = "csi.oxide.computer/restart"
	cordonKey  = "csi.oxide.computer/restart-cordon"
	replyKey   = "csi.oxide.computer/restart-reply"
	// elsewhere is a namespace with accounts that have the names of the plugin's.
	elsewhere = "elsewhere"
)

// writer is a client of the API server that may write every Node, as far as RBAC and the Node authorizer decide.
type writer struct {
	client *http.Client
	token  string
}

// messages is a cluster with the policies of planned restarts, and with many writers.
type messages struct {
	*restarts
	writers map[string]writer
}

// TestKubernetesRestartPolicy checks who may write which message of a planned restart, and that all other changes of
// Nodes pass.
func TestKubernetesRestartPolicy(t *testing.T) {
	m := newMessages(t)
	t.Run("writers", m.table)
	t.Run("heartbeats", m.heartbeats)
	t.Run("a release in another namespace", m.otherNamespace)
}

func newMessages(t *testing.T) *messages {
	r := &restarts{cluster: newCluster(t), accounts: map[string]string{}}
	r.makeNodes()
	r.grant(manifests+"base/controller.yaml", "ServiceAccount", "ClusterRole", "ClusterRoleBinding")
	r.widen(manifests + "restart/kustomization.yaml")
	r.grant(manifests+"restart/policy.yaml", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
	// A namespace of Kustomize is added to objects that have none. The API server drops it.
	r.do("POST", paths["ValidatingAdmissionPolicyBinding"], object{
		"metadata": object{"name": "namespaced", "namespace": elsewhere},
		"spec":     object{"policyName": "oxide-csi-restart", "validationActions": []string{"Deny"}},
	}, nil)
	r.do("POST", "/api/v1/namespaces", object{"metadata": object{"name": elsewhere}}, nil)
	for _, name := range []string{controller, account} {
		r.do("POST", "/api/v1/namespaces/"+elsewhere+"/serviceaccounts", object{"metadata": object{"name": name}}, nil)
	}
	// Every service account may write Nodes, so that only the policies refuse.
	r.do("POST", paths["ClusterRole"], object{"metadata": object{"name": "writer"}, "rules": []object{
		{"apiGroups": []string{""}, "resources": []string{"nodes", "nodes/status"}, "verbs": []string{"*"}},
	}}, nil)
	r.do("POST", bindings, object{
		"metadata": object{"name": "writer"},
		"roleRef":  object{"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "writer"},
		"subjects": []object{{"kind": "Group", "apiGroup": "rbac.authorization.k8s.io", "name": "system:serviceaccounts"}},
	}, nil)
	kubelet := r.ca.issue(t, pkix.Name{CommonName: "system:node:" + nodeName, Organization: []string{"system:nodes"}})
	pod := func(namespace, name, node string) writer {
		return writer{r.ca.client(t, keyPair{}), r.podToken(namespace, name, node)}
	}
	m := &messages{restarts: r, writers: map[string]writer{
		"controller":            pod(namespace, controller, nodeName),
		"node plugin":           pod(namespace, account, nodeName),
		"other node's plugin":   pod(namespace, account, otherName),
		"node plugin, no pod":   {r.ca.client(t, keyPair{}), r.token},
		"controller, elsewhere": pod(elsewhere, controller, nodeName),
		"plugin, elsewhere":     pod(elsewhere, account, nodeName),
		"administrator":         {client: r.admin},
		"kubelet":               {client: r.ca.client(t, kubelet)},
	}}
	tries := 0
	r.server.eventually("the policy is enforced", func() bool {
		tries++ // A change without effect is allowed.
		return m.write("administrator", "PATCH", "", object{requestKey: fmt.Sprint(tries)}) == "refused"
	})
	r.server.eventually("the rights apply", func() bool {
		return m.write("controller", "PATCH", "", object{requestKey: "1"}) == "" &&
			m.write("plugin, elsewhere", "PATCH", "/status", object{"other": "x"}) == ""
	})
	return m
}

// table tries each writer, each way to write a Node, and each message.
func (m *messages) table(t *testing.T) {
	allowed := map[string][]string{
		"controller":  {"a request", "no request", "a cordon", "no cordon", "no reply"},
		"node plugin": {"a reply", "no reply"},
	}
	changes := map[string]object{
		"a request": {requestKey: "2"}, "no request": {requestKey: nil},
		"a cordon": {cordonKey: "2"}, "no cordon": {cordonKey: nil},
		"a reply": {replyKey: "2"}, "no reply": {replyKey: nil},
	}
	for _, way := range []struct{ method, subresource string }{
		{"PATCH", ""}, {"PATCH", "/status"}, {"PUT", ""}, {"PUT", "/status"}, {"POST", ""},
	} {
		for name := range m.writers {
			for what, change := range changes {
				if way.method == "POST" && strings.HasPrefix(what, "no ") {
					continue
				}
				m.renew(way.method == "POST")
				want := "refused"
				if slices.Contains(allowed[name], what) {
					want = ""
				}
				if got := m.write(name, way.method, way.subresource, change); got != want {
					t.Errorf("%s nodes%s by the %s, %s: %q, want %q", way.method, way.subresource, name, what, got, want)
				}
			}
		}
	}
}

// renew makes the Node again, with each message or, for a writer that will make it, not at all.
func (m *messages) renew(deleteOnly bool) {
	if status := m.try(
		"DELETE",
		"/api/v1/nodes/"+nodeName,
		nil,
	); status != http.StatusOK &&
		status != http.StatusNotFound {
		m.t.Errorf("delete the Node: HTTP %d", status)
	}
	if deleteOnly {
		return
	}
	m.do("POST", "/api/v1/nodes", object{"metadata": object{"name": nodeName}}, nil)
	for name, annotations := range map[string]object{
		"controller": {requestKey: "1", cordonKey: "1"}, "node plugin": {replyKey: "1"},
	} {
		if got := m.write(name, "PATCH", "", annotations); got != "" {
			m.t.Errorf("the %s cannot write its messages: %s", name, got)
		}
	}
}

// heartbeats checks that the policy stops nothing but messages. The Node has messages, which PUT repeats.
func (m *messages) heartbeats(t *testing.T) {
	m.renew(false)
	beat := object{"status": object{"conditions": []object{{
		"type": "Ready", "status": "True", "lastHeartbeatTime": time.Now().UTC().Format(time.RFC3339),
	}}}}
	path := "/api/v1/nodes/" + nodeName
	for _, name := range []string{"kubelet", "administrator"} {
		for what, got := range map[string]string{
			"a heartbeat":          m.send(name, "PATCH", path+"/status", "application/strategic-merge-patch+json", beat),
			"another annotation":   m.write(name, "PATCH", "", object{"other": name}),
			"a status as a whole":  m.write(name, "PUT", "/status", object{}),
			"a Node as a whole":    m.write(name, "PUT", "", object{"other": "x"}),
			"an annotation by PUT": m.write(name, "PUT", "/status", object{"other": "y"}),
		} {
			if got != "" {
				t.Errorf("%s by the %s: %s", what, name, got)
			}
		}
	}
	m.renew(true)
	if got := m.write(
		"kubelet",
		"POST",
		"",
		object{"volumes.kubernetes.io/controller-managed-attach-detach": "true"},
	); got != "" {
		t.Errorf("a kubelet that makes its Node: %s", got)
	}
}

// otherNamespace grants the plugin's roles to the accounts elsewhere, as a release there does.
func (m *messages) otherNamespace(t *testing.T) {
	for _, name := range []string{controller, account} {
		m.do("POST", bindings, object{
			"metadata": object{"name": name + "-" + elsewhere},
			"roleRef":  object{"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
			"subjects": []object{{"kind": "ServiceAccount", "name": name, "namespace": elsewhere}},
		}, nil)
	}
	m.renew(false)
	await.Within(t, waitLimit, "the API server applies the rights", func() bool {
		return m.write("controller, elsewhere", "PATCH", "", object{requestKey: "3"}) == "" &&
			m.write("plugin, elsewhere", "PATCH", "", object{replyKey: "3"}) == ""
	})
	for name, change := range map[string]object{
		"controller, elsewhere": {replyKey: "4"}, "plugin, elsewhere": {requestKey: "4"},
	} {
		if got := m.write(name, "PATCH", "", change); got != "refused" {
			t.Errorf("%s writes %v: %q", name, change, got)
		}
	}
	// The other policy holds there too: RBAC lets every account of this test do this.
	if got := m.write("plugin, elsewhere", "PATCH", "", object{"other": "z"}); got != "refused" {
		t.Errorf("the plugin elsewhere writes another annotation: %q", got)
	}
}

// write changes annotations of the Node: nil removes one. The result is empty, "refused" by one of the policies, or
// what else happened.
func (m *messages) write(name, method, subresource string, annotations object) string {
	path := "/api/v1/nodes/" + nodeName + subresource
	switch method {
	case "PATCH":
		body := object{"metadata": object{"annotations": annotations}}
		return m.send(name, method, path, "application/merge-patch+json", body)
	case "POST":
		body := object{"metadata": object{"name": nodeName, "annotations": annotations}}
		return m.send(name, method, "/api/v1/nodes", "application/json", body)
	}
	var node object
	m.do("GET", "/api/v1/nodes/"+nodeName, nil, &node)
	current := node["metadata"].(object)["annotations"].(object)
	for key, value := range annotations {
		if current[key] = value; value == nil {
			delete(current, key)
		}
	}
	return m.send(name, method, path, "application/json", node)
}

// send sends a request as a writer.
func (m *messages) send(name, method, path, contentType string, body object) string {
	text, err := json.Marshal(body)
	must(m.t, err)
	request, err := http.NewRequest(method, m.url+path, bytes.NewReader(text))
	must(m.t, err)
	request.Header.Set("Content-Type", contentType)
	as := m.writers[name]
	if as.token != "" {
		request.Header.Set("Authorization", "Bearer "+as.token)
	}
	response, err := as.client.Do(request)
	if err != nil {
		return err.Error()
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	switch {
	case err != nil:
		return err.Error()
	case response.StatusCode/100 == 2:
		return ""
	case response.StatusCode == http.StatusForbidden && strings.Contains(string(answer), "ValidatingAdmissionPolicy 'oxide-csi-"):
		return "refused"
	}
	return fmt.Sprintf("HTTP %d: %s", response.StatusCode, answer)
}
