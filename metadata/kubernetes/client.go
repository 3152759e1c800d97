// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package kubernetes

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// maxBytes is far above what etcd stores of any object, and above a page of small ones.
const maxBytes = 8 << 20

// client asks the API server about one Node.
type client struct {
	options Options
	// line is kept where there are many questions; nil where each is asked by itself.
	line *line
}

func newClient(options Options) client {
	if options.ServiceAccount == "" {
		options.ServiceAccount = serviceAccount
	}
	return client{options: options}
}

// request is one to the API server.
type request struct {
	method string
	// path is that of the object, with its query.
	path string
	// body is what is sent, or nil: a JSON patch, RFC 6902, unless mediaType says something else.
	body      []byte
	mediaType string
	// accept is asked for instead of the whole object, where it is not empty.
	accept string
	// what it does, for errors.
	what string
	// kind and name are those of the object that is to be answered.
	kind, name string
	// verb and resource are the right that it takes.
	verb, resource string
}

// getNode is the request for the Node.
func (c client) getNode() request {
	return request{
		method: http.MethodGet,
		path:   "/api/v1/nodes/" + url.PathEscape(c.options.NodeName),
		what: fmt.Sprintf(
			"get Node %q",
			c.options.NodeName,
		),
		kind:     "Node",
		name:     c.options.NodeName,
		verb:     "get",
		resource: "nodes",
	}
}

// noNode explains that there is no such Node.
func noNode(r request, status int) error {
	return &metadata.Error{
		Kind: metadata.ErrNotReady,
		What: fmt.Sprintf("%s: HTTP %d", r.what, status),
		Next: "check that --node-name (OXIDE_CSI_NODE_NAME) is the Node's name, spec.nodeName of the pod, and that the kubelet has registered",
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

func (o object) answers(r request) bool { return o.Kind == r.kind && o.Metadata.Name == r.name }

// ask sends a request and decodes the answer. That the object is not there, or has changed, is for the caller to explain, who gets
// the HTTP status; every other answer than the object is an error of the contract.
func (c client) ask(ctx context.Context, r request, answer interface{ answers(request) bool }) (status int, err error) {
	a, status, body, err := c.send(ctx, r)
	switch {
	case err != nil:
		return 0, err
	case status == http.StatusNotFound, status == http.StatusUnprocessableEntity, status == http.StatusConflict:
		return status, nil
	case status != http.StatusOK:
		return 0, a.refused(r, status)
	}
	if err := json.Unmarshal(body, answer); err != nil || !answer.answers(r) {
		return 0, &metadata.Error{
			Kind: metadata.ErrInvalid,
			What: fmt.Sprintf(
				"%s answered something that is not %s",
				a.server,
				strings.TrimSuffix(fmt.Sprintf("%s %q", r.kind, r.name), ` ""`),
			),
			Next: "check that this is the address of a Kubernetes API server",
		}
	}
	return status, nil
}

// send sends a request, by the line that is kept where there is one, and returns the answer whatever it is, and who gave it.
func (c client) send(ctx context.Context, r request) (a access, status int, body []byte, err error) {
	if err := ctx.Err(); err != nil {
		return access{}, 0, nil, &metadata.Error{
			Kind:  metadata.ErrNotReady,
			What:  r.what + ": not asked",
			Cause: err,
			Next:  "ask again",
		}
	}
	if c.line == nil {
		a, err = c.access()
	} else {
		a, err = c.line.open(c)
	}
	if err != nil {
		return access{}, 0, nil, err
	}
	status, body, err = a.send(ctx, r)
	if c.line != nil && (err != nil || status == http.StatusUnauthorized) {
		c.line.drop()
	}
	return a, status, body, err
}

// send sends a request, and returns the answer whatever it is.
func (a access) send(ctx context.Context, r request) (status int, body []byte, err error) {
	sender, err := a.sender()
	if err != nil {
		return 0, nil, err
	}
	httpRequest, err := http.NewRequestWithContext(ctx, r.method, a.server+r.path, bytes.NewReader(r.body))
	if err != nil {
		return 0, nil, &metadata.Error{
			Kind: metadata.ErrInvalid,
			What: "the API server's address in " + a.from + " is no URL",
			Next: "write https://host:port",
		}
	}
	httpRequest.Header.Set("Accept", cmp.Or(r.accept, "application/json"))
	if r.body != nil {
		httpRequest.Header.Set("Content-Type", cmp.Or(r.mediaType, "application/json-patch+json"))
	}
	response, err := sender.Do(httpRequest)
	if err != nil {
		return 0, nil, a.explain(ctx, err)
	}
	body, err = io.ReadAll(io.LimitReader(response.Body, maxBytes))
	if closeErr := response.Body.Close(); err == nil {
		err = closeErr
	}
	if err == nil {
		err = ctx.Err() // an answer that was cut off need not show as one
	}
	if err != nil {
		return 0, nil, a.explain(ctx, err)
	}
	return response.StatusCode, body, nil
}

// sender is what sends requests.
func (a access) sender() (*http.Client, error) {
	if a.kept != nil {
		return a.kept, nil
	}
	sender, err := a.http(false)
	if err != nil {
		return nil, a.unusable(err)
	}
	return sender, nil
}

func (a access) unusable(err error) error {
	return &metadata.Error{
		Kind:  metadata.ErrInvalid,
		What:  "use the credentials of " + a.from,
		Cause: oneLine(err),
		Next:  "repair them, or name a kubeconfig by --kubeconfig",
	}
}

// refused turns an HTTP status into the contract's error. What the API server
// says beside it stays out: it knows the names of others.
func (a access) refused(r request, status int) error {
	e := &metadata.Error{Kind: metadata.ErrNotReady, What: fmt.Sprintf("%s from %s: HTTP %d", r.what, a.server, status)}
	switch {
	case status == http.StatusUnauthorized:
		e.Kind, e.Next = metadata.ErrInvalid, "the API server does not know the credentials of "+a.from+": check that they have not expired and are for this cluster"
	case status == http.StatusForbidden:
		e.Kind, e.Next = metadata.ErrInvalid, fmt.Sprintf(
			"grant the plugin's service account the verb %q on %q (a ClusterRole and its binding)",
			r.verb,
			r.resource,
		)
	case status == http.StatusGone: // A list has changed too much between its pages.
		e.Next = "ask again"
	case status == http.StatusTooManyRequests || status >= 500:
		e.Next = "check the API server"
	default:
		e.Kind, e.Next = metadata.ErrInvalid, "check that this is the address of a Kubernetes API server"
	}
	return e
}
