// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package blackbox

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// faultyOperations are the rack's operations in a volume's life.
var faultyOperations = []string{
	"disk_create",
	"disk_view",
	"disk_delete",
	"instance_disk_list",
	"instance_disk_attach",
	"instance_disk_detach",
	"instance_view",
	"project_view",
}

// shortDeadline is the client's deadline in rows with a delay. The delayed answer comes too late for it.
const shortDeadline = 500 * time.Millisecond

// faultKinds are the faults, by the name of the row.
var faultKinds = map[string]simtest.Fault{
	"401": {Kind: simtest.FaultStatus, Status: 401, ErrorCode: "Unauthorized", Message: "credentials missing or invalid"},
	"403": {Kind: simtest.FaultStatus, Status: 403, ErrorCode: "Forbidden", Message: "Forbidden"},
	"409": {
		Kind:      simtest.FaultStatus,
		Status:    409,
		ErrorCode: "Conflict",
		Message:   "instance changed state before it could be started",
	},
	"500": {Kind: simtest.FaultStatus, Status: 500, ErrorCode: "Internal", Message: "Internal Server Error"},
	"502": {Kind: simtest.FaultStatus, Status: 502, ErrorCode: "Internal", Message: "Internal Server Error"},
	"503": {Kind: simtest.FaultStatus, Status: 503, ErrorCode: "ServiceNotAvailable", Message: "Service Unavailable"},
	"507": {
		Kind:      simtest.FaultStatus,
		Status:    507,
		ErrorCode: "InsufficientCapacity",
		Message:   "Insufficient capacity: Not enough storage",
	},
	"lost":  {Kind: simtest.FaultLost},
	"reset": {Kind: simtest.FaultReset},
	"delay": {Kind: simtest.FaultDelay, DelayMillis: int(2 * shortDeadline / time.Millisecond)},
}

// TestFaults injects each kind of fault into each rack call of a volume's life, one fault at a time. In every row a
// client that repeats its requests must get the same volume as without the fault, and one disk.
//
// A life without faults, in which every request is sent twice, counts the calls, so that each call gets a row. Each
// row checks that its fault was hit.
func TestFaults(t *testing.T) {
	calls := newFaultWorld(t).countCalls(t)
	for _, operation := range faultyOperations {
		if calls[operation] == 0 {
			t.Errorf("a volume's life makes no call of %s, so no row covers it", operation)
		}
		for skip := range calls[operation] {
			t.Run(fmt.Sprintf("%s %d", operation, skip+1), func(t *testing.T) {
				t.Parallel()
				w := newFaultWorld(t)
				for _, kind := range slices.Sorted(maps.Keys(faultKinds)) {
					if operation != "disk_create" && kind == "507" {
						continue // only a call that allocates space can answer 507
					}
					fault := faultKinds[kind]
					fault.Operation, fault.Skip = operation, skip
					// The node never calls the rack, so the node's part of the life runs only once for each operation.
					withNode := skip == 0 && kind == "lost"
					t.Run(kind, func(t *testing.T) {
						w := w
						if fault.Status == http.StatusUnauthorized || fault.Status == http.StatusForbidden {
							// Some seconds after a denial the plugin checks the project, which would meet the next row's fault.
							w = newFaultWorld(t)
						}
						w.liveThrough(t, fault, withNode)
					})
				}
			})
		}
	}
}

// faultWorld is a rack with one instance and one plugin. Rows that share a world run one after another, because a
// fault could hit a call of another row.
type faultWorld struct {
	sim    *simtest.Sim
	plugin *simtest.Plugin
	dir    string
	lives  int
}

func newFaultWorld(t *testing.T) *faultWorld {
	t.Helper()
	w := &faultWorld{dir: shortDir(t)}
	mode := "controller"
	if isRoot() {
		mode, w.sim = "all", startSimWithGuests(t, w.dir, "--hotplug", "--instances=node-a")
	} else {
		w.sim = startSim(t, "--hotplug", "--instances=node-a")
	}
	w.plugin = startPlugin(t, simtest.PluginOptions{Mode: mode, Sim: w.sim, Instance: w.sim.Instance("node-a")})
	// The plugin asks for the project when it starts. That call must not count as a row's call.
	await.Eventually(
		t,
		"the plugin has asked for the project",
		func() bool { return w.calls(t).Counts["project_view"] > 0 },
	)
	return w
}

func (w *faultWorld) calls(t *testing.T) simtest.Calls {
	t.Helper()
	calls, err := w.sim.Calls(within(t, time.Minute))
	if err != nil {
		t.Fatal(err)
	}
	return calls
}

func (w *faultWorld) countCalls(t *testing.T) map[string]int {
	t.Helper()
	if err := w.sim.ClearCalls(within(t, time.Minute)); err != nil {
		t.Fatal(err)
	}
	c := newClient()
	w.live(t, c, isRoot(), func() {})
	if len(c.failed) > 0 {
		t.Fatalf("requests failed without a fault: %v", c.failed)
	}
	return w.calls(t).Counts
}

