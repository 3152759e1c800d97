// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main_test

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// A volume whose disk is still attached is mounted and unmounted while no controller answers, if the disk is provably
// the one that was mounted before.
func TestMountWithoutController(t *testing.T) {
	t.Parallel()
	h := newHostWithGuest(t, false)
	data := filepath.Join(h.dir, "data")
	without := func(t *testing.T, args ...string) result {
		t.Helper()
		must(t, h.controller.Stop())
		got := h.run(t, args...)
		h.controller = startPlugin(
			t,
			simtest.PluginOptions{Mode: "controller", Dir: h.folder(t, "controller"), Sim: h.sim, Args: h.args},
		)
		return got
	}
	mounts := func(t *testing.T) {
		t.Helper()
		if got := without(t, "volume", "mount", "db", data); got.code != 0 ||
			!strings.Contains(got.stdout, "the controller was not needed") {
			t.Fatalf("%+v", got)
		}
		if text, err := os.ReadFile(filepath.Join(data, "file")); err != nil || string(text) != "precious" {
			t.Errorf("the file contains %q, %v", text, err)
		}
		if got := without(t, "volume", "unmount", "db", data); got.code != 0 {
			t.Fatalf("%+v", got)
		}
	}
	refused := func(t *testing.T, why string) {
		t.Helper()
		if got := without(t, "volume", "mount", "db", data); got.code == 0 || !strings.Contains(got.stderr, why) {
			t.Errorf("%+v, want a failure with %q", got, why)
			without(t, "volume", "unmount", "db", data)
		}
	}

	id := h.ok(t, "volume", "create", "db", "--size=1GiB")
	refused(t, "no plugin responds")
	h.ok(t, "volume", "mount", "db", data, "--attach")
	must(t, os.WriteFile(filepath.Join(data, "file"), []byte("precious"), 0o600))
	if got := without(t, "volume", "unmount", "db", data); got.code != 0 {
		t.Fatalf("%+v", got)
	}
	// A detach that failed leaves the disk here, and what its mount needs.
	_, err := h.sim.Inject(t.Context(), simtest.Fault{
		Operation: "instance_disk_detach", Kind: simtest.FaultStatus, Status: 500, ErrorCode: "Internal",
		Message: "Internal Server Error", Count: new(0),
	})
	must(t, err)
	h.fails(t, 3, "volume", "detach", "db")
	must(t, h.sim.ClearFaults(t.Context()))
	mounts(t)
	mounts(t)
	// A rack that no longer accepts the controller's token, or hides the project from it, says nothing about the volume
	// either.
	token := filepath.Join(h.folder(t, "controller"), "token")
	powerless, err := h.sim.NewToken(t.Context(), "none")
	must(t, err)
	for _, denied := range []struct {
		token string
		code  int
	}{{"oxide-token-revoked", 7}, {powerless, 5}} {
		must(t, os.WriteFile(token, []byte(denied.token), 0o600))
		h.fails(t, denied.code, "volume", "list")
		// The second command is that of the unit oxide-volume@.
		for _, more := range [][]string{nil, {"--attach", "--wait", "--timeout=0"}} {
			if got := h.run(t, append([]string{"volume", "mount", "db", data}, more...)...); got.code != 0 ||
				!strings.Contains(got.stdout, "the controller was not needed") {
				t.Errorf("with a token that is denied, code %d: %+v", denied.code, got)
			}
			h.ok(t, "volume", "unmount", "db", data)
		}
		// The disk of a volume that was mounted here before may not be in the guest yet.
		diskless := append(slices.Clone(h.environ), "OXIDE_CSI_SYS_ROOT="+h.folder(t, "diskless"))
		got := runPlugin(t, diskless, "volume", "mount", "db", data, "--attach", "--wait", "--timeout=2s")
		if got.code != denied.code || !strings.Contains(got.stderr, "waiting: ") {
			t.Errorf("without the disk, want code %d after a wait: %+v", denied.code, got)
		}
	}
	must(t, os.WriteFile(token, []byte(h.sim.Token), 0o600))

	// Another host knows nothing of what this one keeps, and so does the same one with another staging folder.
	elsewhere := "--staging-dir=" + filepath.Join(h.dir, "elsewhere")
	source := h.ok(t, "volume", "create", "source", "--size=1GiB")
	h.ok(t, "volume", "attach", source)
	h.ok(t, "volume", "mount", source, data, elsewhere)
	h.ok(t, "volume", "unmount", source, data, elsewhere)
	h.ok(t, "volume", "detach", source, elsewhere)
	snapshot := h.ok(t, "snapshot", "create", "monday", "--volume="+source)
	again := func(t *testing.T, args ...string) {
		t.Helper()
		h.ok(t, "volume", "detach", "db", elsewhere)
		h.ok(t, "volume", "delete", id, elsewhere)
		refused(t, "no plugin responds") // the disk is not there
		id = h.ok(t, append([]string{"volume", "create", "db"}, args...)...)
		h.ok(t, "volume", "attach", "db")
	}
	again(t, "--size=1GiB")
	refused(t, "nothing known") // the disk is blank, and stays so
	h.ok(t, "volume", "mount", "db", data, elsewhere)
	h.ok(t, "volume", "unmount", "db", data, elsewhere)
	refused(t, "does not show that the disk is this volume's")
	again(t, "--from-snapshot="+snapshot)
	h.ok(t, "volume", "mount", "db", data)
	h.ok(t, "volume", "unmount", "db", data)
	refused(t, "does not show that the disk is this volume's") // it has the filesystem of its source

	h.ok(t, "volume", "detach", "db")
	h.ok(t, "volume", "delete", id)
	h.ok(t, "volume", "delete", source)
	h.ok(t, "snapshot", "delete", snapshot)
	if kept, err := filepath.Glob(filepath.Join(h.dir, "staging", "*.json")); err != nil || len(kept) > 0 {
		t.Errorf("kept after the deletion: %v, %v", kept, err)
	}
}

