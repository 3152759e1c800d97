// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simtest

import (
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// Cluster simulates the part of a Kubernetes API server that only reads: it answers GET with objects and logs that a
// test has put, and access reviews. It answers any other method with 405.
type Cluster struct {
	// Token is the bearer token that it accepts.
	// Minor is the minor version of the release, 1.MINOR. Set it before the first request.
	Minor string
	Token string

	mu sync.Mutex
	// denied are the lists that the token may not read, by path.
	denied map[string]bool
	// refused are the rights that no account has, as "VERB RESOURCE[.GROUP][/SUBRESOURCE]".
	refused map[string]bool
	// logs are the logs of pods, by namespace/name.
	logs map[string]string
	// lists holds the objects of each list by namespace/name.
	lists map[string]map[string]map[string]any
	calls []string
}

// NewCluster makes a cluster. These lists exist, and are empty; any other path is 404.
func NewCluster(token string, lists ...string) *Cluster {
	c := &Cluster{
		Token: token, Minor: "36", denied: map[string]bool{}, refused: map[string]bool{}, logs: map[string]string{},
		lists: map[string]map[string]map[string]any{},
	}
	for _, list := range lists {
		c.lists[list] = map[string]map[string]any{}
	}
	return c
}

// Put adds or replaces an object of a list, such as /api/v1/persistentvolumes. It sets the object's metadata.
func (c *Cluster) Put(list, namespace, name string, object map[string]any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	object = maps.Clone(object)
	meta := map[string]any{"name": name, "namespace": namespace, "uid": "uid-" + name}
	if given, ok := object["metadata"].(map[string]any); ok {
		maps.Copy(meta, given)
	}
	object["metadata"] = meta
	if c.lists[list] == nil {
		c.lists[list] = map[string]map[string]any{}
	}
	c.lists[list][namespace+"/"+name] = object
}

// Remove removes an object.
func (c *Cluster) Remove(list, namespace, name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.lists[list], namespace+"/"+name)
}

// Deny makes a list one that the token may not read: the answer is 403.
func (c *Cluster) Deny(list string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.denied[list] = true
}

// Refuse makes access reviews answer that the right VERB RESOURCE[.GROUP][/SUBRESOURCE] is not granted.
func (c *Cluster) Refuse(rights ...string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, right := range rights {
		c.refused[right] = true
	}
}

// PutLog makes the log of a pod.
func (c *Cluster) PutLog(namespace, pod, text string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.logs[namespace+"/"+pod] = text
}

// Calls returns the method and the path of each request.
func (c *Cluster) Calls() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.calls)
}

// Kubeconfig is a kubeconfig for this API server, served with TLS: without it client-go sends no token.
func (c *Cluster) Kubeconfig(server *httptest.Server) string {
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	return fmt.Sprintf(`{"apiVersion": "v1", "kind": "Config", "current-context": "c",
"clusters": [{"name": "c", "cluster": {"server": %q, "certificate-authority-data": %q}}],
"users": [{"name": "u", "user": {"token": %q}}], "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}]}`,
		server.URL, base64.StdEncoding.EncodeToString(ca), c.Token)
}

// ServeHTTP implements [http.Handler].
func (c *Cluster) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls = append(c.calls, r.Method+" "+r.URL.Path)
	status, answer := c.answer(r)
	if text, ok := answer.(podLog); ok {
		_, _ = fmt.Fprint(w, text)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	if answer == nil {
		answer = map[string]any{"kind": "Status", "code": status, "message": "canary " + r.Header.Get("Authorization")}
	}
	_ = json.NewEncoder(w).Encode(answer) // a client that has gone needs no answer
}

