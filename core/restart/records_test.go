// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/test/pages"
)

// Limits of a rack for names and descriptions in bytes, docs/reference/rack.md §2 and §8.
const (
	nameLimit = 63
	textLimit = 512
)

// Records are read by later versions of the plugin, and by other versions that run at the same time.
func TestRecordsArePermanent(t *testing.T) {
	const volume, instance = "0f9c5a0e-8c1f-4c6b-9f58-5d2f0b6f2a11", "5a2d7c34-1b7e-4f0a-8d7f-8b1c2d3e4f50"
	planned := restartRecord{
		Version:   1,
		Cluster:   "prod",
		ID:        "0123456789abcdef",
		Instance:  instance,
		Holder:    "fedcba9876543210",
		Heartbeat: 7,
		MayStop:   true,
		Volumes:   encodeVolumes([]string{volume}),
	}
	for got, want := range map[string]string{
		restartName("prod", 2, 3):         "csi-restart-jmwawjur3yrpdbh3-2-3",
		rack.RecordText(planned):          `{"v":1,"cluster":"prod","id":"0123456789abcdef","instance":"5a2d7c34-1b7e-4f0a-8d7f-8b1c2d3e4f50","by":"fedcba9876543210","beat":7,"mayStop":true,"disks":["D5xaDowfTGufWF0vC28qEQ"]}`,
		decodeVolumes(planned.Volumes)[0]: volume,
	} {
		if got != want {
			t.Errorf("%s, want %s", got, want)
		}
		if want != volume {
			pages.Shows(t, "../../docs/reference/formats.md", want)
		}
	}
	if got, ok := parseRestart(
		rack.Record{Name: restartName("prod", 2, 3), Text: rack.RecordText(planned)},
		"prod",
	); !ok || got.slot != 2 || got.epoch != 3 ||
		got.ID != planned.ID {
		t.Errorf("read back: %+v", got)
	}
	for _, name := range []string{restartName("test", 2, 3), restartName("prod", 2, 3) + "-x", "csi-restart-x"} {
		if r, ok := parseRestart(rack.Record{Name: name, Text: rack.RecordText(planned)}, "prod"); ok {
			t.Errorf("%s is parsed as ours: %+v", name, r)
		}
	}
}

// The longest possible records fit.
func TestRecordsFit(t *testing.T) {
	cluster := strings.Repeat("c", 63)
	var volumes []string
	for range 2 * maxRecordedVolumes {
		volumes = append(volumes, uuid.NewString())
	}
	planned := restartRecord{
		Version:   1,
		Cluster:   cluster,
		ID:        newID(),
		Instance:  uuid.NewString(),
		Holder:    newID(),
		Heartbeat: 999_999,
		MayStop:   true,
		Volumes:   encodeVolumes(volumes),
	}
	handedOver := planned
	handedOver.handOver("")
	for _, text := range []string{rack.RecordText(planned), rack.RecordText(handedOver)} {
		if len(text) > textLimit {
			t.Errorf("%d bytes: %s", len(text), text)
		}
	}
	if name := restartName(cluster, 15, 999_999); len(name) > nameLimit {
		t.Errorf("%d bytes: %s", len(name), name)
	}
}

// detachName is the name of the record of a deferred detach (core/detach).
func detachName(volume string) string { return "csi-detach-" + volume }
