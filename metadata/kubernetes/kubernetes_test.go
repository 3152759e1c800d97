// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package kubernetes_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/kubernetes"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/metadatatest"
)

const (
	idA      = "6f3a1c9e-2b7d-4e58-9a41-0d5c8e7f1a23"
	idB      = "b81d0f42-77c3-4c0a-8e6f-93a5d2b4c716"
	nodeName = "worker-3.example"
	token    = "header.canary-payload.signature"
)

// server simulates the API server, with faults that a real API server cannot be made to have. test/identity runs a real
// API server.
type server struct {
	*httptest.Server
	t *testing.T
	// dir is the folder with the pod's credentials.
	dir string

	mu     sync.Mutex
	object any
	fault  metadatatest.Fault
	status int
	tokens []string // the valid tokens
	calls  []string
	// impersonated are the Impersonate headers of the last request.
	impersonated http.Header
	repairs      chan struct{}
	// more answers requests other than GET of the Node. It is called only for requests with a valid token.
	more func(call, body string) (status int, object any)
}

type object = map[string]any

func newServer(t *testing.T) *server {
	s := &server{t: t, dir: t.TempDir(), tokens: []string{token}, repairs: make(chan struct{})}
	s.Server = httptest.NewTLSServer(s)
	t.Cleanup(s.Close)
	s.write("ca.crt", string(s.ca()))
	s.write("token", token)
	return s
}

func (s *server) ca() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})
}

func (s *server) write(name, text string) string {
	path := filepath.Join(s.dir, name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		s.t.Error(err)
	}
	return path
}

func (s *server) options() kubernetes.Options {
	address, err := url.Parse(s.URL)
	if err != nil {
		s.t.Fatal(err)
	}
	return kubernetes.Options{
		NodeName: nodeName, Host: address.Hostname(), Port: address.Port(), ServiceAccount: s.dir,
		RackLabel: kubernetes.DefaultRackLabel,
	}
}

