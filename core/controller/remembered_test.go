// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"
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
		call      func(t *testing.T, r *rig, id, a, b string) error
		code      codes.Code
		// holder is the instance that has the disk at the end, "" for none, and "gone" if there is no disk.
		holder string
	}{
		{"grown, then unpublish", true, growAndPublish, unpublishFromA, codes.OK, ""},
		{"grown, then delete", false, grow, deleteVolume, codes.OK, "gone"},
		{"grown, then publish", false, grow, publishOnB, codes.OK, "b"},
		{"moved, then unpublish", true, publishElsewhere, unpublishFromA, codes.OK, "b"},
		{"published, then delete", false, publishElsewhere, deleteVolume, codes.FailedPrecondition, "b"},
		{"published, then publish", false, publishHere, publishOnB, codes.FailedPrecondition, "a"},
		{"published there, then publish", false, publishElsewhere, publishOnB, codes.OK, "b"},
		{"made a boot disk, then publish", false, boot, publishOnB, codes.FailedPrecondition, "b"},
		{"deleted, then unpublish", true, deleteAll, unpublishFromA, codes.OK, "gone"},
		{"deleted, then delete", false, deleteAll, deleteVolume, codes.OK, "gone"},
		{"deleted, then publish", false, deleteAll, publishOnB, codes.NotFound, "gone"},
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
			coretest.WantCode(t, test.call(t, r, id, a, b), test.code)
			disks := r.Volumes(t)
			if gone := test.holder == "gone"; gone != (len(disks) == 0) {
				t.Fatalf("the disks are %v", disks)
			} else if gone {
				return
			}
			if got, want := r.Holder(t, disks[0]), map[string]string{"a": a, "b": b}[test.holder]; got != want {
				t.Errorf("the disk is on %q, want %q", got, want)
			}
		})
	}
}

func unpublishFromA(t *testing.T, r *rig, id, a, _ string) error { return r.Unpublish(t, id, a) }
func publishOnB(t *testing.T, r *rig, id, _, b string) error     { return r.Publish(t, id, b) }
func deleteVolume(t *testing.T, r *rig, id, _, _ string) error   { return r.Delete(t, id) }

func grow(t *testing.T, other *rig, id, a, _ string) {
	other.Must(t, other.Unpublish(t, id, a))
	_, err := other.expand(t, id, 2*coretest.GiB)
	other.Must(t, err)
}

func growAndPublish(t *testing.T, other *rig, id, a, b string) {
	grow(t, other, id, a, b)
	other.Must(t, other.Publish(t, id, a))
}

func publishHere(t *testing.T, other *rig, id, a, _ string) { other.Must(t, other.Publish(t, id, a)) }

func publishElsewhere(t *testing.T, other *rig, id, a, b string) {
	other.Must(t, other.Unpublish(t, id, a))
	other.Must(t, other.Publish(t, id, b))
}

// boot attaches the disk to node-b by hand and makes it the boot disk.
func boot(t *testing.T, other *rig, id, _, b string) {
	other.Must(t, other.Sim.SetRunState(t.Context(), b, "stopped"))
	other.AttachByHand(t, id, b)
	boot, off := oxide.NameOrId(id), false
	_, err := other.SDK.InstanceUpdate(t.Context(), oxide.InstanceUpdateParams{
		Instance: oxide.NameOrId(b),
		Body: &oxide.InstanceUpdate{
			BootDisk:          &boot,
			EnableJumboFrames: &off,
			Memory:            oxide.ByteCount(coretest.GiB),
			Ncpus:             1,
		},
	})
	other.Must(t, err)
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

// The rack may fail to delete the old disk of a volume that another process expands, and show it again as faulted
// (docs/reference/rack.md §3). It takes a deletion of that disk, and the volume has another one.
func TestRememberedDiskIsHalfDeleted(t *testing.T) {
	other := newRig(t)
	var host atomic.Pointer[url.URL]
	through := func(to string) {
		u, err := url.Parse(to)
		other.Must(t, err)
		host.Store(u)
	}
	through(other.Sim.Host)
	proxy := httptest.NewServer(
		&httputil.ReverseProxy{Rewrite: func(req *httputil.ProxyRequest) { req.SetURL(host.Load()) }},
	)
	t.Cleanup(proxy.Close)
	r, sim := other.copy(), *other.Sim
	sim.Host = proxy.URL
	r.Sim = &sim
	r.Start(t)
	id := r.Create(t, "v")
	old := r.Disk(t, id)
	_, err := other.expand(t, id, 2*coretest.GiB)
	other.Must(t, err)
	through(other.HalfDeleted(t, old))
	r.Must(t, r.Delete(t, id))
	through(other.Sim.Host)
	if disks := r.Volumes(t); len(disks) > 0 {
		t.Errorf("the deleted volume still has %v", disks)
	}
}
