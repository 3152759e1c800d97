// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
)

// What a process remembers of a volume may be wrong: another process, or a person, has changed the disk meanwhile. Each
// row does so, and the answer and the disks are those of a process that remembers nothing.
func TestRememberedDiskHasChanged(t *testing.T) {
	for _, test := range []struct {
		name string
		// published says that the first process has published the volume on node-a.
		published bool
		change    func(t *testing.T, other *rig, id, a, b string)
		call      func(t *testing.T, r *rig, id, a string) error
		code      codes.Code
		// holder is the instance that has the disk at the end: node-b, or none. gone says that there is no disk.
		onB, gone bool
	}{
		{"grown, then unpublish", true, growAndPublish, unpublishFrom, codes.OK, false, false},
		{"grown, then delete", false, grow, deleteFrom, codes.OK, false, true},
		{"moved, then unpublish", true, move, unpublishFrom, codes.OK, true, false},
		{"moved, then delete", false, move, deleteFrom, codes.FailedPrecondition, true, false},
		{"deleted, then unpublish", true, deleteAll, unpublishFrom, codes.OK, false, true},
		{"deleted, then delete", false, deleteAll, deleteFrom, codes.OK, false, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := newRig(t)
			id, a, b := r.Create(t, "v"), r.Node(t, "node-a"), r.Node(t, "node-b")
			if test.published {
				r.Must(t, r.Publish(t, id, a))
			}
			other := r.copy()
			other.Start(t)
			test.change(t, other, id, a, b)
			coretest.WantCode(t, test.call(t, r, id, a), test.code)
			disks := r.Volumes(t)
			if test.gone {
				coretest.WantSame(t, disks, nil)
				return
			}
			if len(disks) != 1 {
				t.Fatalf("the disks are %v", disks)
			}
			want := map[bool]string{true: b}[test.onB]
			if got := r.Holder(t, disks[0]); got != want {
				t.Errorf("the disk is on %q, want %q", got, want)
			}
		})
	}
}

func unpublishFrom(t *testing.T, r *rig, id, a string) error { return r.Unpublish(t, id, a) }
func deleteFrom(t *testing.T, r *rig, id, _ string) error    { return r.Delete(t, id) }

func grow(t *testing.T, other *rig, id, a, _ string) {
	other.Must(t, other.Unpublish(t, id, a))
	_, err := other.expand(t, id, 2*coretest.GiB)
	other.Must(t, err)
}

func growAndPublish(t *testing.T, other *rig, id, a, b string) {
	grow(t, other, id, a, b)
	other.Must(t, other.Publish(t, id, a))
}

func move(t *testing.T, other *rig, id, a, b string) {
	other.Must(t, other.Unpublish(t, id, a))
	other.Must(t, other.Publish(t, id, b))
}

func deleteAll(t *testing.T, other *rig, id, a, _ string) {
	other.Must(t, other.Unpublish(t, id, a))
	other.Must(t, other.Delete(t, id))
}

// With a grace period an unpublish defers the detach, also of a remembered disk.
func TestRememberedDiskWithGrace(t *testing.T) {
	r := newRig(t, func(o *coretest.Options) { o.DetachGrace = time.Hour })
	id, node := r.Create(t, "v"), r.Node(t, "node-a")
	r.Must(t, r.Publish(t, id, node))
	r.Must(t, r.Unpublish(t, id, node))
	if got := r.Holder(t, id); got != node {
		t.Errorf("the disk is on %q", got)
	}
}
