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
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// client calls the API server. It connects at the first call.
type client struct {
	options Options

	mu sync.Mutex
	// connected is nil until the first call, and after a failure that new credentials may repair.
	connected *connection
}

func newClient(options Options) *client {
	options.ServiceAccount = cmp.Or(options.ServiceAccount, serviceAccount)
	options.RackLabel = cmp.Or(options.RackLabel, DefaultRackLabel)
	return &client{options: options}
}

// connection is an API server, and a client with the credentials for it.
type connection struct {
	rest.Interface
	server string
}

// connect returns the connection. If there is none, it makes one from the current content of the files.
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
			Kind: metadata.ErrInvalid, What: "use the credentials in " + c.options.source(), Cause: oneLine(err),
			Next: "repair them, or name a kubeconfig file by --kubeconfig",
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
		// A redirect is not followed: only the configured server gets the credentials.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	// This package decodes JSON itself. rest only needs a serializer to make a client.
	config.NegotiatedSerializer = serializer.NewCodecFactory(runtime.NewScheme()).WithoutConversion()
	made, err := rest.UnversionedRESTClientForConfigAndClient(config, sender)
	if err != nil {
		return nil, err
	}
	return &connection{Interface: made, server: strings.TrimSuffix(config.Host, "/")}, nil
}

// disconnect makes the next call connect again, and read the files with the credentials again.
func (c *client) disconnect(failed *connection) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.connected == failed {
		c.connected = nil
	}
}

// request is a request to the API server.
type request struct {
	method string
	// path is the path of the object or list. query holds its parameters.
	path  string
	query url.Values
	// in is sent as JSON, unless it is nil. patch is its type if the request is a patch.
	in    any
	patch types.PatchType
	// accept is the media type of the answer. Empty means the whole object.
	accept string
	// what says what the request does, for errors.
	what string
	// verb and resource are the right that the request needs.
	verb, resource string
}

// Media types for reading only the metadata of objects. Most of a Node is its status, above all the list of images.
const (
	metadataOnly = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
	metadataList = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
)

const (
	nodes             = "/api/v1/nodes"
	csiNodes          = "/apis/storage.k8s.io/v1/csinodes"
	volumeAttachments = "/apis/storage.k8s.io/v1/volumeattachments"
)

// getNode is the request that reads a Node.
func getNode(what, name string) request {
	return request{method: http.MethodGet, path: nodes + "/" + name, what: what, verb: "get", resource: "nodes"}
}

// getCSINode is the request that reads a CSINode.
func getCSINode(name string) request {
	return request{
		method: http.MethodGet, path: csiNodes + "/" + name, what: fmt.Sprintf("get CSINode %q", name),
		verb: "get", resource: "csinodes",
	}
}

// patchNode is the request that changes a Node.
func patchNode(what, name string, patchType types.PatchType, patch any) request {
	return request{
		method: http.MethodPatch, path: nodes + "/" + name, what: what, verb: "patch", resource: "nodes",
		patch: patchType, in: patch,
	}
}

// post is the request that creates an object.
func post(what, path, resource string, in any) request {
	return request{method: http.MethodPost, path: path, what: what, verb: "create", resource: resource, in: in}
}

// noNode is the error for a Node that does not exist.
func noNode(name string) error {
	return &metadata.Error{
		Kind: metadata.ErrNotReady,
		What: fmt.Sprintf("get Node %q: HTTP %d", name, http.StatusNotFound),
		Next: "check that --node-name (OXIDE_CSI_NODE_NAME) is the Node's name, spec.nodeName of the pod, " +
			"and that the kubelet has registered",
	}
}

// object is the part that all objects have.
type object struct {
	metav1.TypeMeta
	metav1.ObjectMeta `json:"metadata"`
}

func (o object) name() string { return o.Name }

// list is one page of a list.
type list[T any] struct {
	metav1.TypeMeta
	metav1.ListMeta `json:"metadata"`
	Items           []T
}

