// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package blackbox

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/lab"
)

// faultyOperations are the operations of the rack that a volume's life needs.
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

// shortDeadline is the deadline of a client that a delayed answer comes too late for.
const shortDeadline = 500 * time.Millisecond

// faultKinds are what can happen to a call, by the name of the row.
var faultKinds = map[string]lab.Fault{
	"401": {Kind: lab.FaultStatus, Status: 401, ErrorCode: "Unauthorized", Message: "credentials missing or invalid"},
	"403": {Kind: lab.FaultStatus, Status: 403, ErrorCode: "Forbidden", Message: "Forbidden"},
	"409": {
		Kind:      lab.FaultStatus,
		Status:    409,
		ErrorCode: "Conflict",
		Message:   "instance changed state before it could be started",
	},
	"500": {Kind: lab.FaultStatus, Status: 500, ErrorCode: "Internal", Message: "Internal Server Error"},
	"502": {Kind: lab.FaultStatus, Status: 502, ErrorCode: "Internal", Message: "Internal Server Error"},
	"503": {Kind: lab.FaultStatus, Status: 503, ErrorCode: "ServiceNotAvailable", Message: "Service Unavailable"},
	"507": {
		Kind:      lab.FaultStatus,
		Status:    507,
		ErrorCode: "InsufficientCapacity",
		Message:   "Insufficient capacity: Not enough storage",
	},
	"lost":  {Kind: lab.FaultLost},
	"reset": {Kind: lab.FaultReset},
	"delay": {Kind: lab.FaultDelay, DelayMillis: int(2 * shortDeadline / time.Millisecond)},
}

// TestFaults puts each kind of fault on each call that the rack gets in a volume's life, one at a time. Whatever the
// fault, a client that repeats its requests gets the volume that it would have got without it, and one disk.
//
// The calls are counted in a life without faults, every request sent twice in it, so that a row for each of them exists
// and none is without effect; each row proves that its fault was hit.
func TestFaults(t *testing.T) {
	calls := newFaultWorld(t).callsOfALife(t)
	for _, operation := range faultyOperations {
		if calls[operation] == 0 {
			t.Errorf("a volume's life makes no call of %s, so no row would prove anything", operation)
		}
		for skip := range calls[operation] {
			t.Run(fmt.Sprintf("%s %d", operation, skip+1), func(t *testing.T) {
				t.Parallel()
				w := newFaultWorld(t)
				for _, kind := range slices.Sorted(maps.Keys(faultKinds)) {
					if operation != "disk_create" && kind == "507" {
						continue // only what makes something can find no room
					}
					fault := faultKinds[kind]
					fault.Operation, fault.Skip = operation, skip
					// The node never asks the rack, so its half of the life is lived once for each operation.
					withNode := skip == 0 && kind == "lost"
					t.Run(kind, func(t *testing.T) { w.liveThrough(t, fault, withNode) })
				}
			})
		}
	}
}

// faultWorld is a rack with one instance and one plugin. Rows of one world follow each other, since a fault would hit
// another row's call.
type faultWorld struct {
	sim    *lab.Sim
	plugin *lab.Plugin
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
	w.plugin = startPlugin(t, lab.PluginOptions{Mode: mode, Sim: w.sim, Instance: w.sim.Instance("node-a")})
	// The plugin asks for the project when it starts; the rows begin after that.
	eventually(t, "the plugin has asked for the project", func() bool { return w.calls(t).Counts["project_view"] > 0 })
	return w
}

func (w *faultWorld) calls(t *testing.T) lab.Calls {
	t.Helper()
	calls, err := w.sim.Calls(within(t, time.Minute))
	if err != nil {
		t.Fatal(err)
	}
	return calls
}

func (w *faultWorld) callsOfALife(t *testing.T) map[string]int {
	t.Helper()
	if err := w.sim.ClearCalls(within(t, time.Minute)); err != nil {
		t.Fatal(err)
	}
	c := newClient()
	w.live(t, c, isRoot(), func() {})
	if len(c.failed) > 0 {
		t.Fatalf("requests failed although nothing was wrong: %v", c.failed)
	}
	return w.calls(t).Counts
}

// liveThrough lives a volume's life with one fault in it.
func (w *faultWorld) liveThrough(t *testing.T, fault lab.Fault, withNode bool) {
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
	if fault.Kind == lab.FaultDelay {
		c.deadline = shortDeadline
	}
	w.live(t, c, withNode && isRoot(), func() { w.settle(t, fault) })
	w.checkHit(t, fault)
	checkCodes(t, c, fault)
}

// live is a volume's life. After each step, everything that the rack has been asked must have been done: a call that the
// client has given up is done all the same, and would undo a later step.
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
			t.Errorf("the data has the checksum %s, written was %s", read, written)
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

// checkOneDisk checks that the volume's disk is the only one.
func (w *faultWorld) checkOneDisk(t *testing.T, volume *csi.Volume) {
	t.Helper()
	disks := disksOnRack(t, w.sim)
	if len(disks) != 1 || disks[0].Id != volume.GetVolumeId() {
		t.Fatalf("the rack has the disks %+v, want the one of volume %s", disks, volume.GetVolumeId())
	}
	checkLeftovers(t, w.sim, 1)
}

func (w *faultWorld) fault(t *testing.T) lab.Fault {
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

// settle waits until the rack has done the call that it was to delay, if that was made.
func (w *faultWorld) settle(t *testing.T, fault lab.Fault) {
	t.Helper()
	if fault.Kind != lab.FaultDelay {
		return
	}
	eventually(t, "the delayed call is done", func() bool { return w.fault(t).Hits == len(w.faulted(t, fault)) })
}

// faulted are the calls that a fault has hit and that are over.
func (w *faultWorld) faulted(t *testing.T, fault lab.Fault) (list []lab.Call) {
	t.Helper()
	for _, call := range w.calls(t).Log {
		if call.Fault == fault.Kind {
			list = append(list, call)
		}
	}
	return list
}

// checkHit checks, by what the rack itself says, that the fault did what the row is about.
func (w *faultWorld) checkHit(t *testing.T, fault lab.Fault) {
	t.Helper()
	if hits := w.fault(t).Hits; hits != 1 {
		t.Errorf("the fault was hit %d times, want once", hits)
	}
	calls := w.faulted(t, fault)
	if len(calls) != 1 || calls[0].Operation != fault.Operation {
		t.Fatalf("the rack's log shows the fault on %+v, want one call of %s", calls, fault.Operation)
	}
	if fault.Kind == lab.FaultStatus && calls[0].Status != fault.Status {
		t.Errorf("the rack answered %d, want %d", calls[0].Status, fault.Status)
	}
}

// checkCodes checks the codes of the attempts that failed. What a provisioner takes for final would make it forget a disk
// that is there or may appear yet.
func checkCodes(t *testing.T, c *client, fault lab.Fault) {
	t.Helper()
	// An answer that says what was done needs no repetition, as when the call was done and only its answer was lost and
	// a look at the rack settles it. A deadline, however, is always felt.
	late := false
	for _, list := range c.failed {
		late = late || slices.Contains(list, codes.DeadlineExceeded)
	}
	if fault.Kind == lab.FaultDelay && !late {
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
