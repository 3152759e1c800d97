// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"context"
	"log/slog"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
)

// refusing is a rack that attaches no disk.
type refusing struct {
	takenOver
	disk rack.Disk
}

func (r *refusing) Disk(context.Context, string) (rack.Disk, error) { return r.disk, nil }

func (r *refusing) Attach(context.Context, rack.DiskID, string) (rack.Disk, error) {
	return rack.Disk{}, rack.ErrRefused
}

// No instance is restarted again for a disk that a restart could not attach, also if the volume had another disk when
// it was requested, or if the request came with a restart that was taken over. The next disk of the volume is another
// matter.
func TestFailedDiskIsNotTriedAgain(t *testing.T) {
	volume := volumeID(0)
	failing := rack.Disk{VolumeID: volume, ID: rack.DiskID(volumeID(1)), State: rack.Detached}
	for name, request := range map[string]func(*Engine){
		"requested with this disk": func(e *Engine) { e.addRequest(failing, "i") },
		"grown since the request":  func(e *Engine) { e.addRequest(rack.Disk{VolumeID: volume, ID: rack.DiskID(volume)}, "i") },
		"came with a restart": func(e *Engine) {
			e.addHeld(record.Restart{ID: "1", Instance: "i", Volumes: record.ShortIDs([]string{volume})}, record.Restart{})
		},
	} {
		t.Run(name, func(t *testing.T) {
			e := New(&refusing{disk: failing}, Options{MaxDisks: 8, Log: slog.New(slog.DiscardHandler)})
			request(e)
			if _, err := e.apply(t.Context(), &heldRestart{record: record.Restart{ID: "1", Instance: "i"}}); err != nil {
				t.Fatal(err)
			}
			e.addRequest(failing, "i")
			if open := e.openRequests(); len(open) > 0 {
				t.Errorf("the instance is restarted again for the same disk: %+v", open)
			}
			e.addRequest(rack.Disk{VolumeID: volume, ID: rack.DiskID(volumeID(2))}, "i")
			if open := e.openRequests(); len(open) != 1 {
				t.Errorf("%d requests for the next disk, want one", len(open))
			}
		})
	}
}

// replacing is a rack on which a volume has no disk, because it is being expanded.
type replacing struct{ Rack }

func (replacing) Disk(context.Context, string) (rack.Disk, error) {
	return rack.Disk{}, rack.ErrReplaced
}

// A volume without a disk is attached nowhere, so it is unpublished.
func TestUnpublishOfAVolumeWithoutADisk(t *testing.T) {
	e := New(replacing{}, Options{Log: slog.New(slog.DiscardHandler)})
	if disk, _, err := e.Unpublish(t.Context(), volumeID(0), "i", false); err != nil || disk.InstanceID != "" {
		t.Errorf("Unpublish: %+v, %v", disk, err)
	}
	if err := e.DeferDetach(t.Context(), volumeID(0), "i"); err != nil {
		t.Errorf("DeferDetach: %v", err)
	}
}