func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	object, fault, status, repaired, valid := s.object, s.fault, s.status, s.repairs, false
	for _, t := range s.tokens {
		valid = valid || r.Header.Get("Authorization") == "Bearer "+t
	}
	more, call := s.more, r.Method+" "+r.URL.String()
	s.calls = append(s.calls, call)
	s.impersonated = http.Header{}
	for name, values := range r.Header {
		if strings.HasPrefix(name, "Impersonate-") {
			s.impersonated[name] = values
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
	case more != nil && call != "GET /api/v1/nodes/"+nodeName:
		body, err := io.ReadAll(r.Body)
		if err != nil {
			s.t.Error(err)
		}
		if status, object = more(call, string(body)); status == http.StatusOK {
			status = 0
		}
	case r.URL.Path != "/api/v1/nodes/"+nodeName || object == nil:
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

func (s *server) set(do func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	do()
}

// node returns a Node with these changes.
func node(changes ...func(o object)) object {
	o := object{
		"kind": "Node", "apiVersion": "v1",
		"metadata": object{"name": nodeName, "labels": object{"kubernetes.io/os": "linux"}, "annotations": object{}},
		"spec":     object{"podCIDR": "10.0.0.0/24"},
		"status":   object{"nodeInfo": object{"kubeletVersion": "v1.36.3"}, "images": []any{}},
	}
	for _, change := range changes {
		change(o)
	}
	return o
}

func in(path, key string, value any) func(object) {
	return func(o object) {
		for _, step := range strings.Split(path, ".") {
			o = o[step].(object)
		}
		o[key] = value
	}
}

func providerID(id string) func(object) { return in("spec", "providerID", id) }
func systemUUID(id string) func(object) { return in("status.nodeInfo", "systemUUID", id) }
func label(name, value string) func(object) {
	return in("metadata.labels", name, value)
}
func annotation(name, value string) func(object) {
	return in("metadata.annotations", name, value)
}

var tainted = in("spec", "taints", []any{
	object{"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"},
	object{"key": "node.cloudprovider.kubernetes.io/uninitialized", "value": "true", "effect": "NoSchedule"},
})

func TestConformance(t *testing.T) {
	metadatatest.Run(t, func(t *testing.T) metadatatest.Harness {
		s := newServer(t)
		s.object = node()
		return metadatatest.Harness{
			New: func() metadata.Provider { return kubernetes.New(s.options()) },
			Set: func(w metadatatest.Content) {
				var changes []func(object)
				if w.ID != nil {
					changes = append(changes, providerID("oxide://"+*w.ID))
				}
				if w.Rack != nil {
					changes = append(changes, label(kubernetes.DefaultRackLabel, *w.Rack))
				}
				s.set(func() { s.object = node(changes...) })
			},
			Break: func(f metadatatest.Fault) { s.set(func() { s.fault = f }) },
			Repair: func() {
				s.set(func() {
					s.fault = ""
					close(s.repairs)
					s.repairs = make(chan struct{})
				})
			},
			Secrets: []string{token, "canary"},
		}
	})
}

func TestNodes(t *testing.T) {
	instance, rack, zone := kubernetes.InstanceLabel, kubernetes.DefaultRackLabel, "topology.kubernetes.io/zone"
	for name, tt := range map[string]struct {
		node      any
		rackLabel string
		want      metadata.Instance
		known     metadata.Instance // where it differs from want
		kind      error
		says      string
	}{
		"provider ID":                  {node: node(providerID("oxide://"+idA), systemUUID(idB)), want: metadata.Instance{ID: idA}},
		"a label":                      {node: node(label(instance, idA), label(rack, "east")), want: metadata.Instance{ID: idA, Rack: "east"}},
		"an annotation":                {node: node(annotation(instance, idA), annotation(rack, "east")), want: metadata.Instance{ID: idA, Rack: "east"}},
		"label and annotation agree":   {node: node(label(instance, idA), annotation(instance, idA)), want: metadata.Instance{ID: idA}},
		"system UUID":                  {node: node(systemUUID(strings.ToUpper(idA))), want: metadata.Instance{ID: idA}},
		"provider ID before the label": {node: node(providerID("oxide://"+idA), label(instance, idB)), want: metadata.Instance{ID: idA}},
		"label before the system UUID": {node: node(label(instance, idA), systemUUID(idB)), want: metadata.Instance{ID: idA}},
		"configured rack label":        {node: node(providerID("oxide://"+idA), label(rack, "east"), label(zone, "west")), rackLabel: zone, want: metadata.Instance{ID: idA, Rack: "west"}},
		"tainted, everything known":    {node: node(tainted, providerID("oxide://"+idA), label(rack, "east")), want: metadata.Instance{ID: idA, Rack: "east"}},

		"tainted":                {node: node(tainted, systemUUID(idA)), kind: metadata.ErrNotReady, says: "wait for the cloud controller manager to initialise Node"},
		"tainted, ID labelled":   {node: node(tainted, label(instance, idA)), kind: metadata.ErrNotReady, says: "wait for the cloud controller manager"},
		"tainted, rack labelled": {node: node(tainted, label(rack, "east"), systemUUID(idA)), known: metadata.Instance{Rack: "east"}, kind: metadata.ErrNotReady, says: "wait for the cloud controller manager"},
		"no ID yet":              {node: node(), kind: metadata.ErrNotReady, says: `Node "worker-3.example" has no provider ID, no label oxide.computer/instance-id and no system UUID; check that the Oxide cloud controller manager runs`},
		"another cloud":          {node: node(providerID("kind://docker/kind/worker"), systemUUID(idA)), kind: metadata.ErrInvalid, says: `spec.providerID of Node "worker-3.example": "kind://docker/kind/worker" does not begin with oxide://`},
		"bad provider ID":        {node: node(providerID("oxide://node-a")), kind: metadata.ErrInvalid, says: `spec.providerID of Node "worker-3.example": the instance ID "node-a" is not a UUID`},
		"empty label":            {node: node(label(instance, ""), systemUUID(idA)), kind: metadata.ErrInvalid, says: "oxide.computer/instance-id of Node"},
		"bad system UUID":        {node: node(systemUUID("Not Settable")), kind: metadata.ErrInvalid, says: "status.nodeInfo.systemUUID of Node"},
		"two IDs":                {node: node(label(instance, idA), annotation(instance, idB)), kind: metadata.ErrInvalid, says: "the label and the annotation of that name differ"},
		"two racks":              {node: node(providerID("oxide://"+idA), label(rack, "a"), annotation(rack, "b")), kind: metadata.ErrInvalid, says: "oxide.computer/rack of Node"},
		"bad rack name":          {node: node(providerID("oxide://"+idA), annotation(rack, "east/1")), kind: metadata.ErrInvalid, says: "oxide.computer/rack of Node"},
		"no Node of that name":   {kind: metadata.ErrNotReady, says: "HTTP 404; check that --node-name"},
		"another Node":           {node: node(in("metadata", "name", "worker-4")), kind: metadata.ErrInvalid, says: "unexpected answer from"},
		"not a Node":             {node: object{"kind": "Status"}, kind: metadata.ErrInvalid, says: "unexpected answer from"},
		"not JSON":               {node: "<html>log in</html>", kind: metadata.ErrInvalid, says: "unexpected answer from"},
		"other types":            {node: node(in("metadata", "labels", []any{})), kind: metadata.ErrInvalid, says: "unexpected answer from"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newServer(t)
			s.object = tt.node
			options := s.options()
			if tt.rackLabel != "" {
				options.RackLabel = tt.rackLabel
			}
			p := kubernetes.New(options)
			got, err := p.Instance(context.Background())
			if got != tt.want || !errors.Is(err, tt.kind) || err != nil && !strings.Contains(err.Error(), tt.says) {
				t.Errorf("got %+v, %v; want %+v, %v that says %q", got, err, tt.want, tt.kind, tt.says)
			}
			known, err := p.PartialInstance(context.Background())
			switch {
			case tt.known.Rack != "":
				if known != tt.known || err != nil {
					t.Errorf("known: %+v, %v; want %+v", known, err, tt.known)
				}
			case tt.kind == nil && known != tt.want:
				t.Errorf("known: %+v, %v; want %+v", known, err, tt.want)
			}
			for _, call := range s.calls {
				if call != "GET /api/v1/nodes/"+nodeName {
					t.Errorf("request %s: the node plugin has no permission for more than its own Node", call)
				}
			}
			if len(s.calls) != 2 {
				t.Errorf("%d requests for two calls", len(s.calls))
			}
		})
	}
}

func TestStatuses(t *testing.T) {
	for status, want := range map[int]error{
		http.StatusUnauthorized: metadata.ErrInvalid, http.StatusForbidden: metadata.ErrInvalid, http.StatusBadRequest: metadata.ErrInvalid,
		http.StatusFound: metadata.ErrInvalid, http.StatusNotFound: metadata.ErrNotReady, http.StatusTooManyRequests: metadata.ErrNotReady,
		http.StatusInternalServerError: metadata.ErrNotReady, http.StatusServiceUnavailable: metadata.ErrNotReady, http.StatusGatewayTimeout: metadata.ErrNotReady,
	} {
		s := newServer(t)
		s.object, s.status = node(), status
		_, err := kubernetes.New(s.options()).Instance(context.Background())
		if !errors.Is(err, want) || !strings.Contains(err.Error(), fmt.Sprintf("HTTP %d; ", status)) ||
			strings.Contains(err.Error(), "canary") {
			t.Errorf("HTTP %d: %v, want %v", status, err, want)
		}
	}
}

// A token is valid for an hour. The kubelet replaces it in its file, and the provider reads the file again.
func TestTokenRotation(t *testing.T) {
	s := newServer(t)
	s.object = node(providerID("oxide://" + idA))
	p := kubernetes.New(s.options())
	for i := range 3 {
		fresh := fmt.Sprintf("%s%d", token, i)
		s.set(func() { s.tokens = []string{fresh} })
		if got, err := p.Instance(
			context.Background(),
		); !errors.Is(err, metadata.ErrInvalid) ||
			!strings.Contains(err.Error(), "401") {
			t.Errorf("with the old token: %+v, %v", got, err)
		}
		s.write("token", fresh+"\n")
		if got, err := p.Instance(context.Background()); err != nil || got.ID != idA {
			t.Errorf("with the new token: %+v, %v", got, err)
		}
	}
}

func TestCredentialsAreNotSentToARedirect(t *testing.T) {
	asked := false
	elsewhere := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked = true }))
	defer elsewhere.Close()
	redirects := httptest.NewTLSServer(http.RedirectHandler(elsewhere.URL, http.StatusTemporaryRedirect))
	defer redirects.Close()
	s := newServer(t)
	s.Server = redirects
	s.write("ca.crt", string(s.ca()))
	if got, err := kubernetes.New(s.options()).
		Instance(context.Background()); !errors.Is(err, metadata.ErrInvalid) ||
		asked {
		t.Errorf("got %+v, %v; followed: %v", got, err, asked)
	}
}

