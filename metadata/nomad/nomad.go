// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package nomad is the plugin's client of Nomad.
//
// [Provider] is the metadata provider. It asks the Nomad client agent of this machine for two keys of the client's
// metadata. An operator writes them into the agent's configuration, or sets them by "nomad node meta apply":
//
//	client {
//	  meta {
//	    "oxide.instance_id" = "6f3a1c9e-2b7d-4e58-9a41-0d5c8e7f1a23"
//	    "oxide.rack"        = "default"
//	  }
//	}
//
// The provider reaches the agent through the socket of the task API, with the workload identity of the plugin's task,
// or at an address. With ACLs on, the token needs the policy node { policy = "read" }.
//
// A job file that sets OXIDE_INSTANCE_ID = "${meta.oxide.instance_id}" does not need this provider: see package static.
//
// [Options.Call] is what package orchestrator/nomad calls the agent with.
package nomad

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"

	"github.com/hashicorp/nomad/api"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// KeyRack is the key of the rack's name in a client's metadata, written by operators.
const KeyRack = "oxide.rack"

// keyInstanceID is the key of the instance, if an operator writes it.
const keyInstanceID = "oxide.instance_id"

// Options says how to reach the agent. The zero value means "http://127.0.0.1:4646" without a token.
type Options struct {
	// Socket is the URL of the task API's socket, such as "unix:///secrets/api.sock". Nomad gives it to a task with a
	// workload identity. It is used before Address.
	Socket string
	// Address is the agent's HTTP address: a URL, whose scheme may be unix.
	Address string
	// TokenFile is the path of a file with the token. It is read at each call, because Nomad renews a token with a ttl
	// there. Token is used if TokenFile is empty.
	TokenFile, Token string
	// CACert, ClientCert and ClientKey are paths, and TLSServerName is a name, for an agent with TLS.
	CACert, ClientCert, ClientKey, TLSServerName string
}

// Provider is a [metadata.Provider]. It caches nothing.
type Provider struct{ options Options }

// New makes a provider. It does no I/O.
func New(options Options) *Provider { return &Provider{options: options} }

// Instance implements [metadata.Provider].
func (p *Provider) Instance(ctx context.Context) (metadata.Instance, error) {
	instance, err := p.PartialInstance(ctx)
	if err == nil && instance.ID == "" {
		return metadata.Instance{}, metadata.NotReady(
			"the metadata of this Nomad client has no key "+keyInstanceID,
			nil,
			fmt.Sprintf(
				"add meta { %q = \"<UUID of this instance>\" } to the client's configuration, or run: nomad node meta apply %s=<UUID>",
				keyInstanceID,
				keyInstanceID,
			),
		)
	}
	return instance, err
}

// PartialInstance implements [metadata.PartialProvider].
func (p *Provider) PartialInstance(ctx context.Context) (metadata.Instance, error) {
	var answer *api.NodeMetaResponse
	err := p.options.Call(ctx, readMeta, func(client *api.Client) (err error) {
		// Without a node ID the agent answers for its own client, without asking a server.
		answer, err = client.Nodes().Meta().Read("", (&api.QueryOptions{}).WithContext(ctx))
		return err
	})
	if err != nil {
		return metadata.Instance{}, err
	}
	return instanceOf(answer.Meta)
}

// instanceOf makes an answer of the client's metadata.
func instanceOf(meta map[string]string) (instance metadata.Instance, err error) {
	if text, ok := meta[keyInstanceID]; ok {
		if instance.ID, err = metadata.ParseInstanceID(text); err != nil {
			return metadata.Instance{}, metadata.Invalid(keyInstanceID+" in the metadata of this Nomad client", err,
				"set it to the UUID of this instance")
		}
	}
	if instance.Rack = meta[KeyRack]; instance.Rack != "" {
		if err := metadata.CheckRack(instance.Rack); err != nil {
			return metadata.Instance{}, metadata.Invalid(KeyRack+" in the metadata of this Nomad client", err,
				"set it to the name that the controller uses for this rack")
		}
	}
	return instance, nil
}

// token is the token for the agent, or empty.
func (o Options) token() (string, error) {
	if o.TokenFile == "" {
		return o.Token, nil
	}
	text, err := os.ReadFile(o.TokenFile)
	if token := strings.TrimSpace(string(text)); err == nil && token != "" {
		return token, nil
	}
	e := metadata.NotReady("wait for the token in "+o.TokenFile, nil,
		"check the path, and that the task has an identity block with file = true")
	if wrapped := (*fs.PathError)(nil); errors.As(err, &wrapped) {
		e.Cause = wrapped.Err // The path is in What.
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		e.Kind, e.What, e.Next = metadata.ErrInvalid, "read the token in "+o.TokenFile, "name a file that the plugin may read"
	}
	return "", e
}

// Operation holds the texts for the errors of a kind of request.
type Operation struct {
	// What says what the request does.
	What string
	// Wrong describes an answer that cannot be decoded.
	Wrong string
	// Policy is the ACL policy that the request needs.
	Policy string
}

