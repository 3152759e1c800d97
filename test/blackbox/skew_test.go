// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build skew

package blackbox

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// TestSkew runs all four pairs of a controller and a node from the program OXIDE_SKEW and from this tree, on real loop
// devices. Each pair makes, attaches, stages and writes volumes. The opposite pair replaces it while they are mounted,
// as in an upgrade or a rollback. It takes them away, snapshots and grows them, mounts them again and restores the
// snapshots. Then the first pair comes back, reads both, and deletes everything. make test-skew builds OXIDE_SKEW.
func TestSkew(t *testing.T) {
	needRoot(t)
	old := os.Getenv("OXIDE_SKEW")
	if old == "" {
		t.Fatal("OXIDE_SKEW must be another oxide-csi: make test-skew")
	}
	kinds := map[string]*csi.VolumeCapability{
		"default": mountVolume(""), "xfs": mountVolume("xfs"), "block": blockVolume(),
	}
	for _, first := range []pair{{old, old}, {old, programs.Plugin}, {programs.Plugin, old}, {programs.Plugin, programs.Plugin}} {
		// The opposite pair has the other program in both places.
		opposite := pair{otherThan(first.controller, old), otherThan(first.node, old)}
		name := func(program string) string { return map[bool]string{true: "old", false: "new"}[program == old] }
		t.Run(name(first.controller)+" controller, "+name(first.node)+" node", func(t *testing.T) {
			dir := shortDir(t)
			s := &skewed{sim: startSimWithGuests(t, dir, "--hotplug", "--instances=node"), dir: dir, c: newClient()}
			s.run(t, first)
			lives := map[string]*skewedLife{}
			for kind, capability := range kinds {
				lives[kind] = s.begin(t, kind, capability)
			}
			s.run(t, opposite)
			for kind := range kinds {
				s.growAndRestore(t, kind, lives[kind])
			}
			s.run(t, first)
			for kind := range kinds {
				s.end(t, kind, lives[kind])
			}
			checkLeftovers(t, s.sim, 0)
			if len(s.c.failed) > 0 {
				t.Errorf("requests failed without a fault: %v", s.c.failed)
			}
		})
	}
}

// pair is the programs of controller and node.
type pair struct{ controller, node string }

func otherThan(program, old string) string {
	if program == old {
		return programs.Plugin
	}
	return old
}

// skewed is a rack with one node, whose plugins are replaced by those of another version.
type skewed struct {
	sim              *simtest.Sim
	dir              string
	controller, node *simtest.Plugin
	c                *client
}

// run replaces the running plugins by these programs. They find the state of those before.
func (s *skewed) run(t *testing.T, programs pair) {
	t.Helper()
	s.controller = s.replace(t, s.controller, programs.controller, "controller")
	s.node = s.replace(t, s.node, programs.node, "node")
	versions := [2]string{}
	for i, plugin := range []*simtest.Plugin{s.controller, s.node} {
		info, err := plugin.GetPluginInfo(within(t, time.Minute), &csi.GetPluginInfoRequest{})
		if err != nil {
			t.Fatal(err)
		}
		versions[i] = info.GetVendorVersion()
	}
	if same := programs.controller == programs.node; same != (versions[0] == versions[1]) {
		t.Fatalf("the versions of controller and node are %q", versions)
	}
}

func (s *skewed) replace(t *testing.T, running *simtest.Plugin, program, mode string) *simtest.Plugin {
	t.Helper()
	if running != nil {
		if err := running.Stop(); err != nil {
			t.Fatal(err)
		}
	}
	opts := simtest.PluginOptions{Mode: mode, Sim: s.sim, Dir: filepath.Join(s.dir, mode)}
	if mode == "node" {
		opts.Instance = s.sim.Instances[0]
	}
	if err := os.MkdirAll(opts.Dir, 0o750); err != nil {
		t.Fatal(err)
	}
	plugin, err := simtest.StartPlugin(program, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := plugin.Process.Stop(); err != nil { // does nothing if it was replaced
			t.Error(err)
		}
		logOf(t, program+" as "+mode, plugin.Process)
	})
	return plugin
}

// skewedLife is a volume, what was written to it, and a volume from its snapshot.
type skewedLife struct {
	capability       *csi.VolumeCapability
	volume, restored *csi.Volume
	snapshot         *csi.Snapshot
	written          string
}

// mount attaches, stages and publishes a volume, or repeats this.
func (s *skewed) mount(t *testing.T, volume *csi.Volume, capability *csi.VolumeCapability) *mounted {
	t.Helper()
	published := twice(
		t,
		s.c,
		s.controller.ControllerPublishVolume,
		publishRequest(volume, s.sim.Instances[0], capability),
	)
	place := filepath.Join(s.dir, volume.GetVolumeId())
	m := stageAndPublish(t, s.c, s.node, place, volume, capability, published.GetPublishContext())
	m.checkKind(t)
	return m
}

// unmount reverts mount.
func (s *skewed) unmount(t *testing.T, m *mounted) {
	t.Helper()
	m.unpublishAndUnstage(t)
	twice(t, s.c, s.controller.ControllerUnpublishVolume, &csi.ControllerUnpublishVolumeRequest{
		VolumeId: m.volume.GetVolumeId(), NodeId: s.sim.Instances[0].ID})
}

func (s *skewed) begin(t *testing.T, kind string, capability *csi.VolumeCapability) *skewedLife {
	t.Helper()
	volume := twice(t, s.c, s.controller.CreateVolume, createRequest("skew-"+kind, capability)).GetVolume()
	m := s.mount(t, volume, capability)
	return &skewedLife{capability: capability, volume: volume, written: m.write(t)}
}

func (s *skewed) growAndRestore(t *testing.T, kind string, l *skewedLife) {
	t.Helper()
	m := s.mount(t, l.volume, l.capability) // as an orchestrator that does not know whether it was done
	check(t, kind, m, l.written, 0)
	s.unmount(t, m)
	l.snapshot = twice(t, s.c, s.controller.CreateSnapshot, &csi.CreateSnapshotRequest{
		Name: "skew-" + kind, SourceVolumeId: l.volume.GetVolumeId()}).GetSnapshot()
	twice(t, s.c, s.controller.ControllerExpandVolume, &csi.ControllerExpandVolumeRequest{
		VolumeId:         l.volume.GetVolumeId(),
		CapacityRange:    &csi.CapacityRange{RequiredBytes: 2 * gib},
		VolumeCapability: l.capability,
	})
	check(t, kind+" that has grown", s.mount(t, l.volume, l.capability), l.written, grownBytes(l.capability))
	restore := createRequest("skew-restored-"+kind, l.capability)
	restore.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
		Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: l.snapshot.GetSnapshotId()}}}
	l.restored = twice(t, s.c, s.controller.CreateVolume, restore).GetVolume()
}

func (s *skewed) end(t *testing.T, kind string, l *skewedLife) {
	t.Helper()
	grown, restored := s.mount(t, l.volume, l.capability), s.mount(t, l.restored, l.capability)
	check(t, kind+" that has grown", grown, l.written, grownBytes(l.capability))
	check(t, kind+" that was restored", restored, l.written, 0)
	for _, m := range []*mounted{grown, restored} {
		s.unmount(t, m)
		twice(t, s.c, s.controller.DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: m.volume.GetVolumeId()})
	}
	twice(t, s.c, s.controller.DeleteSnapshot, &csi.DeleteSnapshotRequest{SnapshotId: l.snapshot.GetSnapshotId()})
}
