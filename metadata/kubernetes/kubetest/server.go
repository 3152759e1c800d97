// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package kubetest simulates the API server of Kubernetes, for tests of its client and of the adapter.
package kubetest

import (
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata/kubernetes"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/metadatatest"
)

// Values of the tests.
const (
	IDA      = "6f3a1c9e-2b7d-4e58-9a41-0d5c8e7f1a23"
	IDB      = "b81d0f42-77c3-4c0a-8e6f-93a5d2b4c716"
	NodeName = "worker-3.example"
	Token    = "header.canary-payload.signature"
)

// Server simulates the API server, with faults that a real API server cannot be made to have. test/identity runs a real
// API server.
type Server struct {
	*httptest.Server
	t *testing.T
	// Dir is the folder with the pod's credentials.
	Dir string

	mu     sync.Mutex
	Object any
	Fault  metadatatest.Fault
	Status int
	Tokens []string // the valid tokens
	Calls  []string
	// Impersonated are the Impersonate headers of the last request.
	Impersonated http.Header
	Repairs      chan struct{}
	// More answers requests other than GET of the Node. It is called only for requests with a valid token.
	More func(call, body string) (status int, object any)
}

// Object is an object of the API.
type Object = map[string]any

// NewServer starts an API server.
func NewServer(t *testing.T) *Server {
	s := &Server{t: t, Tokens: []string{Token}, Repairs: make(chan struct{})}
	s.Server = httptest.NewTLSServer(s)
	t.Cleanup(s.Close)
	s.writeCredentials()
	return s
}

// Credentials makes a pod's credentials for another server.
func Credentials(t *testing.T, server *httptest.Server) *Server {
	s := &Server{Server: server, t: t}
	s.writeCredentials()
	return s
}

func (s *Server) writeCredentials() {
	s.Dir = s.t.TempDir()
	s.Write("ca.crt", string(s.CA()))
	s.Write("token", Token)
}

// CA is the server's certificate.
func (s *Server) CA() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})
}

// Write writes a file of the credentials.
func (s *Server) Write(name, text string) string {
	path := filepath.Join(s.Dir, name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		s.t.Error(err)
	}
	return path
}

// Options lead to the server.
func (s *Server) Options() kubernetes.Options {
	address, err := url.Parse(s.URL)
	if err != nil {
		s.t.Fatal(err)
	}
	return kubernetes.Options{
		NodeName: NodeName, Host: address.Hostname(), Port: address.Port(), ServiceAccount: s.Dir,
		RackLabel: kubernetes.DefaultRackLabel,
	}
}

func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	object, fault, status, repaired, valid := s.Object, s.Fault, s.Status, s.Repairs, false
	for _, t := range s.Tokens {
		valid = valid || r.Header.Get("Authorization") == "Bearer "+t
	}
	more, call := s.More, r.Method+" "+r.URL.String()
	s.Calls = append(s.Calls, call)
	s.Impersonated = http.Header{}
	for name, values := range r.Header {
		if strings.HasPrefix(name, "Impersonate-") {
			s.Impersonated[name] = values
		}
	}
	s.mu.Unlock()
	switch fault {
	case metadatatest.Down:
		panic(http.ErrAbortHandler) // closes the connection
	case metadatatest.Slow:
		select {
		case <-repaired:
			s.ServeHTTP(w, r)
		case <-r.Context().Done():
		}
		return
	case metadatatest.Denied:
		status = http.StatusForbidden
	}
	switch {
	case !valid:
		status = http.StatusUnauthorized
	case more != nil && call != "GET /api/v1/nodes/"+NodeName:
		body, err := io.ReadAll(r.Body)
		if err != nil {
			s.t.Error(err)
		}
		if status, object = more(call, string(body)); status == http.StatusOK {
			status = 0
		}
	case r.URL.Path != "/api/v1/nodes/"+NodeName || object == nil:
		status = http.StatusNotFound
	}
	if status != 0 {
		// A real API server repeats the user and the resource. This one repeats even the token.
		http.Error(w, `{"kind":"Status","message":"`+r.Header.Get("Authorization")+`"}`, status)
		return
	}
	if text, ok := object.(string); ok {
		fmt.Fprint(w, text)
		return
	}
	if err := json.NewEncoder(w).Encode(object); err != nil {
		s.t.Error(err)
	}
}

// Set calls do while no request is answered.
func (s *Server) Set(do func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	do()
}

// Node returns a Node with these changes.
func Node(changes ...func(o Object)) Object {
	o := Object{
		"kind": "Node", "apiVersion": "v1",
		"metadata": Object{"name": NodeName, "labels": Object{"kubernetes.io/os": "linux"}, "annotations": Object{}},
		"spec":     Object{"podCIDR": "10.0.0.0/24"},
		"status":   Object{"nodeInfo": Object{"kubeletVersion": "v1.37.2"}, "images": []any{}},
	}
	for _, change := range changes {
		change(o)
	}
	return o
}

// In sets a value at a path of the object.
func In(path, key string, value any) func(Object) {
	return func(o Object) {
		for _, step := range strings.Split(path, ".") {
			o = o[step].(Object)
		}
		o[key] = value
	}
}

// ProviderID sets the provider ID.
func ProviderID(id string) func(Object) { return In("spec", "providerID", id) }

// SystemUUID sets the machine's UUID.
func SystemUUID(id string) func(Object) { return In("status.nodeInfo", "systemUUID", id) }

// Label sets a label.
func Label(name, value string) func(Object) {
	return In("metadata.labels", name, value)
}

// Annotation sets an annotation.
func Annotation(name, value string) func(Object) {
	return In("metadata.annotations", name, value)
}

// Tainted makes a Node one that waits for its cloud controller manager.
var Tainted = In("spec", "taints", []any{
	Object{"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"},
	Object{"key": "node.cloudprovider.kubernetes.io/uninitialized", "value": "true", "effect": "NoSchedule"},
})

// Judge checks that an error has this kind, that its text contains says, and that its text contains no secret. Without
// a kind, it wants no error.
func Judge(t *testing.T, err, kind error, says string) {
	t.Helper()
	if !errors.Is(err, kind) ||
		err != nil && (!strings.Contains(err.Error(), says) || strings.Contains(err.Error(), "canary")) {
		t.Errorf("%v, want %v that says %q", err, kind, says)
	}
}
