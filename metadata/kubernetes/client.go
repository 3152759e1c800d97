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

// Client calls the API server. It connects at the first call.
type Client struct {
	Options Options

	mu sync.Mutex
	// connected is nil until the first call, and after a failure that new credentials may repair.
	connected *connection
}

// NewClient makes a client. It does no I/O.
func NewClient(options Options) *Client {
	options.ServiceAccount = cmp.Or(options.ServiceAccount, serviceAccount)
	options.RackLabel = cmp.Or(options.RackLabel, DefaultRackLabel)
	return &Client{Options: options}
}

// connection is an API server, and a client with the credentials for it.
type connection struct {
	rest.Interface
	server string
}

// connect returns the connection. If there is none, it makes one from the current content of the files.
func (c *Client) connect() (*connection, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.connected != nil {
		return c.connected, nil
	}
	config, err := c.Options.config()
	if err != nil {
		return nil, err
	}
	connected, err := newConnection(config)
	if err != nil {
		return nil, metadata.Invalid("use the credentials in "+c.Options.source(), oneLine(err),
			"repair them, or name a kubeconfig file by --kubeconfig")
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
func (c *Client) disconnect(failed *connection) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.connected == failed {
		c.connected = nil
	}
}

// Request is a request to the API server.
type Request struct {
	Method string
	// Path is the path of the object or list. Query holds its parameters.
	Path  string
	Query url.Values
	// In is sent as JSON, unless it is nil. Patch is its type if the request is a patch.
	In    any
	Patch types.PatchType
	// Accept is the media type of the answer. Empty means the whole object.
	Accept string
	// What says what the request does, for errors.
	What string
	// Verb and Resource are the right that the request needs.
	Verb, Resource string
}

// Media types for reading only the metadata of objects. Most of a Node is its status, above all the list of images.
const (
	MetadataOnly = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
	metadataList = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
)

// Nodes is the path of the Nodes.
const Nodes = "/api/v1/nodes"

// GetNode is the request that reads a Node.
func GetNode(what, name string) Request {
	return Request{Method: http.MethodGet, Path: Nodes + "/" + name, What: what, Verb: "get", Resource: "nodes"}
}

// NoNode is the error for a Node that does not exist.
func NoNode(name string) error {
	return metadata.NotReady(
		fmt.Sprintf("get Node %q: HTTP %d", name, http.StatusNotFound),
		nil,
		"check that --node-name (OXIDE_CSI_NODE_NAME) is the Node's name, spec.nodeName of the pod, "+
			"and that the kubelet has registered",
	)
}

// Object is the part that all objects have.
type Object struct {
	metav1.TypeMeta
	metav1.ObjectMeta `json:"metadata"`
}

// GetName is the object's name.
func (o Object) GetName() string { return o.Name }

// is reports whether this is the object of that kind and name.
func (o Object) is(kind, name string) bool { return o.Kind == kind && o.Name == name }

// List is one page of a list.
type List[T any] struct {
	metav1.TypeMeta
	metav1.ListMeta `json:"metadata"`
	Items           []T
}

// Do sends a request, and decodes the answer into out unless out is nil. An HTTP status in accepted is no error; then
// nothing is decoded.
func (c *Client) Do(ctx context.Context, r Request, out any, accepted ...int) (status int, err error) {
	body, status, err := c.Read(ctx, r, accepted...)
	if err != nil || status != http.StatusOK || out == nil {
		return status, err
	}
	if err := json.Unmarshal(body, out); err != nil {
		return status, c.UnexpectedAnswer(r)
	}
	return status, nil
}

// Read sends a request, and returns the answer as it is. An HTTP status in accepted is no error; then there is no
// answer.
func (c *Client) Read(ctx context.Context, r Request, accepted ...int) (body []byte, status int, err error) {
	connected, body, err := c.send(ctx, r)
	status = httpStatus(err)
	switch {
	case err == nil:
		return body, http.StatusOK, nil
	case connected == nil:
		return nil, 0, err
	case slices.Contains(accepted, status):
		return nil, status, nil
	}
	return nil, status, c.requestError(ctx, connected, r, err)
}

// send sends a request, and returns the error of client-go. It returns no connection if the request cannot be sent.
//
// A GET without an answer is sent once more: the server may just have closed an idle connection.
func (c *Client) send(ctx context.Context, r Request) (*connection, []byte, error) {
	for retry := r.Method == http.MethodGet; ; retry = false {
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
func (c *Client) stream(ctx context.Context, r Request) (io.ReadCloser, error) {
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
func (c *Client) prepare(ctx context.Context, r Request) (*connection, *rest.Request, error) {
	if err := ctx.Err(); err != nil {
		return nil, nil, metadata.NotReady(r.What+": not sent", err, "try again")
	}
	connected, err := c.connect()
	if err != nil {
		return nil, nil, err
	}
	// The caller retries. So client-go must not wait here for as long as a Retry-After header says.
	made := connected.Verb(r.Method).
		AbsPath(r.Path).
		MaxRetries(0).
		SetHeader("Accept", cmp.Or(r.Accept, "application/json"))
	for key, values := range r.Query {
		for _, value := range values {
			made.Param(key, value)
		}
	}
	if r.In != nil {
		body, err := json.Marshal(r.In)
		if err != nil {
			return nil, nil, err
		}
		made.SetHeader("Content-Type", cmp.Or(string(r.Patch), "application/json")).Body(body)
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
func (c *Client) requestError(ctx context.Context, connected *connection, r Request, err error) error {
	status := httpStatus(err)
	if status == 0 || status == http.StatusUnauthorized {
		c.disconnect(connected)
	}
	if status == 0 {
		return c.connectionError(ctx, connected, err)
	}
	e := metadata.NotReady(fmt.Sprintf("%s from %s: HTTP %d", r.What, connected.server, status), nil, "")
	switch {
	case status == http.StatusUnauthorized:
		e.Kind = metadata.ErrInvalid
		e.Next = "the API server does not accept the credentials in " + c.Options.source() +
			": check that they have not expired and are for this cluster"
	case status == http.StatusForbidden:
		e.Kind = metadata.ErrInvalid
		e.Next = fmt.Sprintf("grant the plugin's service account the verb %q on %q (a ClusterRole and its binding)", r.Verb,
			r.Resource)
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
func (c *Client) connectionError(ctx context.Context, connected *connection, err error) error {
	e := metadata.NotReady("connect to the Kubernetes API server "+connected.server, oneLine(err),
		"check that it runs and can be reached from here")
	var untrusted *tls.CertificateVerificationError
	var unknown x509.UnknownAuthorityError
	program, credentials := strings.CutPrefix(oneLine(err).Error(), "getting credentials: ")
	switch {
	case ctx.Err() != nil:
		e.Cause = ctx.Err()
	case errors.As(err, &untrusted), errors.As(err, &unknown):
		e.Kind = metadata.ErrInvalid
		e.Next = "check that the CA in " + c.Options.source() + " is this cluster's, " +
			"and that the address is in the API server's certificate"
	case credentials:
		e.What = "run the credential program in " + c.Options.source()
		e.Next = "check that the program runs here, as the plugin's user"
		if e.Cause = errors.New(program); strings.Contains(program, "decoding stdout") {
			e.Cause = errors.New("it prints no ExecCredential") // the decoder's own error quotes the output
		}
	}
	return e
}

// UnexpectedAnswer is the error for an answer that cannot be decoded.
func (c *Client) UnexpectedAnswer(r Request) error {
	connected, err := c.connect()
	if err != nil {
		return err
	}
	return metadata.Invalid(fmt.Sprintf("%s: unexpected response from %s", r.What, connected.server), nil,
		"check that this is the address of a Kubernetes API server")
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
