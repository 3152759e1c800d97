// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package nomad_test

import (
	"context"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/metadatatest"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/nomad"
)

const (
	idA   = "6f3a1c9e-2b7d-4e58-9a41-0d5c8e7f1a23"
	token = "canary0a-8c1e-4f6e-9d33-5a2b7c9e1f04"
)

// agent simulates Nomad's client agent, with faults that a real agent cannot be made to have. test/identity runs a real
// agent.
type agent struct {
	*httptest.Server
	t *testing.T

	mu      sync.Mutex
	meta    map[string]string
	text    string // if not empty, the answer in place of the metadata
	fault   metadatatest.Fault
	status  int
	token   string
	calls   []string
	repairs chan struct{}
}

func newAgent(t *testing.T) *agent {
	a := &agent{t: t, token: token, repairs: make(chan struct{})}
	a.Server = httptest.NewServer(a)
	t.Cleanup(a.Close)
	return a
}

func (a *agent) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	meta, fault, status, repaired, valid := a.meta, a.fault, a.status, a.repairs, r.Header.Get("X-Nomad-Token") == a.token
	a.calls = append(a.calls, r.Method+" "+r.URL.String())
	a.mu.Unlock()
	if !r.Close {
		a.t.Error("the request keeps the connection, and no later request uses it")
	}
	switch fault {
	case metadatatest.Down:
		panic(http.ErrAbortHandler) // closes the connection
	case metadatatest.Slow:
		select {
		case <-repaired:
			a.ServeHTTP(w, r)
		case <-r.Context().Done():
		}
		return
	case metadatatest.Denied:
		status = http.StatusForbidden
	}
	if status == 0 && !valid {
		status = http.StatusForbidden
	}
	if status != 0 {
		http.Error(w, "Permission denied for token "+r.Header.Get("X-Nomad-Token"), status)
		return
	}
	if a.text != "" {
		fmt.Fprint(w, a.text)
		return
	}
	// This is the form of Nomad 1.11's answer.
	answer := map[string]any{
		"Meta":    meta,
		"Dynamic": map[string]*string{"gone": nil},
		"Static":  map[string]string{"vault": "canary-meta"},
	}
	if err := json.NewEncoder(w).Encode(answer); err != nil {
		a.t.Error(err)
	}
}

func (a *agent) set(do func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	do()
}

// meta is the metadata of an agent that knows its instance and rack.
func meta() map[string]string {
	return map[string]string{"oxide.instance_id": idA, "oxide.rack": "east", "vault": "canary-meta"}
}

func (a *agent) options() nomad.Options { return nomad.Options{Address: a.URL, Token: token} }

func TestConformance(t *testing.T) {
	metadatatest.Run(t, func(t *testing.T) metadatatest.Harness {
		a := newAgent(t)
		return metadatatest.Harness{
			New: func() metadata.Provider { return nomad.New(a.options()) },
			Set: func(w metadatatest.Content) {
				m := map[string]string{"vault": "canary-meta"}
				if w.ID != nil {
					m["oxide.instance_id"] = *w.ID
				}
				if w.Rack != nil {
					m["oxide.rack"] = *w.Rack
				}
				a.set(func() { a.meta = m })
			},
			Break: func(f metadatatest.Fault) { a.set(func() { a.fault = f }) },
			Repair: func() {
				a.set(func() {
					a.fault = ""
					close(a.repairs)
					a.repairs = make(chan struct{})
				})
			},
			Secrets: []string{token, "canary"},
		}
	})
}

