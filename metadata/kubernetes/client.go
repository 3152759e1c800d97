// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package kubernetes

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// client calls the API server. It connects at the first call.
type client struct {
	options Options

	mu sync.Mutex
	// connected is nil until the first call, and after a failure that new credentials may mend.
	connected *connection
}

func newClient(options Options) *client {
	if options.ServiceAccount == "" {
		options.ServiceAccount = serviceAccount
	}
	return &client{options: options}
}

// connection is an API server, with the credentials for it.
type connection struct {
	rest.Interface
	server string
}

// connect returns the connection, or makes a new one from what the files say now.
func (c *client) connect() (*connection, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.connected != nil {
		return c.connected, nil
	}
	config, err := c.options.config()
	if err != nil {
		return nil, err
	}
	connected, err := newConnection(config)
	if err != nil {
		return nil, &metadata.Error{
			Kind: metadata.ErrInvalid, What: "use the credentials of " + c.options.source(), Cause: oneLine(err),
			Next: "repair them, or name a kubeconfig by --kubeconfig",
		}
	}
	c.connected = connected
	return connected, nil
}

func newConnection(config *rest.Config) (*connection, error) {
	transport, err := rest.TransportFor(config)
	if err != nil {
		return nil, err
	}
	sender := &http.Client{
		Transport: transport,
		// Credentials go to the server that was configured, and nowhere else.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	// This package decodes for itself: rest needs a serializer only to be made.
	config.NegotiatedSerializer = serializer.NewCodecFactory(runtime.NewScheme()).WithoutConversion()
	made, err := rest.UnversionedRESTClientForConfigAndClient(config, sender)
	if err != nil {
		return nil, err
	}
	return &connection{Interface: made, server: strings.TrimSuffix(config.Host, "/")}, nil
}

// disconnect makes the next call connect anew, with what the files of credentials say then.
func (c *client) disconnect(failed *connection) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.connected == failed {
		c.connected = nil
	}
}

// request is one to the API server.
type request struct {
	method string
	// path is that of the object or list, and query its parameters.
	path  string
	query url.Values
	// in is sent as JSON, unless it is nil. mediaType says of what kind it is, where it is no plain object.
	in        any
	mediaType string
	// accept is asked for instead of the whole object, where it is not empty.
	accept string
	// what it does, for errors.
	what string
	// verb and resource are the right that it takes.
	verb, resource string
}

// Media types of patches, and of objects of which only the metadata is read. Most of a Node is its status, the list of
// its images above all.
const (
	mergePatch   = "application/merge-patch+json" // RFC 7386
	jsonPatch    = "application/json-patch+json"  // RFC 6902
	metadataOnly = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
	metadataList = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
)

const (
	nodes             = "/api/v1/nodes"
	csiNodes          = "/apis/storage.k8s.io/v1/csinodes"
	volumeAttachments = "/apis/storage.k8s.io/v1/volumeattachments"
)

// getNode and patchNode are requests for a Node.
func getNode(what, name string) request {
	return request{method: http.MethodGet, path: nodes + "/" + name, what: what, verb: "get", resource: "nodes"}
}

func patchNode(what, name, mediaType string, patch any) request {
	return request{
		method:    http.MethodPatch,
		path:      nodes + "/" + name,
		what:      what,
		verb:      "patch",
		resource:  "nodes",
		mediaType: mediaType,
		in:        patch,
	}
}

// post is a request that makes something.
func post(what, path, resource string, in any) request {
	return request{method: http.MethodPost, path: path, what: what, verb: "create", resource: resource, in: in}
}

// noNode explains that there is no such Node.
func noNode(name string) error {
	return &metadata.Error{
		Kind: metadata.ErrNotReady,
		What: fmt.Sprintf("get Node %q: HTTP %d", name, http.StatusNotFound),
		Next: "check that --node-name (OXIDE_CSI_NODE_NAME) is the Node's name, spec.nodeName of the pod, " +
			"and that the kubelet has registered",
	}
}

// object is what every object says of itself, and every list.
type object struct {
	Kind     string
	Metadata struct {
		Name, UID, ResourceVersion  string
		DeletionTimestamp, Continue string
		Labels, Annotations         map[string]string
	}
}

func (o object) name() string { return o.Metadata.Name }

// do sends a request that must succeed, and reads the answer into out unless that is nil. HTTP statuses in also are no
// error either; then nothing is read.
func (c *client) do(ctx context.Context, r request, out any, also ...int) (status int, err error) {
	connected, body, err := c.send(ctx, r)
	if connected == nil {
		return 0, err
	}
	if err != nil {
		if status = httpStatus(err); slices.Contains(also, status) {
			return status, nil
		}
		return status, c.requestError(ctx, connected, r, err)
	}
	if out != nil {
		if err := json.Unmarshal(body, out); err != nil {
			return http.StatusOK, c.unexpectedAnswer(r)
		}
	}
	return http.StatusOK, nil
}