func TestInCluster(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(s *server, o *kubernetes.Options)
		kind   error
		says   string
	}{
		"not in a pod":    {func(_ *server, o *kubernetes.Options) { o.Host = "" }, metadata.ErrInvalid, "KUBERNETES_SERVICE_HOST is not set; name a kubeconfig"},
		"no token":        {func(s *server, _ *kubernetes.Options) { remove(s, "token") }, metadata.ErrNotReady, "DIR/token: no such file or directory; check the pod's service account"},
		"an empty token":  {func(s *server, _ *kubernetes.Options) { s.write("token", "\n") }, metadata.ErrNotReady, "wait for the token in DIR/token"},
		"no CA":           {func(s *server, _ *kubernetes.Options) { remove(s, "ca.crt") }, metadata.ErrInvalid, "use the credentials in DIR"},
		"a broken CA":     {func(s *server, _ *kubernetes.Options) { s.write("ca.crt", "canary") }, metadata.ErrInvalid, "use the credentials in DIR"},
		"server is down":  {func(s *server, _ *kubernetes.Options) { s.Close() }, metadata.ErrNotReady, "connection refused; check that it runs"},
		"no such host":    {func(_ *server, o *kubernetes.Options) { o.Host = "kubernetes.invalid" }, metadata.ErrNotReady, "connect to the Kubernetes API server https://kubernetes.invalid:"},
		"another address": {func(_ *server, o *kubernetes.Options) { o.Host = "localhost" }, metadata.ErrInvalid, "the address is in the API server's certificate"},
		"the CA of another cluster": {func(s *server, _ *kubernetes.Options) {
			s.write("ca.crt", otherCA(t))
		}, metadata.ErrInvalid, "check that the CA in DIR is this cluster's"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newServer(t)
			s.object = node(providerID("oxide://" + idA))
			options := s.options()
			tt.change(s, &options)
			got, err := kubernetes.New(options).Instance(context.Background())
			if err == nil || !errors.Is(err, tt.kind) ||
				!strings.Contains(strings.ReplaceAll(err.Error(), s.dir, "DIR"), tt.says) {
				t.Errorf("got %+v, %v; want %v that says %q", got, err, tt.kind, tt.says)
			}
		})
	}
}