// do sends a request, and decodes the answer into out unless out is nil. An HTTP status in accepted is no error; then
// nothing is decoded.
func (c *client) do(ctx context.Context, r request, out any, accepted ...int) (status int, err error) {
	connected, body, err := c.send(ctx, r)
	if connected == nil {
		return 0, err
	}
	if err != nil {
		if status = httpStatus(err); slices.Contains(accepted, status) {
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
// A GET without an answer is sent once more: the server may just have closed an idle connection.
func (c *client) send(ctx context.Context, r request) (*connection, []byte, error) {
	for retry := r.method == http.MethodGet; ; retry = false {
		connected, made, err := c.prepare(ctx, r)
		if err != nil {
			return nil, nil, err
		}
		body, err := made.Do(ctx).Raw()
		if err == nil {
			err = ctx.Err() // client-go may return a truncated answer without an error
		}
		if err == nil || httpStatus(err) != 0 || ctx.Err() != nil || !retry {
			return connected, body, err
		}
		c.disconnect(connected)
	}
}

// stream sends a request and returns the body of the answer, for reading it as it arrives. It returns errGone for HTTP
// 410.
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
	// The caller retries. So client-go must not wait here for as long as a Retry-After header says.
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
		made.SetHeader("Content-Type", cmp.Or(string(r.patch), "application/json")).Body(body)
	}
	return connected, made, nil
}

// httpStatus is the HTTP status behind an error, or 0.
func httpStatus(err error) int {
	var answered *apierrors.StatusError
	if errors.As(err, &answered) {
		return int(answered.ErrStatus.Code)
	}
	return 0
}

// requestError turns an error of client-go into a [metadata.Error]. It leaves out the API server's message, which can
// name other objects.
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
		e.Next = "the API server does not accept the credentials in " + c.options.source() +
			": check that they have not expired and are for this cluster"
	case status == http.StatusForbidden:
		e.Kind = metadata.ErrInvalid
		e.Next = fmt.Sprintf(
			"grant the plugin's service account the verb %q on %q (a ClusterRole and its binding)",
			r.verb,
			r.resource,
		)
	case status == http.StatusGone, status == http.StatusConflict, status == http.StatusUnprocessableEntity:
		e.What, e.Next = e.What+", the object was changed meanwhile", "try again"
	case status == http.StatusTooManyRequests || status >= 500:
		e.Next = "check the API server"
	default:
		e.Kind, e.Next = metadata.ErrInvalid, "check that this is the address of a Kubernetes API server"
	}
	return e
}

// connectionError turns an error of connecting to the API server, or of getting credentials, into a [metadata.Error].
func (c *client) connectionError(ctx context.Context, connected *connection, err error) error {
	e := &metadata.Error{
		Kind: metadata.ErrNotReady, What: "connect to the Kubernetes API server " + connected.server, Cause: oneLine(err),
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
		e.What = "run the credential program in " + c.options.source()
		e.Next = "check that the program runs here, as the plugin's user"
		if e.Cause = errors.New(program); strings.Contains(program, "decoding stdout") {
			e.Cause = errors.New("it prints no ExecCredential") // the decoder's own error quotes the output
		}
	}
	return e
}

// unexpectedAnswer is the error for an answer that cannot be decoded.
func (c *client) unexpectedAnswer(r request) error {
	connected, err := c.connect()
	if err != nil {
		return err
	}
	return &metadata.Error{
		Kind: metadata.ErrInvalid, What: fmt.Sprintf("%s: unexpected answer from %s", r.what, connected.server),
		Next: "check that this is the address of a Kubernetes API server",
	}
}

// oneLine returns the error without the request's URL, on one line.
func oneLine(err error) error {
	if wrapped := (*url.Error)(nil); errors.As(err, &wrapped) {
		err = wrapped.Err
	}
	if text := err.Error(); strings.ContainsAny(text, "\r\n") {
		return errors.New(strings.Join(strings.Fields(text), " "))
	}
	return err
}