// liveThrough runs a volume's life with one fault.
func (w *faultWorld) liveThrough(t *testing.T, fault simtest.Fault, withNode bool) {
	ctx := within(t, time.Minute)
	if err := w.sim.ClearFaults(ctx); err != nil {
		t.Fatal(err)
	}
	if err := w.sim.ClearCalls(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := w.sim.Inject(ctx, fault); err != nil {
		t.Fatal(err)
	}
	c := newClient()
	if fault.Kind == simtest.FaultDelay {
		c.deadline = shortDeadline
	}
	w.live(t, c, withNode && isRoot(), func() { w.awaitDelayed(t, fault) })
	w.checkHit(t, fault)
	checkCodes(t, c, fault)
}

// live runs a volume's life. After each step it waits until the rack has finished all requests: a request that the
// client gave up is still executed, and would revert a later step.
func (w *faultWorld) live(t *testing.T, c *client, withNode bool, settle func()) {
	t.Helper()
	w.lives++
	capability := mountVolume("")
	node := w.sim.Instance("node-a")

	volume := twice(t, c, w.plugin.CreateVolume, createRequest(fmt.Sprintf("life-%d", w.lives), capability)).GetVolume()
	settle()
	w.checkOneDisk(t, volume)

	published := twice(t, c, w.plugin.ControllerPublishVolume, publishRequest(volume, node, capability))
	settle()
	w.checkOneDisk(t, volume)

	if withNode {
		patient := newClient()
		m := stageAndPublish(
			t,
			patient,
			w.plugin,
			w.dir+fmt.Sprintf("/life-%d", w.lives),
			volume,
			capability,
			published.GetPublishContext(),
		)
		if written, read := m.write(t), m.checksum(t); read != written {
			t.Errorf("the data has the checksum %s, want %s", read, written)
		}
		m.unpublishAndUnstage(t)
	}

	twice(
		t,
		c,
		w.plugin.ControllerUnpublishVolume,
		&csi.ControllerUnpublishVolumeRequest{VolumeId: volume.GetVolumeId(), NodeId: node.ID},
	)
	settle()
	w.checkOneDisk(t, volume)

	twice(t, c, w.plugin.DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: volume.GetVolumeId()})
	settle()
	checkLeftovers(t, w.sim, 0)
	if disks := disksOnRack(t, w.sim); len(disks) > 0 {
		t.Errorf("the rack lists %d disks after the volume was deleted", len(disks))
	}
}

// checkOneDisk checks that the volume's disk is the rack's only disk.
func (w *faultWorld) checkOneDisk(t *testing.T, volume *csi.Volume) {
	t.Helper()
	disks := disksOnRack(t, w.sim)
	if len(disks) != 1 || disks[0].Id != volume.GetVolumeId() {
		t.Fatalf("the rack has the disks %+v, want the one of volume %s", disks, volume.GetVolumeId())
	}
	checkLeftovers(t, w.sim, 1)
}

func (w *faultWorld) fault(t *testing.T) simtest.Fault {
	t.Helper()
	faults, err := w.sim.Faults(within(t, time.Minute))
	if err != nil {
		t.Fatal(err)
	}
	if len(faults) != 1 {
		t.Fatalf("the rack has %d faults, want 1", len(faults))
	}
	return faults[0]
}

// awaitDelayed waits until the rack has finished the delayed call, if the client made that call.
func (w *faultWorld) awaitDelayed(t *testing.T, fault simtest.Fault) {
	t.Helper()
	if fault.Kind != simtest.FaultDelay {
		return
	}
	await.Eventually(t, "the delayed call is finished", func() bool { return w.fault(t).Hits == len(w.faulted(t, fault)) })
}

// faulted returns the finished calls that the fault has hit.
func (w *faultWorld) faulted(t *testing.T, fault simtest.Fault) (list []simtest.Call) {
	t.Helper()
	for _, call := range w.calls(t).Log {
		if call.Fault == fault.Kind {
			list = append(list, call)
		}
	}
	return list
}

// checkHit checks in the rack's log that the fault was hit once and had its effect.
func (w *faultWorld) checkHit(t *testing.T, fault simtest.Fault) {
	t.Helper()
	if hits := w.fault(t).Hits; hits != 1 {
		t.Errorf("the fault was hit %d times, want once", hits)
	}
	calls := w.faulted(t, fault)
	if len(calls) != 1 || calls[0].Operation != fault.Operation {
		t.Fatalf("the rack's log shows the fault on %+v, want one call of %s", calls, fault.Operation)
	}
	if fault.Kind == simtest.FaultStatus && calls[0].Status != fault.Status {
		t.Errorf("the rack answered %d, want %d", calls[0].Status, fault.Status)
	}
}

// checkCodes checks the codes of failed attempts. After a code that the provisioner takes for final, it would forget a
// disk that exists or may still appear.
func checkCodes(t *testing.T, c *client, fault simtest.Fault) {
	t.Helper()
	// An attempt may succeed in spite of the fault: if only the answer was lost, the plugin finds the result by asking
	// the rack again. A missed deadline, however, always shows.
	late := false
	for _, list := range c.failed {
		late = late || slices.Contains(list, codes.DeadlineExceeded)
	}
	if fault.Kind == simtest.FaultDelay && !late {
		t.Errorf("no attempt ran into its deadline: %v", c.failed)
	}
	if fault.Operation != "disk_create" && fault.Operation != "disk_view" {
		return
	}
	final := []codes.Code{
		codes.Internal,
		codes.Unknown,
		codes.InvalidArgument,
		codes.AlreadyExists,
		codes.NotFound,
		codes.FailedPrecondition,
	}
	for _, code := range c.failed["CreateVolumeRequest"] {
		if slices.Contains(final, code) {
			t.Errorf("CreateVolume failed with %s, which a provisioner takes for final", code)
		}
	}
	if fault.Status == 507 &&
		!strings.Contains(fmt.Sprint(c.failed["CreateVolumeRequest"]), codes.ResourceExhausted.String()) &&
		fault.Skip == 0 {
		t.Errorf("CreateVolume without room failed with %v, want ResourceExhausted", c.failed["CreateVolumeRequest"])
	}
}
