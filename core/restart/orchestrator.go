// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"context"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// orchestrator calls the orchestrator, each time within half of the time that the caller has left. So a call that hangs
// leaves time to record on the rack what follows from that. It is not for [Hard], which calls no orchestrator.
type orchestrator struct{ requester metadata.RestartRequester }

func (o orchestrator) request(ctx context.Context, h *heldRestart) error {
	ctx, cancel := halfOf(ctx)
	defer cancel()
	return o.requester.Request(ctx, h.record.Instance, h.record.ID)
}

func (o orchestrator) reply(ctx context.Context, h *heldRestart) (metadata.RestartReply, error) {
	ctx, cancel := halfOf(ctx)
	defer cancel()
	return o.requester.Reply(ctx, h.record.Instance, h.record.ID)
}

func (o orchestrator) withdraw(ctx context.Context, h *heldRestart) (metadata.RestartReply, error) {
	ctx, cancel := halfOf(ctx)
	defer cancel()
	return o.requester.Withdraw(ctx, h.record.Instance, h.record.ID)
}

func (o orchestrator) forget(ctx context.Context, h *heldRestart) error {
	ctx, cancel := halfOf(ctx)
	defer cancel()
	return o.requester.Forget(ctx, h.record.Instance, h.record.ID)
}

func (o orchestrator) report(ctx context.Context, h *heldRestart, report metadata.Report) error {
	ctx, cancel := halfOf(ctx)
	defer cancel()
	return o.requester.Report(ctx, h.record.Instance, report)
}

// drain is for [Drain], whose requester is a [metadata.Drainer].
func (o orchestrator) drain(ctx context.Context, h *heldRestart) (left []string, err error) {
	ctx, cancel := halfOf(ctx)
	defer cancel()
	return o.requester.(metadata.Drainer).Drain(ctx, h.record.Instance, h.record.ID)
}

// undrain does nothing if the orchestrator drains no nodes.
func (o orchestrator) undrain(ctx context.Context, h *heldRestart) error {
	drainer, ok := o.requester.(metadata.Drainer)
	if !ok {
		return nil
	}
	ctx, cancel := halfOf(ctx)
	defer cancel()
	return drainer.Undrain(ctx, h.record.Instance, h.record.ID)
}

// halfOf limits a context to half of the time that it has left.
func halfOf(ctx context.Context) (context.Context, context.CancelFunc) {
	deadline, ok := ctx.Deadline()
	if !ok {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, time.Until(deadline)/2)
}
