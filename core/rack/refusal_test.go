// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"errors"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// The boot disk of an instance can never be detached, so its refusal never waits for a stop. A rack with hot-plug
// refuses it with the words for a running instance.
func TestDetachOfABootDisk(t *testing.T) {
	r := newRig(t, simrack.Options{})
	node := r.node(t)
	instance, err := r.Instance(t.Context(), node)
	must(t, err)
	_, err = r.Detach(t.Context(), instance.BootDiskID, node)
	if !errors.Is(err, ErrRefused) || errors.Is(err, ErrNotStopped) {
		t.Errorf("%v", err)
	}
	refusal, explained := errors.AsType[*Refusal](err)
	if !explained || refusal.Instance.BootDiskID != instance.BootDiskID {
		t.Errorf("the refusal does not show the instance: %v", err)
	}
}

// A rack that refuses a second time, although nothing explains it, is asked no third time. Its words are passed on.
func TestUnexplainedRefusal(t *testing.T) {
	r := newRig(t, simrack.Options{})
	node, disk := r.node(t), r.create(t, "d")
	must(t, r.sim.SetRunState(t.Context(), node, "stopped"))
	r.inject(t, simtest.Fault{
		Operation: "instance_disk_attach", Kind: simtest.FaultStatus, Status: 400, ErrorCode: "InvalidRequest",
		Message: "not today", Count: new(int),
	})
	r.requests()
	_, err := r.Attach(t.Context(), disk.ID, node)
	wantSentence(t, err, ErrRefused, "not today")
	if errors.Is(err, ErrNotStopped) || errors.Is(err, ErrFull) {
		t.Errorf("an unknown reason became a known one: %v", err)
	}
	if got := r.requests()["POST /v1/instances/"+node+"/disks/attach"]; got != 2 {
		t.Errorf("%d requests to attach, want 2", got)
	}
}