func remove(s *server, name string) {
	if err := os.Remove(filepath.Join(s.dir, name)); err != nil {
		s.t.Error(err)
	}
}

func TestKubeconfig(t *testing.T) {
	for name, tt := range map[string]struct {
		text string // the test replaces CA, DIR and HOST in it
		kind error
		says string
	}{
		"token":                     {config("certificate-authority-data: CA", "token: "+token), nil, ""},
		"token file":                {config("certificate-authority: ca.crt", "tokenFile: token"), nil, ""},
		"absolute path":             {config("certificate-authority: DIR/ca.crt", "tokenFile: DIR/token"), nil, ""},
		"not verified":              {config("insecure-skip-tls-verify: true", "token: "+token), nil, ""},
		"other name":                {config("tls-server-name: example.com, certificate-authority: ca.crt", "token: "+token), nil, ""},
		"expired":                   {config("certificate-authority: ca.crt", "token: canary"), metadata.ErrInvalid, "HTTP 401; the API server does not accept the credentials in FILE"},
		"anonymous":                 {config("certificate-authority: ca.crt", ""), metadata.ErrInvalid, "HTTP 401"},
		"a password":                {config("certificate-authority: ca.crt", "username: me, password: canary"), metadata.ErrInvalid, "HTTP 401"},
		"no such program":           {config("certificate-authority: ca.crt", execUser("DIR/none", "")), metadata.ErrNotReady, "run the credential program in FILE: exec: fork/exec DIR/none: no such file or directory; check that the program runs here"},
		"a removed auth provider":   {config("certificate-authority: ca.crt", "auth-provider: {name: gcp}"), metadata.ErrInvalid, "use the credentials in FILE: The gcp auth plugin has been removed."},
		"two credentials":           {config("certificate-authority: ca.crt", "token: canary, username: me, password: canary"), metadata.ErrInvalid, "more than one authentication method"},
		"half a key pair":           {config("certificate-authority: ca.crt", "client-certificate-data: Q0E=, client-key-data: Q0E="), metadata.ErrInvalid, "use the credentials in FILE"},
		"not base64":                {config("certificate-authority-data: canary!", "token: t"), metadata.ErrInvalid, "it is not a kubeconfig file in YAML"},
		"no token file":             {config("certificate-authority: ca.crt", "tokenFile: none"), metadata.ErrNotReady, "wait for a file that the kubeconfig FILE names: open DIR/none: no such file"},
		"no such context":           {strings.Replace(config("certificate-authority: ca.crt", ""), "current-context: c", "current-context: d", 1), metadata.ErrInvalid, "the kubeconfig FILE cannot be used: invalid configuration: [context was not found"},
		"no such user":              {strings.Replace(config("certificate-authority: ca.crt", ""), "user: u}", "user: other}", 1), metadata.ErrInvalid, "HTTP 401"},
		"no server":                 {strings.Replace(config("certificate-authority: ca.crt", ""), "https://HOST", "canary", 1), metadata.ErrInvalid, "its server is not https://host:port"},
		"a password for the server": {strings.Replace(config("certificate-authority: ca.crt", ""), "https://", "https://me:canary@", 1), metadata.ErrInvalid, "its server is not https://host:port"},
		"a proxy":                   {config("certificate-authority: ca.crt, proxy-url: 'http://127.0.0.1:1'", "token: "+token), metadata.ErrNotReady, "connection refused"},
		"empty":                     {"", metadata.ErrInvalid, "cannot be used: invalid configuration: no configuration has been provided"},
		"not YAML":                  {"canary: [", metadata.ErrInvalid, "the kubeconfig FILE cannot be used: it is not a kubeconfig file in YAML"},
		"other types":               {"contexts: canary", metadata.ErrInvalid, "it is not a kubeconfig file in YAML"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newServer(t)
			s.object = node(providerID("oxide://" + idA))
			ca := base64.StdEncoding.EncodeToString(s.ca())
			file := s.write(
				"kubeconfig",
				strings.NewReplacer("CA", ca, "HOST", s.Listener.Addr().String(), "DIR", s.dir).Replace(tt.text),
			)
			options := s.options()
			options.Kubeconfig, options.Host, options.ServiceAccount = file, "", ""
			got, err := kubernetes.New(options).Instance(context.Background())
			if tt.kind == nil {
				if err != nil || got.ID != idA {
					t.Errorf("got %+v, %v", got, err)
				}
				return
			}
			if err == nil {
				t.Fatalf("got %+v", got)
			}
			said := strings.NewReplacer(file, "FILE", s.dir, "DIR").Replace(err.Error())
			if !errors.Is(err, tt.kind) || !strings.Contains(said, tt.says) || strings.Contains(said, "canary") {
				t.Errorf("got %v; want %v that says %q", said, tt.kind, tt.says)
			}
		})
	}
	missing := kubernetes.New(kubernetes.Options{NodeName: nodeName, Kubeconfig: filepath.Join(t.TempDir(), "none")})
	if _, err := missing.Instance(context.Background()); !errors.Is(err, metadata.ErrNotReady) {
		t.Errorf("the kubeconfig does not exist yet: %v", err)
	}
	folder := kubernetes.New(kubernetes.Options{NodeName: nodeName, Kubeconfig: t.TempDir()})
	if _, err := folder.Instance(context.Background()); !errors.Is(err, metadata.ErrInvalid) {
		t.Errorf("the kubeconfig is a folder: %v", err)
	}
}

