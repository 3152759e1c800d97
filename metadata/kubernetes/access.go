// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package kubernetes

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"k8s.io/client-go/transport"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// serviceAccount is where Kubernetes puts a pod's credentials.
const serviceAccount = "/var/run/secrets/kubernetes.io/serviceaccount"

// access is an API server and who we are to it.
type access struct {
	// from is the file or folder that says so.
	from string
	// server is the base URL, without a slash at its end.
	server string
	config transport.Config
	// proxy overrides the environment's, where it is not nil.
	proxy *url.URL
	// kept is used for requests, where it is not nil.
	kept *http.Client
}

// access reads how to ask the API server. It is read anew for each call: tokens
// and certificates are short-lived.
func (c client) access() (access, error) {
	if c.options.Kubeconfig != "" {
		return fromKubeconfig(c.options.Kubeconfig)
	}
	dir := c.options.ServiceAccount
	if c.options.Host == "" {
		return access{}, &metadata.Error{
			Kind: metadata.ErrInvalid, What: "this is no pod of Kubernetes: KUBERNETES_SERVICE_HOST is not set",
			Next: "name a kubeconfig by --kubeconfig, or choose another source by --metadata",
		}
	}
	port := c.options.Port
	if port == "" {
		port = "443"
	}
	a := access{from: dir, server: "https://" + net.JoinHostPort(c.options.Host, port)}
	a.config.TLS.CAFile = filepath.Join(dir, "ca.crt")
	a.config.BearerTokenFile = filepath.Join(dir, "token")
	return a, a.checkFiles()
}

// checkFiles reads the token once: client-go would go on without one, and be
// refused as nobody.
func (a access) checkFiles() error {
	if a.config.BearerTokenFile == "" {
		return nil
	}
	token, err := os.ReadFile(a.config.BearerTokenFile)
	if err == nil && len(bytes.TrimSpace(token)) > 0 {
		return nil
	}
	e := &metadata.Error{
		Kind: metadata.ErrNotReady, What: "wait for the token in " + a.config.BearerTokenFile, Cause: pathless(err),
		Next: "check the pod's service account, and that automountServiceAccountToken is not off",
	}
	if errors.Is(err, fs.ErrPermission) {
		e.Kind, e.What, e.Next = metadata.ErrInvalid, "read the token in "+a.config.BearerTokenFile, "make it readable for the user that the plugin runs as"
	}
	return e
}

// idleTime is for how long a connection is kept that is not used.
const idleTime = time.Minute

// http makes a client for one request, after which its connection is closed unless it is kept.
func (a access) http(keep bool) (*http.Client, error) {
	tlsConfig, err := transport.TLSConfigFor(&a.config)
	if err != nil {
		return nil, err
	}
	base := &http.Transport{
		TLSClientConfig:   tlsConfig,
		Proxy:             http.ProxyFromEnvironment,
		DisableKeepAlives: !keep,
		IdleConnTimeout:   idleTime,
	}
	if a.proxy != nil {
		base.Proxy = http.ProxyURL(a.proxy)
	}
	authenticated, err := transport.HTTPWrappersForConfig(&a.config, base)
	if err != nil {
		return nil, err
	}
	return &http.Client{
		Transport: authenticated,
		// Credentials go to the server that was configured, and nowhere else.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}, nil
}

// explain turns an error of asking into the contract's.
func (a access) explain(ctx context.Context, err error) error {
	e := &metadata.Error{
		Kind: metadata.ErrNotReady, What: "ask the Kubernetes API server " + a.server, Cause: oneLine(err),
		Next: "check that it runs and can be reached from here",
	}
	var untrusted *tls.CertificateVerificationError
	var unknown x509.UnknownAuthorityError
	switch {
	case ctx.Err() != nil:
		e.Cause = ctx.Err()
	case errors.As(err, &untrusted), errors.As(err, &unknown):
		e.Kind, e.Next = metadata.ErrInvalid, "check that the CA in "+a.from+" is this cluster's, and that the address is in the API server's certificate"
	}
	return e
}

// oneLine is an error without the request's URL, on one line.
func oneLine(err error) error {
	if wrapped := (*url.Error)(nil); errors.As(err, &wrapped) {
		err = wrapped.Err
	}
	if text := err.Error(); strings.ContainsAny(text, "\r\n") {
		return errors.New(strings.Join(strings.Fields(text), " "))
	}
	return err
}

// pathless is an error without the path that stands before it.
func pathless(err error) error {
	if wrapped := (*fs.PathError)(nil); errors.As(err, &wrapped) {
		return wrapped.Err
	}
	return err
}