var readMeta = Operation{What: "ask", Wrong: "the response is no client metadata", Policy: `node { policy = "read" }`}

// Call sends a request to the agent, at its addresses in their order. If all fail, the error has the reason of each.
func (o Options) Call(ctx context.Context, op Operation, ask func(*api.Client) error) error {
	if err := ctx.Err(); err != nil {
		return metadata.NotReady("Nomad was not asked", err, "try again")
	}
	token, err := o.token()
	if err != nil {
		return err
	}
	var failed []*metadata.Error
	for _, address := range o.addresses() {
		err := o.callAt(ctx, address, token, op, ask)
		if err == nil {
			return nil
		}
		failed = append(failed, err)
	}
	last := failed[len(failed)-1]
	for _, err := range failed[:len(failed)-1] {
		last.What = err.Error() + "; and " + last.What
		if errors.Is(err, metadata.ErrNotReady) {
			last.Kind = metadata.ErrNotReady
		}
	}
	return last
}

func (o Options) addresses() (all []string) {
	for _, address := range []string{o.Socket, o.Address} {
		if address != "" {
			all = append(all, address)
		}
	}
	if len(all) == 0 {
		return []string{defaultAddress}
	}
	return all
}

// callAt sends a request to the agent at one address.
func (o Options) callAt(
	ctx context.Context,
	address, token string,
	op Operation,
	ask func(*api.Client) error,
) *metadata.Error {
	at, err := parseAddress(address)
	var httpClient *http.Client
	if err == nil {
		httpClient, err = o.client(at)
	}
	if err != nil {
		return metadata.Invalid("the Nomad address cannot be used", err, "correct NOMAD_ADDR, or the files for TLS")
	}
	client, err := api.NewClient(&api.Config{Address: at.url, SecretID: token, HttpClient: httpClient})
	if err != nil {
		return metadata.Invalid("the Nomad address cannot be used", err, "write http://host:port or unix:///path")
	}
	if err := ask(client); err != nil {
		return explain(ctx, address, op, err)
	}
	return nil
}

// client makes an HTTP client for one request to an address. The connection is closed after the request.
func (o Options) client(at agentAddress) (*http.Client, error) {
	base := &http.Transport{
		Proxy:             http.ProxyFromEnvironment,
		TLSClientConfig:   &tls.Config{MinVersion: tls.VersionTLS12},
		DisableKeepAlives: true,
	}
	client := &http.Client{
		Transport: base,
		// A redirect is not followed: only the configured agent gets the token.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	if at.socket != "" {
		base.Proxy = nil
		base.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", at.socket)
		}
		return client, nil
	}
	return client, api.ConfigureTLS(client, &api.TLSConfig{
		CACert: o.CACert, ClientCert: o.ClientCert, ClientKey: o.ClientKey, TLSServerName: o.TLSServerName,
	})
}

// explain turns an error of a request into a [metadata.Error]. It leaves out the agent's message, which can contain the
// token.
func explain(ctx context.Context, address string, op Operation, err error) *metadata.Error {
	e := metadata.NotReady(op.What+" the Nomad agent at "+address, nil,
		"check that it runs on this machine and that the task may reach it")
	var transport *url.Error
	var untrusted *tls.CertificateVerificationError
	var refused api.UnexpectedResponseError
	switch {
	case ctx.Err() != nil:
		e.Cause = ctx.Err()
	case errors.As(err, &untrusted):
		e.Kind, e.Cause, e.Next = metadata.ErrInvalid, untrusted, "check NOMAD_CACERT and NOMAD_TLS_SERVER_NAME"
	case errors.As(err, &transport):
		e.Cause = transport.Err
	case errors.As(err, &refused):
		e.Cause = HTTPStatus(refused.StatusCode())
		explainStatus(e, op, refused.StatusCode())
	case errors.Is(err, io.ErrUnexpectedEOF):
		e.Cause = err
	default:
		e.Kind, e.Cause, e.Next = metadata.ErrInvalid, errors.New(
			op.Wrong,
		), "check that this is a Nomad client agent, of version 1.5 or later"
	}
	return e
}

// HTTPStatus is the cause of a [metadata.Error] if the agent refused the request.
type HTTPStatus int

func (s HTTPStatus) Error() string { return fmt.Sprintf("HTTP %d", int(s)) }

func explainStatus(e *metadata.Error, op Operation, status int) {
	switch {
	case status == http.StatusUnauthorized:
		e.Kind, e.Next = metadata.ErrInvalid, "give the task a workload identity (identity { env = true }), or set NOMAD_TOKEN"
	case status == http.StatusForbidden:
		e.Kind, e.Next = metadata.ErrInvalid, "give the token or the job a policy with "+op.Policy+", and check that the token is valid"
	case status == http.StatusTooManyRequests || status >= 500:
		e.Next = "check the agent's log"
	default:
		e.Kind, e.Next = metadata.ErrInvalid, "check that this is a Nomad client agent, of version 1.5 or later"
	}
}

var _ metadata.PartialProvider = (*Provider)(nil)