func config(cluster, user string) string {
	return `apiVersion: v1
kind: Config
current-context: c
contexts:
- {name: other, context: {cluster: none, user: none}}
- {name: c, context: {cluster: k, user: u}}
clusters: [{name: k, cluster: {server: "https://HOST", ` + cluster + `}}]
users: [{name: u, user: {` + user + `}}]
`
}

// otherCA makes the certificate of another CA than the server's.
func otherCA(t *testing.T) string {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), IsCA: true, BasicConstraintsValid: true}
	certificate, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: certificate}))
}

// execUser returns the user entry of a kubeconfig, with a program that prints the credentials.
func execUser(command, arg string) string {
	return `exec: {apiVersion: client.authentication.k8s.io/v1, command: "` + command + `", args: ["` + arg + `"], interactiveMode: IfAvailable}`
}

// A kubeconfig may name a program that prints the credentials.
func TestExecCredentials(t *testing.T) {
	s := newServer(t)
	s.object = node(providerID("oxide://" + idA))
	s.write(
		"answer",
		`{"kind":"ExecCredential","apiVersion":"client.authentication.k8s.io/v1","status":{"token":"`+token+`"}}`,
	)
	s.write("other", `{"kind":"Canary","apiVersion":"client.authentication.k8s.io/v1","canary":"canary"}`)
	s.write("empty", `{"kind":"ExecCredential","apiVersion":"client.authentication.k8s.io/v1"}`)
	for name, tt := range map[string]struct {
		command, arg string
		kind         error
		says         string
	}{
		"token":         {"cat", "answer", nil, ""},
		"no credential": {"cat", "other", metadata.ErrNotReady, "run the credential program in FILE: it prints no ExecCredential; check that the program runs here"},
		"no status":     {"cat", "empty", metadata.ErrNotReady, "exec plugin didn't return a status field"},
		"fails":         {"false", "", metadata.ErrNotReady, "exec: executable false failed with exit code 1"},
	} {
		t.Run(name, func(t *testing.T) {
			text := config("certificate-authority: ca.crt", execUser(tt.command, filepath.Join(s.dir, tt.arg)))
			file := s.write("kubeconfig-"+name, strings.ReplaceAll(text, "HOST", s.Listener.Addr().String()))
			got, err := kubernetes.New(kubernetes.Options{NodeName: nodeName, Kubeconfig: file}).Instance(t.Context())
			if err != nil {
				err = fmt.Errorf("%w, with FILE: %s", err, strings.ReplaceAll(err.Error(), file, "FILE"))
			}
			if judge(t, err, tt.kind, tt.says); tt.kind == nil && got.ID != idA {
				t.Errorf("got %+v", got)
			}
		})
	}
}

func TestImpersonation(t *testing.T) {
	s := newServer(t)
	s.object = node(providerID("oxide://" + idA))
	text := config(
		"certificate-authority: ca.crt",
		"token: "+token+", as: system:node:x, as-groups: [a, b], as-uid: u1, as-user-extra: {scope: [c]}",
	)
	file := s.write("kubeconfig", strings.ReplaceAll(text, "HOST", s.Listener.Addr().String()))
	got, err := kubernetes.New(kubernetes.Options{NodeName: nodeName, Kubeconfig: file}).Instance(t.Context())
	if err != nil || got.ID != idA {
		t.Errorf("got %+v, %v", got, err)
	}
	want := http.Header{
		"Impersonate-User": {
			"system:node:x",
		},
		"Impersonate-Group":       {"a", "b"},
		"Impersonate-Uid":         {"u1"},
		"Impersonate-Extra-Scope": {"c"},
	}
	if diff := cmp.Diff(want, s.impersonated); diff != "" {
		t.Error(diff)
	}
}
