// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
)

// moving is an orchestrator that answers as a test says. No volume has a claim.
type moving struct {
	unclaimed

	moved, silent bool
	failure       error
	// asked is the last question.
	asked [3]string
	// meanwhile is called before the answer. It may be nil.
	meanwhile func()
}

func (m *moving) Moved(ctx context.Context, volumeID, from, to string) (bool, error) {
	m.asked = [3]string{volumeID, from, to}
	if m.meanwhile != nil {
		m.meanwhile()
	}
	if m.silent {
		<-ctx.Done()
		return false, ctx.Err()
	}
	return m.moved, m.failure
}

// unclaimed is an orchestrator in which no volume has a claim.
type unclaimed struct{}

func (unclaimed) Registered(context.Context, string) ([]string, error) { return nil, nil }

func (unclaimed) Claimed(context.Context, string, []string) (map[string]string, error) {
	return nil, nil
}

// inMoving runs a test in a bubble, with an orchestrator and a volume that is published on the first node.
func inMoving(t *testing.T, m *moving, test func(t *testing.T, d *deferring, id string)) {
	t.Helper()
	inDeferring(t, func(t *testing.T, d *deferring) {
		d.orchestrator = m
		d.start(t)
		id := d.create(t, "v")
		coretest.Must(t, d.publish(t, id, d.nodes[0]))
		test(t, d, id)
	})
}

// An orchestrator can move a volume and leave the unpublish out. Then the disk is detached after the grace period, as
// if there had been an unpublish. The orchestrator is asked once.
func TestUnpublishIsMadeUpFor(t *testing.T) {
	m := &moving{moved: true}
	inMoving(t, m, func(t *testing.T, d *deferring, id string) {
		wantRejected(t, d.publish(t, id, d.nodes[1]), codes.FailedPrecondition, "in 1m0s")
		if want := [3]string{id, d.nodes[0], d.nodes[1]}; m.asked != want {
			t.Errorf("asked %v, want %v", m.asked, want)
		}
		m.asked = [3]string{}
		time.Sleep(grace / 2)
		wantRejected(t, d.publish(t, id, d.nodes[1]), codes.FailedPrecondition, "in 30s")
		d.wantHolder(t, id, d.nodes[0])
		time.Sleep(grace/2 + within)
		coretest.Must(t, d.publish(t, id, d.nodes[1]))
		if m.asked[0] != "" {
			t.Errorf("asked %v again", m.asked)
		}
	})
}

// The grace period protects a volume that comes back to its node after all.
func TestMovedVolumeReturns(t *testing.T) {
	inMoving(t, &moving{moved: true}, func(t *testing.T, d *deferring, id string) {
		wantRejected(t, d.publish(t, id, d.nodes[1]), codes.FailedPrecondition, "in 1m0s")
		coretest.Must(t, d.publish(t, id, d.nodes[0]))
		time.Sleep(time.Hour)
		d.wantHolder(t, id, d.nodes[0])
	})
}

// A disk that may be in use stays attached.
func TestVolumeThatMayBeUsedStays(t *testing.T) {
	for name, m := range map[string]*moving{
		"claimed": {}, "no answer": {silent: true}, "an error": {moved: true, failure: errors.New("no leader")},
	} {
		t.Run(name, func(t *testing.T) {
			inMoving(t, m, func(t *testing.T, d *deferring, id string) {
				for range 10 {
					wantRejected(t, d.publish(t, id, d.nodes[1]), codes.FailedPrecondition, "end its use there first")
					time.Sleep(grace)
				}
				d.wantHolder(t, id, d.nodes[0])
			})
		})
	}
}

// The instance that has the disk is deleted while the orchestrator is asked. That says nothing about the other node.
func TestHolderOfAMovedVolumeIsDeleted(t *testing.T) {
	m := &moving{moved: true}
	inMoving(t, m, func(t *testing.T, d *deferring, id string) {
		m.meanwhile = func() {
			m.meanwhile = nil
			d.runState(t, d.nodes[0], "stopped")
			coretest.Must(t, d.SDK.InstanceDelete(t.Context(), oxide.InstanceDeleteParams{Instance: oxide.NameOrId(d.nodes[0])}))
		}
		coretest.Must(t, d.publish(t, id, d.nodes[1]))
	})
}
