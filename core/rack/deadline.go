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

// changeGrace is how long a change is waited for after the caller's deadline. A rack that takes longer has most likely
// lost the request, and the volume should not stay locked for it.
const changeGrace = 30 * time.Second

// changeWaiter waits for the answer to a change even if the caller's context has ended. The rack makes the change in
// any case, perhaps late (docs/reference/rack.md §1). Meanwhile the RPC keeps its volume locked, so that the next RPC
// sees the result. If the RPC returned at once, the rack could attach the disk after the volume was unpublished, or
// detach it after the volume was published again and mounted.
type changeWaiter struct {
	next http.RoundTripper
}

var _ http.RoundTripper = (*changeWaiter)(nil)

func (f *changeWaiter) RoundTrip(req *http.Request) (*http.Response, error) {
	ctx := req.Context()
	if req.Method == http.MethodGet || ctx.Err() != nil {
		return f.next.RoundTrip(req)
	}
	deadline, has := ctx.Deadline()
	ctx = context.WithoutCancel(ctx)
	if !has {
		return f.next.RoundTrip(req.WithContext(ctx)) // ended by the transport's ResponseHeaderTimeout
	}
	ctx, cancel := context.WithDeadline(ctx, deadline.Add(changeGrace))
	resp, err := f.next.RoundTrip(req.WithContext(ctx))
	if err != nil {
		cancel()
		return nil, err
	}
	resp.Body = &cancelOnClose{ReadCloser: resp.Body, cancel: cancel}
	return resp, nil
}

// cancelOnClose releases the context when the body is closed.
type cancelOnClose struct {
	io.ReadCloser
	cancel context.CancelFunc
}

func (b *cancelOnClose) Close() error {
	defer b.cancel()
	return b.ReadCloser.Close()
}
