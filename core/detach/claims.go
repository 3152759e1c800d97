// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package detach

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
)

var (
	// ErrClaimed says that a workload on the instance may use the volume, so its disk stays attached.
	ErrClaimed = fault.ClaimedThere.New("a workload on the instance has claimed the volume")
	// ErrClaimsUnknown says that the orchestrator has not said whether a workload on the instance may use the volume, so
	// its disk stays attached.
	ErrClaimsUnknown = fault.ClaimsUnknown.New(
		"the orchestrator does not say whether a workload on the instance has claimed the volume",
	)
)

// askPause is how long an answer counts that keeps a disk attached. Orchestrators repeat some calls every second.
const askPause = 10 * time.Second

// releaseTime is how long a claim may still be seen after the request that ends it: the orchestrator releases it then,
// and an answer from before, which may have taken a few seconds, counts for askPause.
const releaseTime = askPause + 5*time.Second

// stay is why the disk of a record with this text stays attached, and since when that is known.
type stay struct {
	text   string
	reason error
	at     time.Time
}

// Asks reports whether there is an orchestrator that is asked for the claims on a volume before its disk is detached.
func (d *Detacher) Asks() bool { return d.opts.Claimed != nil }

// Staying asks for the claims on the volumes of deferred detaches, all from one instance, with one question. It returns
// [ErrClaimed] or [ErrClaimsUnknown] for each volume whose disk must stay attached. For the others no workload there
// has a claim. A workload that claims the volume after the question publishes it before it uses the volume, and that
// ends the deferred detach.
func (d *Detacher) Staying(ctx context.Context, all []record.Deferral) map[string]error {
	staying := map[string]error{}
	var asked []record.Deferral
	var volumeIDs []string
	for _, deferred := range all {
		if reason := d.stayedLately(deferred); reason != nil {
			staying[deferred.VolumeID] = reason
			continue
		}
		asked, volumeIDs = append(asked, deferred), append(volumeIDs, deferred.VolumeID)
	}
	if !d.Asks() || len(asked) == 0 {
		return staying
	}
	claimed, err := d.opts.Claimed(ctx, all[0].Instance, volumeIDs)
	for _, deferred := range asked {
		var reason error
		if by, is := claimed[deferred.VolumeID]; err != nil {
			reason = fmt.Errorf("%w: %w", ErrClaimsUnknown, err)
		} else if is {
			reason = fmt.Errorf("%w: %s", ErrClaimed, by)
		}
		if d.noteStay(deferred, reason); reason != nil {
			staying[deferred.VolumeID] = reason
		}
	}
	return staying
}

// Stays returns why the disk of a deferred detach stays attached, as far as the orchestrator was asked, or nil.
func (d *Detacher) Stays(deferred record.Deferral) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if s := d.stays[deferred.Stored.ID]; s.text == deferred.Stored.Text {
		return s.reason
	}
	return nil
}

func (d *Detacher) stayedLately(deferred record.Deferral) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if s := d.stays[deferred.Stored.ID]; s.text == deferred.Stored.Text && time.Since(s.at) < askPause {
		return s.reason
	}
	return nil
}

// noteStay keeps an answer, and logs it unless the last one was the same.
func (d *Detacher) noteStay(deferred record.Deferral, reason error) {
	d.mu.Lock()
	before := d.stays[deferred.Stored.ID]
	delete(d.stays, deferred.Stored.ID)
	if reason != nil {
		d.stays[deferred.Stored.ID] = stay{deferred.Stored.Text, reason, time.Now()}
	}
	d.mu.Unlock()
	if reason != nil && (before.text != deferred.Stored.Text || before.reason.Error() != reason.Error()) {
		d.opts.Log.Warn("the disk of an unpublished volume stays attached",
			"volume_id", deferred.VolumeID, "node_id", deferred.Instance, "error", reason.Error())
	}
}

// detachUnclaimed is detachNow, unless a workload on the instance may use the volume.
func (d *Detacher) detachUnclaimed(ctx context.Context, deferred record.Deferral) error {
	reason := d.Staying(ctx, []record.Deferral{deferred})[deferred.VolumeID]
	if reason == nil {
		return d.detachNow(ctx, deferred)
	}
	if d.isDropped(deferred, reason) {
		return errors.Join(reason, d.End(ctx, deferred))
	}
	return reason
}

// drop ends a deferred detach whose volume a workload on the instance uses. The request was for another workload: it
// was an old one, or for the same disk with another ID in the orchestrator. When the workload ends, the orchestrator
// requests the detach anew, and that request has its own grace period.
func (d *Detacher) drop(ctx context.Context, listed record.Deferral, reason error) error {
	if !d.isDropped(listed, reason) {
		return nil
	}
	return d.holdListed(ctx, listed, func(ctx context.Context) error { return d.End(ctx, listed) })
}

// isDropped reports whether the claim is not the one for which the detach was requested: the orchestrator releases that
// one as soon as the request has succeeded.
func (d *Detacher) isDropped(deferred record.Deferral, reason error) bool {
	return errors.Is(reason, ErrClaimed) && d.Left(deferred) == 0
}
