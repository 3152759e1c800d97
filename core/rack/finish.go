// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"context"
	"io"
	"net/http"
	"time"
)

// finishTime is how long after the caller's deadline the rack's answer to a change is still waited for. A rack that takes
// longer has most likely lost the request; to hold up the volume any longer would help nobody.
const finishTime = 30 * time.Second

// finishing goes on waiting for the answer to what changes something when whoever wanted it has gone: the rack does it all
// the same, whenever it comes to it (docs/reference/rack.md §1). The RPC keeps its volume locked meanwhile, so that the next one finds
// what was done. Given up at once, an attach could be done after the volume was unpublished, and a detach after it was
// published again and mounted.
type finishing struct {
	next http.RoundTripper
}

var _ http.RoundTripper = (*finishing)(nil)

func (f *finishing) RoundTrip(req *http.Request) (*http.Response, error) {
	ctx := req.Context()
	if req.Method == http.MethodGet || ctx.Err() != nil {
		return f.next.RoundTrip(req)
	}
	deadline, has := ctx.Deadline()
	ctx = context.WithoutCancel(ctx)
	if !has {
		return f.next.RoundTrip(req.WithContext(ctx)) // the transport's own limit ends it
	}
	ctx, cancel := context.WithDeadline(ctx, deadline.Add(finishTime))
	resp, err := f.next.RoundTrip(req.WithContext(ctx))
	if err != nil {
		cancel()
		return nil, err
	}
	resp.Body = &lastingBody{ReadCloser: resp.Body, cancel: cancel}
	return resp, nil
}

// lastingBody ends the wait once the answer was read.
type lastingBody struct {
	io.ReadCloser
	cancel context.CancelFunc
}

func (b *lastingBody) Close() error {
	defer b.cancel()
	return b.ReadCloser.Close()
}