func (c *Cluster) answer(r *http.Request) (status int, answer any) {
	switch {
	case r.Header.Get("Authorization") != "Bearer "+c.Token:
		return http.StatusUnauthorized, nil
	case r.Method == http.MethodPost && r.URL.Path == accessReviews:
		return c.review(r)
	case r.Method != http.MethodGet:
		return http.StatusMethodNotAllowed, nil
	}
	if r.URL.Path == "/version" {
		return http.StatusOK, map[string]any{"major": "1", "minor": c.Minor, "gitVersion": "v1." + c.Minor}
	}
	if group, ok := strings.CutPrefix(r.URL.Path, "/apis/"); ok && strings.Count(group, "/") == 1 {
		return c.resources(r.URL.Path + "/")
	}
	path, isLog := strings.CutSuffix(r.URL.Path, "/log")
	list, namespace, name := splitObjectPath(path)
	objects, exists := c.lists[list]
	if text, ok := c.logs[namespace+"/"+name]; isLog && ok && !c.denied["pods/log"] {
		return http.StatusOK, podLog(text)
	} else if isLog {
		return http.StatusForbidden, nil
	}
	switch {
	case c.denied[list]:
		return http.StatusForbidden, nil
	case !exists:
		return http.StatusNotFound, nil
	case name != "":
		if object, ok := objects[namespace+"/"+name]; ok {
			return http.StatusOK, object
		}
		return http.StatusNotFound, nil
	}
	items := []any{}
	for _, key := range slices.Sorted(maps.Keys(objects)) {
		if namespace == "" || strings.HasPrefix(key, namespace+"/") {
			items = append(items, objects[key])
		}
	}
	return http.StatusOK, page(items, r.URL.Query().Get("limit"), r.URL.Query().Get("continue"))
}

// resources answers which lists a version of an API group has.
func (c *Cluster) resources(group string) (status int, answer any) {
	items := []any{}
	for list := range c.lists {
		if name, ok := strings.CutPrefix(list, group); ok {
			items = append(items, map[string]any{"name": name})
		}
	}
	if len(items) == 0 {
		return http.StatusNotFound, nil
	}
	return http.StatusOK, map[string]any{"kind": "APIResourceList", "resources": items}
}

// podLog is an answer that is no JSON.
type podLog string

const accessReviews = "/apis/authorization.k8s.io/v1/subjectaccessreviews"

// review answers whether an account has a right.
func (c *Cluster) review(r *http.Request) (status int, answer any) {
	var asked struct {
		Spec struct {
			User               string
			ResourceAttributes struct{ Verb, Group, Resource, Subresource string }
		}
	}
	if err := json.NewDecoder(r.Body).Decode(&asked); err != nil || asked.Spec.User == "" {
		return http.StatusBadRequest, nil
	}
	if c.denied[accessReviews] {
		return http.StatusForbidden, nil
	}
	a := asked.Spec.ResourceAttributes
	right := a.Verb + " " + a.Resource
	if a.Group != "" {
		right += "." + a.Group
	}
	if a.Subresource != "" {
		right += "/" + a.Subresource
	}
	return http.StatusCreated, map[string]any{"status": map[string]any{"allowed": !c.refused[right]}}
}

// page is one page of a list. The token of the next page is its first index.
func page(items []any, limit, next string) map[string]any {
	from, _ := strconv.Atoi(next)
	size, err := strconv.Atoi(limit)
	if err != nil || size <= 0 {
		size = len(items)
	}
	meta := map[string]any{"resourceVersion": "1"}
	to := min(from+size, len(items))
	if to < len(items) {
		meta["continue"] = strconv.Itoa(to)
	}
	return map[string]any{"kind": "List", "metadata": meta, "items": items[from:to]}
}

// splitObjectPath splits /api/v1[/namespaces/NAMESPACE]/RESOURCE[/NAME], or the same below /apis/GROUP/VERSION.
func splitObjectPath(path string) (list, namespace, name string) {
	parts := strings.Split(strings.Trim(path, "/"), "/")
	root := 2
	if parts[0] == "apis" {
		root = 3
	}
	if len(parts) <= root {
		return path, "", ""
	}
	prefix, rest := "/"+strings.Join(parts[:root], "/"), parts[root:]
	if rest[0] == "namespaces" && len(rest) > 2 {
		namespace, rest = rest[1], rest[2:]
	}
	if len(rest) > 1 {
		name = rest[1]
	}
	return prefix + "/" + rest[0], namespace, name
}
