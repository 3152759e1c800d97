// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"context"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// carrier calls the orchestrator, each time within half of the time that the caller has left. So a call that hangs
// leaves time to record on the rack what follows from that. It is not for [Hard], which calls no orchestrator.
type carrier struct {
	requester orchestrator.RestartRequester
	drainer   orchestrator.Drainer
}

func (o carrier) request(ctx context.Context, h *heldRestart) error {
	ctx, cancel := halfOf(ctx)
	defer cancel()
	return o.requester.Request(ctx, h.record.Instance, h.record.ID)
}

func (o carrier) reply(ctx context.Context, h *heldRestart) (orchestrator.RestartReply, error) {
	ctx, cancel := halfOf(ctx)
	defer cancel()
	return o.requester.Reply(ctx, h.record.Instance, h.record.ID)
}

func (o carrier) withdraw(ctx context.Context, h *heldRestart) (orchestrator.RestartReply, error) {
	ctx, cancel := halfOf(ctx)
	defer cancel()
	return o.requester.Withdraw(ctx, h.record.Instance, h.record.ID)
}

func (o carrier) forget(ctx context.Context, h *heldRestart) error {
	ctx, cancel := halfOf(ctx)
	defer cancel()
	return o.requester.Forget(ctx, h.record.Instance, h.record.ID)
}

func (o carrier) report(ctx context.Context, h *heldRestart, report orchestrator.Report) error {
	ctx, cancel := halfOf(ctx)
	defer cancel()
	return o.requester.Report(ctx, h.record.Instance, report)
}

// drain is for [Drain], which has a drainer.
func (o carrier) drain(ctx context.Context, h *heldRestart) (left []string, err error) {
	ctx, cancel := halfOf(ctx)
	defer cancel()
	return o.drainer.Drain(ctx, h.record.Instance, h.record.ID)
}

// undrain does nothing if the orchestrator drains no nodes.
func (o carrier) undrain(ctx context.Context, h *heldRestart) error {
	if o.drainer == nil {
		return nil
	}
	ctx, cancel := halfOf(ctx)
	defer cancel()
	return o.drainer.Undrain(ctx, h.record.Instance, h.record.ID)
}

// halfOf limits a context to half of the time that it has left.
func halfOf(ctx context.Context) (context.Context, context.CancelFunc) {
	deadline, ok := ctx.Deadline()
	if !ok {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, time.Until(deadline)/2)
}