func TestAnswers(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(a *agent)
		want   metadata.Instance
		kind   error
		says   string
	}{
		"both keys":       {func(a *agent) {}, metadata.Instance{ID: idA, Rack: "east"}, nil, ""},
		"no ID":           {func(a *agent) { delete(a.meta, "oxide.instance_id") }, metadata.Instance{}, metadata.ErrNotReady, "has no key oxide.instance_id; add meta {"},
		"no metadata":     {func(a *agent) { a.meta = nil }, metadata.Instance{}, metadata.ErrNotReady, "has no key oxide.instance_id"},
		"not a UUID":      {func(a *agent) { a.meta["oxide.instance_id"] = "client1" }, metadata.Instance{}, metadata.ErrInvalid, `oxide.instance_id in the metadata of this Nomad client: the instance ID "client1" is not a UUID`},
		"bad rack":        {func(a *agent) { a.meta["oxide.rack"] = "a/b" }, metadata.Instance{}, metadata.ErrInvalid, "oxide.rack in the metadata"},
		"no token":        {func(a *agent) { a.status = 401 }, metadata.Instance{}, metadata.ErrInvalid, "HTTP 401; give the task a workload identity"},
		"another token":   {func(a *agent) { a.token = "other" }, metadata.Instance{}, metadata.ErrInvalid, `HTTP 403; give the token or the job a policy with node { policy = "read" }`},
		"unknown path":    {func(a *agent) { a.status = 404 }, metadata.Instance{}, metadata.ErrInvalid, "HTTP 404; check that this is a Nomad client agent"},
		"a busy agent":    {func(a *agent) { a.status = 429 }, metadata.Instance{}, metadata.ErrNotReady, "HTTP 429; check the agent's log"},
		"a broken agent":  {func(a *agent) { a.status = 500 }, metadata.Instance{}, metadata.ErrNotReady, "HTTP 500; check the agent's log"},
		"a redirect":      {func(a *agent) { a.status = 307 }, metadata.Instance{}, metadata.ErrInvalid, "HTTP 307"},
		"HTML":            {func(a *agent) { a.text = "<html>canary</html>" }, metadata.Instance{}, metadata.ErrInvalid, "the response is no client metadata"},
		"another type":    {func(a *agent) { a.text = `{"Meta": "canary"}` }, metadata.Instance{}, metadata.ErrInvalid, "the response is no client metadata"},
		"half an answer":  {func(a *agent) { a.text = `{"Meta": {"oxide.instance_id": "` }, metadata.Instance{}, metadata.ErrNotReady, "unexpected EOF"},
		"agent is down":   {func(a *agent) { a.Close() }, metadata.Instance{}, metadata.ErrNotReady, "connection refused; check that it runs on this machine"},
		"a blank answer":  {func(a *agent) { a.text = " " }, metadata.Instance{}, metadata.ErrInvalid, "the response is no client metadata"},
		"an empty object": {func(a *agent) { a.text = "{}" }, metadata.Instance{}, metadata.ErrNotReady, "has no key"},
	} {
		t.Run(name, func(t *testing.T) {
			a := newAgent(t)
			a.meta = meta()
			tt.change(a)
			got, err := nomad.New(a.options()).Instance(context.Background())
			if got != tt.want || !errors.Is(err, tt.kind) {
				t.Errorf("got %+v, %v; want %+v, %v", got, err, tt.want, tt.kind)
			}
			if err != nil && (!strings.Contains(err.Error(), tt.says) || strings.Contains(err.Error(), "canary")) {
				t.Errorf("error %q, want one that says %q", err, tt.says)
			}
			for _, call := range a.calls {
				if call != "GET /v1/client/metadata" {
					t.Errorf("asked %s", call)
				}
			}
		})
	}
}

func TestTokenIsNotSentToARedirect(t *testing.T) {
	asked := false
	elsewhere := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked = true }))
	defer elsewhere.Close()
	redirects := httptest.NewServer(http.RedirectHandler(elsewhere.URL, http.StatusTemporaryRedirect))
	defer redirects.Close()
	got, err := nomad.New(nomad.Options{Address: redirects.URL, Token: token}).Instance(context.Background())
	if !errors.Is(err, metadata.ErrInvalid) || asked {
		t.Errorf("got %+v, %v; followed: %v", got, err, asked)
	}
}

// socket serves the agent on a unix socket too, and returns the socket's address.
func (a *agent) socket() string {
	path := filepath.Join(a.t.TempDir(), "api.sock")
	listener, err := net.Listen("unix", path)
	if err != nil {
		a.t.Fatal(err)
	}
	server := &httptest.Server{Listener: listener, Config: &http.Server{Handler: a}}
	server.Start()
	a.t.Cleanup(server.Close)
	return "unix://" + path
}

