package core_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/lab"
)

// TestUnclearCreates lets the rack fail wherever a create asks it something. A code that an orchestrator takes as final would
// make it forget what an earlier call may have made.
func TestUnclearCreates(t *testing.T) {
	r := newRig(t)
	volume := r.create(t, "volume")
	snapshot := r.snapshot(t, "snapshot", volume)
	creates := map[string]func(name string) error{
		"blank": func(name string) error { _, err := r.CreateVolume(t.Context(), createRequest(name)); return err },
		"restore": func(name string) error {
			_, err := r.CreateVolume(t.Context(), from(name, fromSnapshot(snapshot)))
			return err
		},
		"clone": func(name string) error {
			_, err := r.CreateVolume(t.Context(), from(name, fromVolume(volume)))
			return err
		},
		"snapshot": func(name string) error { return r.takeSnapshot(t.Context(), name, volume) },
	}
	for kind, create := range creates {
		r.clearCalls(t)
		r.must(t, create("counted "+kind))
		for operation, count := range r.calls(t) {
			for skip := range count {
				t.Run(fmt.Sprintf("%s, %s %d", kind, operation, skip+1), func(t *testing.T) {
					fault, err := r.sim.Inject(t.Context(), lab.Fault{Operation: operation, Kind: lab.FaultStatus, Status: 500, ErrorCode: "Internal", Message: "Internal Server Error", Skip: skip})
					r.must(t, err)
					if err := create(fmt.Sprint(kind, operation, skip)); err != nil { // what is only tidied up may fail
						wantCode(t, err, codes.Unavailable)
					}
					wantHit(t, r, fault)
				})
			}
		}
	}
}

func (r *rig) takeSnapshot(ctx context.Context, name, volumeID string) error {
	_, err := r.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: volumeID})
	return err
}

// wantHit checks that a fault has come to pass, without which a row would prove nothing, and takes it away.
func wantHit(t *testing.T, r *rig, fault lab.Fault) {
	t.Helper()
	list, err := r.sim.Faults(t.Context())
	r.must(t, err)
	for _, f := range list {
		if f.ID == fault.ID && f.Hits != 1 {
			t.Errorf("the fault was hit %d times, want once", f.Hits)
		}
	}
	r.must(t, r.sim.ClearFaults(t.Context()))
}