// send sends a request, and returns the error of client-go. It returns no connection if the request cannot be sent.
//
// A read that gets no answer is sent once more: the connection may have been an idle one that the other side has just
// closed.
func (c *client) send(ctx context.Context, r request) (*connection, []byte, error) {
	for again := r.method == http.MethodGet; ; again = false {
		connected, made, err := c.prepare(ctx, r)
		if err != nil {
			return nil, nil, err
		}
		body, err := made.Do(ctx).Raw()
		if err == nil {
			err = ctx.Err() // an answer that was cut off need not show as one
		}
		if err == nil || httpStatus(err) != 0 || ctx.Err() != nil || !again {
			return connected, body, err
		}
		c.disconnect(connected)
	}
}

// stream sends a request whose answer is read bit by bit. It returns errGone for HTTP 410.
func (c *client) stream(ctx context.Context, r request) (io.ReadCloser, error) {
	connected, made, err := c.prepare(ctx, r)
	if err != nil {
		return nil, err
	}
	body, err := made.Stream(ctx)
	if httpStatus(err) == http.StatusGone {
		return nil, errGone
	}
	if err != nil {
		return nil, c.requestError(ctx, connected, r, err)
	}
	return body, nil
}

// prepare makes a request of client-go.
func (c *client) prepare(ctx context.Context, r request) (*connection, *rest.Request, error) {
	if err := ctx.Err(); err != nil {
		return nil, nil, &metadata.Error{
			Kind:  metadata.ErrNotReady,
			What:  r.what + ": not sent",
			Cause: err,
			Next:  "try again",
		}
	}
	connected, err := c.connect()
	if err != nil {
		return nil, nil, err
	}
	// Whoever calls tries again in time; what the API server says about it is not waited for here.
	made := connected.Verb(r.method).
		AbsPath(r.path).
		MaxRetries(0).
		SetHeader("Accept", cmp.Or(r.accept, "application/json"))
	for key, values := range r.query {
		for _, value := range values {
			made.Param(key, value)
		}
	}
	if r.in != nil {
		body, err := json.Marshal(r.in)
		if err != nil {
			return nil, nil, err
		}
		made.SetHeader("Content-Type", cmp.Or(r.mediaType, "application/json")).Body(body)
	}
	return connected, made, nil
}

// httpStatus is the HTTP status that made an error, or 0.
func httpStatus(err error) int {
	var answered *apierrors.StatusError
	if errors.As(err, &answered) {
		return int(answered.ErrStatus.Code)
	}
	return 0
}

// requestError turns an error of client-go into the contract's. What the API server says beside the HTTP status stays out: it
// knows the names of others.
func (c *client) requestError(ctx context.Context, connected *connection, r request, err error) error {
	status := httpStatus(err)
	if status == 0 || status == http.StatusUnauthorized {
		c.disconnect(connected)
	}
	if status == 0 {
		return c.connectionError(ctx, connected, err)
	}
	e := &metadata.Error{
		Kind: metadata.ErrNotReady,
		What: fmt.Sprintf("%s from %s: HTTP %d", r.what, connected.server, status),
	}
	switch {
	case status == http.StatusUnauthorized:
		e.Kind = metadata.ErrInvalid
		e.Next = "the API server does not know the credentials of " + c.options.source() +
			": check that they have not expired and are for this cluster"
	case status == http.StatusForbidden:
		e.Kind = metadata.ErrInvalid
		e.Next = fmt.Sprintf(
			"grant the plugin's service account the verb %q on %q (a ClusterRole and its binding)",
			r.verb,
			r.resource,
		)
	case status == http.StatusGone, status == http.StatusConflict, status == http.StatusUnprocessableEntity:
		e.What, e.Next = e.What+", it has changed meanwhile", "try again"
	case status == http.StatusTooManyRequests || status >= 500:
		e.Next = "check the API server"
	default:
		e.Kind, e.Next = metadata.ErrInvalid, "check that this is the address of a Kubernetes API server"
	}
	return e
}

// connectionError turns an error of reaching the API server, or of getting credentials, into the contract's.
func (c *client) connectionError(ctx context.Context, connected *connection, err error) error {
	e := &metadata.Error{
		Kind: metadata.ErrNotReady, What: "ask the Kubernetes API server " + connected.server, Cause: oneLine(err),
		Next: "check that it runs and can be reached from here",
	}
	var untrusted *tls.CertificateVerificationError
	var unknown x509.UnknownAuthorityError
	program, credentials := strings.CutPrefix(oneLine(err).Error(), "getting credentials: ")
	switch {
	case ctx.Err() != nil:
		e.Cause = ctx.Err()
	case errors.As(err, &untrusted), errors.As(err, &unknown):
		e.Kind = metadata.ErrInvalid
		e.Next = "check that the CA in " + c.options.source() + " is this cluster's, " +
			"and that the address is in the API server's certificate"
	case credentials:
		e.What = "get the credentials that " + c.options.source() + " describes"
		e.Next = "check that its program runs here, as the plugin's user"
		if e.Cause = errors.New(program); strings.Contains(program, "decoding stdout") {
			e.Cause = errors.New("its program prints no ExecCredential") // and the decoder quotes what it prints
		}
	}
	return e
}

// unexpectedAnswer is the error of an answer that is not what was asked for.
func (c *client) unexpectedAnswer(r request) error {
	connected, err := c.connect()
	if err != nil {
		return err
	}
	return &metadata.Error{
		Kind: metadata.ErrInvalid, What: fmt.Sprintf("%s: %s answered something else", r.what, connected.server),
		Next: "check that this is the address of a Kubernetes API server",
	}
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
