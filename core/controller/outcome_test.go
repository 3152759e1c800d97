// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// TestCreatesStayRetryable makes each request of a create fail once. After a final code the orchestrator would drop the
// volume or snapshot, although an earlier call may have made it.
func TestCreatesStayRetryable(t *testing.T) {
	r := newRig(t)
	for kind, create := range r.creates(t) {
		r.ClearCalls(t)
		r.Must(t, create("counted "+kind))
		for operation, count := range r.Calls(t) {
			for skip := range count {
				t.Run(fmt.Sprintf("%s, %s %d", kind, operation, skip+1), func(t *testing.T) {
					fault, err := r.Sim.Inject(
						t.Context(),
						simtest.Fault{
							Operation: operation,
							Kind:      simtest.FaultStatus,
							Status:    500,
							ErrorCode: "Internal",
							Message:   "Internal Server Error",
							Skip:      skip,
						},
					)
					r.Must(t, err)
					if err := create(fmt.Sprint(kind, operation, skip)); err != nil { // a failed clean-up does not fail the create
						coretest.WantCode(t, err, codes.Unavailable)
					}
					wantHit(t, r, fault)
				})
			}
		}
	}
}

// creates are all kinds of creates.
func (r *rig) creates(t *testing.T) map[string]func(name string) error {
	t.Helper()
	volume := r.Create(t, "volume")
	snapshot := r.snapshot(t, "snapshot", volume)
	return map[string]func(name string) error{
		"blank": func(name string) error {
			_, err := r.CreateVolume(t.Context(), coretest.CreateRequest(name))
			return err
		},
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
}

// TestRepeatedCreatesStayRetryable repeats creates that succeeded and whose answer was lost, and gives one request of
// each repetition a wrong answer. After a final code nobody would delete what the first call has made.
func TestRepeatedCreatesStayRetryable(t *testing.T) {
	notFinal := []codes.Code{codes.OK, codes.Unavailable, codes.ResourceExhausted, codes.Aborted}
	r := newRig(t)
	for kind, create := range r.creates(t) {
		r.Must(t, create("made "+kind))
		r.ClearCalls(t)
		r.Must(t, create("made "+kind))
		for operation, count := range r.Calls(t) {
			for skip := range count {
				for _, fault := range []simtest.Fault{
					nothingNamed, noDisk, noInstance, noProject, noRoute, refused400, badValue, badJSON, noToken, forbidden,
					conflict, gone, tooManyRequests, rackFailed, badGateway, noSpace, lost, reset,
				} {
					fault.Operation, fault.Skip = operation, skip
					name := fmt.Sprintf("%s, %s %d, %s %d %s", kind, operation, skip+1, fault.Kind, fault.Status, fault.Message)
					t.Run(name, func(t *testing.T) {
						fault, err := r.Sim.Inject(t.Context(), fault)
						r.Must(t, err)
						if err := create("made " + kind); !slices.Contains(notFinal, status.Code(err)) {
							t.Errorf("a final code: %v", err)
						}
						wantHit(t, r, fault)
					})
				}
			}
		}
	}
}

func (r *rig) takeSnapshot(ctx context.Context, name, volumeID string) error {
	_, err := r.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: volumeID})
	return err
}

// wantHit checks that a fault was hit once, since the case proves nothing otherwise. Then it removes the faults.
func wantHit(t *testing.T, r *rig, fault simtest.Fault) {
	t.Helper()
	list, err := r.Sim.Faults(t.Context())
	r.Must(t, err)
	for _, f := range list {
		if f.ID == fault.ID && f.Hits != 1 {
			t.Errorf("the fault was hit %d times, want once", f.Hits)
		}
	}
	r.Must(t, r.Sim.ClearFaults(t.Context()))
}