// mountedBefore starts a host that has mounted the volume db, and unmounted it again. It returns the volume's ID.
func mountedBefore(t *testing.T) (h *host, id, data string) {
	t.Helper()
	h = newHostWithGuest(t, false)
	data = filepath.Join(h.dir, "data")
	id = h.ok(t, "volume", "create", "db", "--size=1GiB")
	h.ok(t, "volume", "mount", "db", data, "--attach")
	h.ok(t, "volume", "unmount", "db", data)
	return h, id, data
}

// The unit oxide-volume@ mounts a volume whose disk is here while the rack accepts calls and does not answer them.
func TestMountWhileTheRackHangs(t *testing.T) {
	t.Parallel()
	h, _, data := mountedBefore(t)
	for _, operation := range []string{"disk_list", "disk_view"} {
		_, err := h.sim.Inject(t.Context(), simtest.Fault{
			Operation: operation, Kind: simtest.FaultDelay, DelayMillis: 10 * 60 * 1000, Count: new(0),
		})
		must(t, err)
	}
	began := time.Now()
	got := h.run(t, "volume", "mount", "db", data, "--attach", "--wait", "--timeout=30s")
	if got.code != 0 || !strings.Contains(got.stdout, "the controller was not needed") {
		t.Errorf("after %s: %+v", time.Since(began), got)
	}
	must(t, h.sim.ClearFaults(t.Context()))
	h.ok(t, "volume", "unmount", "db", data)
}

// While the controller detaches a volume, it answers that another call works on it. So its disk is not known to stay,
// and is not mounted.
func TestMountDuringADetach(t *testing.T) {
	t.Parallel()
	h, id, data := mountedBefore(t)
	_, err := h.sim.Inject(t.Context(), simtest.Fault{
		Operation: "instance_disk_detach", Kind: simtest.FaultDelay, DelayMillis: 10 * 1000,
	})
	must(t, err)
	ctx, leave := context.WithCancel(t.Context())
	left := make(chan struct{})
	go func() {
		defer close(left)
		// Its error is the end of ctx.
		_, _ = h.controller.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{
			VolumeId: id, NodeId: h.sim.Instances[0].ID,
		})
	}()
	await.Eventually(t, "the rack is asked to detach the disk", func() bool {
		faults, err := h.sim.Faults(t.Context())
		return err == nil && len(faults) == 1 && faults[0].Hits > 0
	})
	if got := h.run(t, "volume", "mount", "db", data, "--attach", "--timeout=5s"); got.code != 3 {
		t.Errorf("want code 3: %+v", got)
	}
	leave()
	<-left
}
