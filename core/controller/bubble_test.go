// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/core/controller"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// bubbleRig is a simulated rack in a synctest bubble. A controller calls the rack's handler directly: a pending read
// from a socket would stop the bubble's clock.
type bubbleRig struct {
	*rig
	rack *simrack.Rack
	// client is the last controller's.
	client *rack.Client
	// token is the token of controllers; empty means coretest.Token.
	token string
	// requests counts the requests of all controllers.
	requests atomic.Int64
	// before, if set, is called before each request of a controller. Set it before the start of the controllers.
	before func(*http.Request)
	// transport, if set, replaces the transport of the controllers.
	transport func(handlerTransport) http.RoundTripper
}

func newBubbleRig(t *testing.T, change ...func(*simrack.Options)) *bubbleRig {
	t.Helper()
	opts := simrack.Options{
		Token:     coretest.Token,
		Project:   coretest.Project,
		Instances: []string{"node-a"},
		Hotplug:   true,
		Log:       coretest.DiscardLog(),
	}
	for _, set := range change {
		set(&opts)
	}
	sim, err := simrack.New(opts)
	coretest.Must(t, err)
	t.Cleanup(func() { coretest.Must(t, sim.Close()) })
	sdk, err := oxide.NewClient(
		oxide.WithHost("http://rack"),
		oxide.WithToken(coretest.Token),
		oxide.WithHTTPClient(&http.Client{Transport: handlerTransport{sim.API()}}),
	)
	coretest.Must(t, err)
	return &bubbleRig{rig: &rig{&coretest.Rig{SDK: sdk}}, rack: sim}
}

// handlerTransport is an HTTP transport that calls a handler.
type handlerTransport struct{ http.Handler }

func (h handlerTransport) RoundTrip(req *http.Request) (resp *http.Response, err error) {
	defer func() {
		if reason := recover(); reason == http.ErrAbortHandler { // how the simulator loses an answer
			resp, err = nil, http.ErrAbortHandler
		} else if reason != nil {
			panic(reason)
		}
	}()
	if err := req.Context().Err(); err != nil {
		return nil, err
	}
	if req.Body == nil {
		req = req.Clone(req.Context())
		req.Body = http.NoBody
	}
	recorder := httptest.NewRecorder()
	h.ServeHTTP(recorder, req)
	return recorder.Result(), nil
}

// startController starts a controller that has no socket.
func (r *bubbleRig) startController(t *testing.T, opts controller.Options) *controller.Service {
	t.Helper()
	api := r.rack.API()
	counted := http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		r.requests.Add(1)
		if r.before != nil {
			r.before(req)
		}
		api.ServeHTTP(w, req)
	})
	var transport http.RoundTripper = handlerTransport{counted}
	if r.transport != nil {
		transport = r.transport(handlerTransport{counted})
	}
	client, err := rack.New(rack.Config{
		Name:       "default",
		Host:       "http://rack",
		Project:    coretest.Project,
		Token:      rack.FixedToken(cmp.Or(r.token, coretest.Token)),
		HTTPClient: &http.Client{Transport: transport},
	})
	coretest.Must(t, err)
	r.client = client
	opts.Racks, opts.Cluster, opts.MaxDisks = []*rack.Client{client}, coretest.Cluster, 8
	opts.Log = cmp.Or(opts.Log, coretest.DiscardLog())
	return controller.New(opts)
}

// inject adds a fault to the rack.
func (r *bubbleRig) inject(t *testing.T, fault simtest.Fault) {
	t.Helper()
	coretest.Must(t, r.control(http.MethodPost, "/v0/faults", fault))
}

// halt halts the guest of an instance, as if it had shut itself down.
func (r *bubbleRig) halt(instance string) error {
	return r.control(http.MethodPost, "/v0/halt", map[string]string{"instance": instance})
}

// control sends a request to the rack's control endpoint.
func (r *bubbleRig) control(method, path string, content any) error {
	body, err := json.Marshal(content)
	if err != nil {
		return err
	}
	recorder := httptest.NewRecorder()
	r.rack.Control().ServeHTTP(recorder, httptest.NewRequest(method, path, bytes.NewReader(body)))
	if recorder.Code >= 300 {
		return fmt.Errorf("%s: %d %s", path, recorder.Code, recorder.Body)
	}
	return nil
}
