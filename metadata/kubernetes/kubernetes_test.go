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
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/kubernetes"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/kubernetes/kubetest"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/metadatatest"
)

func TestConformance(t *testing.T) {
	metadatatest.Run(t, func(t *testing.T) metadatatest.Harness {
		s := kubetest.NewServer(t)
		s.Object = node()
		return metadatatest.Harness{
			New: func() metadata.Provider { return kubernetes.New(s.Options()) },
			Set: func(w metadatatest.Content) {
				var changes []func(object)
				if w.ID != nil {
					changes = append(changes, providerID("oxide://"+*w.ID))
				}
				if w.Rack != nil {
					changes = append(changes, label(kubernetes.DefaultRackLabel, *w.Rack))
				}
				s.Set(func() { s.Object = node(changes...) })
			},
			Break: func(f metadatatest.Fault) { s.Set(func() { s.Fault = f }) },
			Repair: func() {
				s.Set(func() {
					s.Fault = ""
					close(s.Repairs)
					s.Repairs = make(chan struct{})
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
		"another Node":           {node: node(in("metadata", "name", "worker-4")), kind: metadata.ErrInvalid, says: "unexpected response from"},
		"not a Node":             {node: object{"kind": "Status"}, kind: metadata.ErrInvalid, says: "unexpected response from"},
		"not JSON":               {node: "<html>log in</html>", kind: metadata.ErrInvalid, says: "unexpected response from"},
		"other types":            {node: node(in("metadata", "labels", []any{})), kind: metadata.ErrInvalid, says: "unexpected response from"},
	} {
		t.Run(name, func(t *testing.T) {
			s := kubetest.NewServer(t)
			s.Object = tt.node
			options := s.Options()
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
			for _, call := range s.Calls {
				if call != "GET /api/v1/nodes/"+nodeName {
					t.Errorf("request %s: the node plugin has no permission for more than its own Node", call)
				}
			}
			if len(s.Calls) != 2 {
				t.Errorf("%d requests for two calls", len(s.Calls))
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
		s := kubetest.NewServer(t)
		s.Object, s.Status = node(), status
		_, err := kubernetes.New(s.Options()).Instance(context.Background())
		if !errors.Is(err, want) || !strings.Contains(err.Error(), fmt.Sprintf("HTTP %d; ", status)) ||
			strings.Contains(err.Error(), "canary") {
			t.Errorf("HTTP %d: %v, want %v", status, err, want)
		}
	}
}

// A token is valid for an hour. The kubelet replaces it in its file, and the provider reads the file again.
func TestTokenRotation(t *testing.T) {
	s := kubetest.NewServer(t)
	s.Object = node(providerID("oxide://" + idA))
	p := kubernetes.New(s.Options())
	for i := range 3 {
		fresh := fmt.Sprintf("%s%d", token, i)
		s.Set(func() { s.Tokens = []string{fresh} })
		if got, err := p.Instance(
			context.Background(),
		); !errors.Is(err, metadata.ErrInvalid) ||
			!strings.Contains(err.Error(), "401") {
			t.Errorf("with the old token: %+v, %v", got, err)
		}
		s.Write("token", fresh+"\n")
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
	s := kubetest.NewServer(t)
	s.Server = redirects
	s.Write("ca.crt", string(s.CA()))
	if got, err := kubernetes.New(s.Options()).
		Instance(context.Background()); !errors.Is(err, metadata.ErrInvalid) ||
		asked {
		t.Errorf("got %+v, %v; followed: %v", got, err, asked)
	}
}

func TestInCluster(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(s *kubetest.Server, o *kubernetes.Options)
		kind   error
		says   string
	}{
		"not in a pod":    {func(_ *kubetest.Server, o *kubernetes.Options) { o.Host = "" }, metadata.ErrInvalid, "KUBERNETES_SERVICE_HOST is not set; name a kubeconfig"},
		"no token":        {func(s *kubetest.Server, _ *kubernetes.Options) { remove(t, s, "token") }, metadata.ErrNotReady, "DIR/token: no such file or directory; check the pod's service account"},
		"an empty token":  {func(s *kubetest.Server, _ *kubernetes.Options) { s.Write("token", "\n") }, metadata.ErrNotReady, "wait for the token in DIR/token"},
		"no CA":           {func(s *kubetest.Server, _ *kubernetes.Options) { remove(t, s, "ca.crt") }, metadata.ErrInvalid, "use the credentials in DIR"},
		"a broken CA":     {func(s *kubetest.Server, _ *kubernetes.Options) { s.Write("ca.crt", "canary") }, metadata.ErrInvalid, "use the credentials in DIR"},
		"server is down":  {func(s *kubetest.Server, _ *kubernetes.Options) { s.Close() }, metadata.ErrNotReady, "connection refused; check that it runs"},
		"no such host":    {func(_ *kubetest.Server, o *kubernetes.Options) { o.Host = "kubernetes.invalid" }, metadata.ErrNotReady, "connect to the Kubernetes API server https://kubernetes.invalid:"},
		"another address": {func(_ *kubetest.Server, o *kubernetes.Options) { o.Host = "localhost" }, metadata.ErrInvalid, "the address is in the API server's certificate"},
		"the CA of another cluster": {func(s *kubetest.Server, _ *kubernetes.Options) {
			s.Write("ca.crt", otherCA(t))
		}, metadata.ErrInvalid, "check that the CA in DIR is this cluster's"},
	} {
		t.Run(name, func(t *testing.T) {
			s := kubetest.NewServer(t)
			s.Object = node(providerID("oxide://" + idA))
			options := s.Options()
			tt.change(s, &options)
			got, err := kubernetes.New(options).Instance(context.Background())
			if err == nil || !errors.Is(err, tt.kind) ||
				!strings.Contains(strings.ReplaceAll(err.Error(), s.Dir, "DIR"), tt.says) {
				t.Errorf("got %+v, %v; want %v that says %q", got, err, tt.kind, tt.says)
			}
		})
	}
}

func remove(t *testing.T, s *kubetest.Server, name string) {
	if err := os.Remove(filepath.Join(s.Dir, name)); err != nil {
		t.Error(err)
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
			s := kubetest.NewServer(t)
			s.Object = node(providerID("oxide://" + idA))
			ca := base64.StdEncoding.EncodeToString(s.CA())
			file := s.Write(
				"kubeconfig",
				strings.NewReplacer("CA", ca, "HOST", s.Listener.Addr().String(), "DIR", s.Dir).Replace(tt.text),
			)
			options := s.Options()
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
			said := strings.NewReplacer(file, "FILE", s.Dir, "DIR").Replace(err.Error())
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
	s := kubetest.NewServer(t)
	s.Object = node(providerID("oxide://" + idA))
	s.Write(
		"answer",
		`{"kind":"ExecCredential","apiVersion":"client.authentication.k8s.io/v1","status":{"token":"`+token+`"}}`,
	)
	s.Write("other", `{"kind":"Canary","apiVersion":"client.authentication.k8s.io/v1","canary":"canary"}`)
	s.Write("empty", `{"kind":"ExecCredential","apiVersion":"client.authentication.k8s.io/v1"}`)
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
			text := config("certificate-authority: ca.crt", execUser(tt.command, filepath.Join(s.Dir, tt.arg)))
			file := s.Write("kubeconfig-"+name, strings.ReplaceAll(text, "HOST", s.Listener.Addr().String()))
			got, err := kubernetes.New(kubernetes.Options{NodeName: nodeName, Kubeconfig: file}).Instance(t.Context())
			if err != nil {
				err = fmt.Errorf("%w, with FILE: %s", err, strings.ReplaceAll(err.Error(), file, "FILE"))
			}
			if kubetest.Judge(t, err, tt.kind, tt.says); tt.kind == nil && got.ID != idA {
				t.Errorf("got %+v", got)
			}
		})
	}
}

func TestImpersonation(t *testing.T) {
	s := kubetest.NewServer(t)
	s.Object = node(providerID("oxide://" + idA))
	text := config(
		"certificate-authority: ca.crt",
		"token: "+token+", as: system:node:x, as-groups: [a, b], as-uid: u1, as-user-extra: {scope: [c]}",
	)
	file := s.Write("kubeconfig", strings.ReplaceAll(text, "HOST", s.Listener.Addr().String()))
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
	if diff := cmp.Diff(want, s.Impersonated); diff != "" {
		t.Error(diff)
	}
}