func TestAddresses(t *testing.T) {
	t.Setenv("NOMAD_ADDR", "http://127.0.0.1:1") // only the configuration may read the environment
	t.Setenv("NOMAD_TOKEN", "other")
	for name, tt := range map[string]struct {
		options func(a *agent) nomad.Options
		kind    error
		says    []string
	}{
		"address":            {func(a *agent) nomad.Options { return nomad.Options{Address: a.URL, Token: token} }, nil, nil},
		"slash at the end":   {func(a *agent) nomad.Options { return nomad.Options{Address: a.URL + "/", Token: token} }, nil, nil},
		"socket":             {func(a *agent) nomad.Options { return nomad.Options{Socket: a.socket(), Token: token} }, nil, nil},
		"socket for address": {func(a *agent) nomad.Options { return nomad.Options{Address: a.socket(), Token: token} }, nil, nil},
		"socket first": {func(a *agent) nomad.Options {
			return nomad.Options{Socket: a.socket(), Address: "http://127.0.0.1:1", Token: token}
		}, nil, nil},
		"socket gone, address": {func(a *agent) nomad.Options {
			return nomad.Options{Socket: "unix:///nowhere/api.sock", Address: a.URL, Token: token}
		}, nil, nil},
		"neither answers": {func(a *agent) nomad.Options {
			a.status = 403
			return nomad.Options{Socket: "unix:///nowhere/api.sock", Address: a.URL, Token: token}
		}, metadata.ErrNotReady, []string{"unix:///nowhere/api.sock", "no such file", "HTTP 403"}},
		"with a password": {func(a *agent) nomad.Options { return nomad.Options{Address: "http://me:canary@127.0.0.1:1"} }, metadata.ErrInvalid, nil},
		"another scheme":  {func(a *agent) nomad.Options { return nomad.Options{Address: "ftp://127.0.0.1"} }, metadata.ErrInvalid, []string{"it is not http://host:port"}},
		"no scheme":       {func(a *agent) nomad.Options { return nomad.Options{Address: "127.0.0.1:4646"} }, metadata.ErrInvalid, []string{"it is not http://host:port"}},
		"no host":         {func(a *agent) nomad.Options { return nomad.Options{Address: "http://"} }, metadata.ErrInvalid, []string{"it is not http://host:port"}},
		"a path that is too long": {func(a *agent) nomad.Options {
			return nomad.Options{Socket: "unix:///" + strings.Repeat("x", 107), Token: token}
		}, metadata.ErrInvalid, []string{"has 108 bytes, more than the limit of 107: shorten Nomad's data_dir"}},
		"half a key pair": {func(a *agent) nomad.Options { return nomad.Options{Address: a.URL, ClientCert: "/x"} }, metadata.ErrInvalid, []string{"the Nomad address cannot be used"}},
		"no CA":           {func(a *agent) nomad.Options { return nomad.Options{Address: a.URL, CACert: "/nowhere/ca.pem"} }, metadata.ErrInvalid, []string{"/nowhere/ca.pem"}},
	} {
		t.Run(name, func(t *testing.T) {
			a := newAgent(t)
			a.meta = meta()
			got, err := nomad.New(tt.options(a)).Instance(context.Background())
			if !errors.Is(err, tt.kind) || err == nil && got.ID != idA {
				t.Errorf("got %+v, %v; want %v", got, err, tt.kind)
			}
			for _, text := range tt.says {
				if !strings.Contains(err.Error(), text) {
					t.Errorf("error %q, want one that says %q", err, text)
				}
			}
			if err != nil && strings.Contains(err.Error(), "canary") {
				t.Errorf("the error shows a secret: %v", err)
			}
		})
	}
}

func TestTLS(t *testing.T) {
	a := newAgent(t)
	a.meta = meta()
	secure := httptest.NewTLSServer(a)
	defer secure.Close()
	ca := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(
		ca,
		pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: secure.Certificate().Raw}),
		0o600,
	); err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		options nomad.Options
		says    string
	}{
		"trusted":      {nomad.Options{CACert: ca}, ""},
		"by name":      {nomad.Options{CACert: ca, TLSServerName: "example.com"}, ""},
		"not trusted":  {nomad.Options{}, "check NOMAD_CACERT"},
		"another name": {nomad.Options{CACert: ca, TLSServerName: "client.global.nomad"}, "check NOMAD_CACERT and NOMAD_TLS_SERVER_NAME"},
	} {
		t.Run(name, func(t *testing.T) {
			tt.options.Address, tt.options.Token = secure.URL, token
			got, err := nomad.New(tt.options).Instance(context.Background())
			if tt.says == "" && (err != nil || got.ID != idA) {
				t.Errorf("got %+v, %v", got, err)
			}
			if tt.says != "" && (!errors.Is(err, metadata.ErrInvalid) || !strings.Contains(err.Error(), tt.says)) {
				t.Errorf("got %+v, %v; want an ErrInvalid that says %q", got, err, tt.says)
			}
		})
	}
}

// The token file is read at each call, because Nomad renews a workload identity with a ttl in its file.
func TestTokenFile(t *testing.T) {
	a := newAgent(t)
	a.meta = meta()
	file := filepath.Join(t.TempDir(), "nomad_token")
	p := nomad.New(nomad.Options{Address: a.URL, TokenFile: file, Token: "ignored"})
	ask := func() error {
		_, err := p.Instance(context.Background())
		return err
	}
	write := func(text string) {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := ask(); !errors.Is(err, metadata.ErrNotReady) ||
		!strings.Contains(err.Error(), "wait for the token in "+file+": no such file") {
		t.Errorf("no file: %v", err)
	}
	write("\n")
	if err := ask(); !errors.Is(err, metadata.ErrNotReady) {
		t.Errorf("an empty file: %v", err)
	}
	write("canary-old")
	if err := ask(); !errors.Is(err, metadata.ErrInvalid) || strings.Contains(err.Error(), "canary") {
		t.Errorf("an old token: %v", err)
	}
	write(token + "\n")
	if err := ask(); err != nil {
		t.Error(err)
	}
	p = nomad.New(nomad.Options{Address: a.URL, TokenFile: t.TempDir()})
	if err := ask(); !errors.Is(err, metadata.ErrInvalid) {
		t.Errorf("a folder: %v", err)
	}
}
