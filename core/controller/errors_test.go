// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/uuid"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

func refusal(status int, code, message string) simtest.Fault {
	return simtest.Fault{Kind: simtest.FaultStatus, Status: status, ErrorCode: code, Message: message}
}

// Answers of a rack (docs/reference/rack.md §1 to §7) and of a proxy before it.
var (
	refused400 = refusal(400, "InvalidRequest", "an unknown reason")
	badSize    = refusal(
		400,
		"InvalidValue",
		`unsupported value for "size": total size must be less than 1023 GiB`,
	)
	badBlockSize = refusal(
		400,
		"InvalidValue",
		`unsupported value for "size and block_size": total size must be a multiple of block size 4096`,
	)
	badValue   = refusal(400, "InvalidValue", `unsupported value for "description": too much of it`)
	badJSON    = simtest.Fault{Kind: simtest.FaultStatus, Status: 400, Message: "unable to parse JSON body: EOF"}
	badVersion = simtest.Fault{
		Kind:    simtest.FaultStatus,
		Status:  400,
		Message: "server does not support this API version: 2026060800.0.0",
	}
	notStopped      = refusal(400, "InvalidRequest", "cannot attach disk: instance is not fully stopped")
	notStoppedOff   = refusal(400, "InvalidRequest", "cannot detach disk: instance is not fully stopped")
	tooMany         = refusal(400, "InvalidRequest", "cannot attach more than 12 disks to instance")
	noToken         = refusal(401, "Unauthorized", "credentials missing or invalid")
	forbidden       = refusal(403, "Forbidden", "Forbidden")
	noProject       = refusal(404, "ObjectNotFound", `not found: project with name "demo"`)
	noDisk          = refusal(404, "ObjectNotFound", `not found: disk with id "c0ffee00-0000-4000-8000-000000000000"`)
	noInstance      = refusal(404, "ObjectNotFound", `not found: instance with id "c0ffee00-0000-4000-8000-000000000000"`)
	nothingNamed    = refusal(404, "ObjectNotFound", "nothing here")
	noRoute         = simtest.Fault{Kind: simtest.FaultStatus, Status: 404, Message: "Not Found"}
	conflict        = refusal(409, "Conflict", "another change came first")
	gone            = refusal(410, "Gone", "Gone")
	tooManyRequests = simtest.Fault{Kind: simtest.FaultStatus, Status: 429, Message: "slow down"}
	rackFailed      = refusal(500, "Internal", "Internal Server Error")
	badGateway      = refusal(502, "Internal", "Internal Server Error")
	unavailable503  = refusal(503, "ServiceNotAvailable", "Service Unavailable")
	gatewayTimeout  = refusal(504, "Internal", "Internal Server Error")
	noSpace         = refusal(507, "InsufficientCapacity", "Insufficient capacity: Not enough storage")
	lost            = simtest.Fault{Kind: simtest.FaultLost}
	reset           = simtest.Fault{Kind: simtest.FaultReset}
	// Package rack repeats requests that are safe to repeat. These faults hit each attempt.
	always503 = simtest.Fault{
		Kind:      simtest.FaultStatus,
		Status:    503,
		ErrorCode: "ServiceNotAvailable",
		Message:   "Service Unavailable",
		Count:     new(int),
	}
	alwaysBadVersion = simtest.Fault{Kind: simtest.FaultStatus, Status: 400, Message: badVersion.Message, Count: new(int)}
	resetAlways      = simtest.Fault{Kind: simtest.FaultReset, Count: new(int)}
)

// errorRow is an answer of the rack to one operation, and the expected code of the RPC.
type errorRow struct {
	operation string
	fault     simtest.Fault
	code      codes.Code
	mentions  string
}

// TestRackErrorsToCodes maps an HTTP answer of the rack to the gRPC code that the orchestrator gets.
func TestRackErrorsToCodes(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		rpc  string
		call func(t *testing.T, r *rig, volumeID, nodeID string) error
		rows []errorRow
	}{
		{"CreateVolume", func(t *testing.T, r *rig, _, _ string) error {
			_, err := r.CreateVolume(t.Context(), coretest.CreateRequest("new"))
			return err
		}, []errorRow{
			{"disk_create", refused400, codes.FailedPrecondition, "unknown reason"},
			{"disk_create", badSize, codes.OutOfRange, "1023 GiB"},
			{"disk_create", badBlockSize, codes.OutOfRange, "multiple of block size"},
			{"disk_create", badValue, codes.FailedPrecondition, "description"},
			{"disk_create", badJSON, codes.FailedPrecondition, "unable to parse"},
			{"disk_create", badVersion, codes.OK, ""}, // after another request for the API version
			{"disk_create", alwaysBadVersion, codes.Unavailable, "API versions"},
			{"disk_create", noToken, codes.Unavailable, "credentials"},
			{"disk_create", forbidden, codes.Unavailable, "Forbidden"},
			{"disk_create", noProject, codes.Unavailable, `project "demo"`},
			{"disk_create", noRoute, codes.Unavailable, "Not Found"},
			{"disk_create", nothingNamed, codes.Unavailable, "retry"},
			{"anti_affinity_group_view", always503, codes.Unavailable, "Service Unavailable"},
			{"disk_create", conflict, codes.Unavailable, "came first"},
			{"disk_create", gone, codes.Unavailable, "Gone"},
			{"disk_create", tooManyRequests, codes.Unavailable, "slow down"},
			// After a final code a provisioner drops the volume, although the disk may exist or appear later.
			{"disk_create", rackFailed, codes.Unavailable, "retry"},
			{"disk_create", badGateway, codes.Unavailable, "retry"},
			{"disk_create", unavailable503, codes.Unavailable, "retry"},
			{"disk_create", gatewayTimeout, codes.Unavailable, "retry"},
			{"disk_create", reset, codes.Unavailable, "retry"},
			{"disk_create", lost, codes.OK, ""},
			{"disk_create", noSpace, codes.ResourceExhausted, "Not enough storage"},
		}},
		{"CreateVolume again", func(t *testing.T, r *rig, _, _ string) error {
			_, err := r.CreateVolume(t.Context(), coretest.CreateRequest("v"))
			return err
		}, []errorRow{
			{"disk_create", noSpace, codes.OK, ""},
			{"disk_create", rackFailed, codes.OK, ""},
			{"disk_create", unavailable503, codes.OK, ""},
			{"disk_create", reset, codes.OK, ""},
			{"disk_view", noToken, codes.Unavailable, "credentials"},
			{"disk_view", forbidden, codes.Unavailable, "Forbidden"},
			{"disk_view", noProject, codes.Unavailable, `project "demo"`},
			{"disk_view", noDisk, codes.Unavailable, "retry"},
			{"disk_view", rackFailed, codes.Unavailable, "Internal Server Error"},
			{"disk_view", always503, codes.Unavailable, "Service Unavailable"},
			{"disk_view", resetAlways, codes.Unavailable, ""},
		}},
		{"DeleteVolume", func(t *testing.T, r *rig, volumeID, _ string) error { return r.Delete(t, volumeID) }, []errorRow{
			{"disk_view", refused400, codes.FailedPrecondition, "unknown reason"},
			{"disk_view", noToken, codes.Unauthenticated, "credentials"},
			{"disk_view", forbidden, codes.PermissionDenied, "Forbidden"},
			{"disk_view", noDisk, codes.OK, ""}, // the token has access to the project, so the disk is deleted
			{"disk_view", noRoute, codes.Unavailable, "Not Found"},
			{"disk_view", rackFailed, codes.Internal, "Internal Server Error"},
			{"disk_view", badGateway, codes.Unavailable, "Internal Server Error"},
			{"disk_view", always503, codes.Unavailable, "Service Unavailable"},
			{"disk_view", resetAlways, codes.Unavailable, ""},
			{"disk_delete", refused400, codes.FailedPrecondition, "unknown reason"},
			{"disk_delete", noToken, codes.Unauthenticated, "credentials"},
			{"disk_delete", forbidden, codes.PermissionDenied, "Forbidden"},
			{"disk_delete", noDisk, codes.Aborted, "retry"}, // the rack still shows a disk of the volume
			{"disk_delete", conflict, codes.Unavailable, "came first"},
			{"disk_delete", rackFailed, codes.Internal, "Internal Server Error"},
			{"disk_delete", unavailable503, codes.Unavailable, "Service Unavailable"},
			{"disk_delete", reset, codes.Unavailable, ""},
			{"disk_delete", lost, codes.Unavailable, ""},
		}},
		{"DeleteVolume of an unknown ID", func(t *testing.T, r *rig, _, _ string) error { return r.Delete(t, uuid.NewString()) }, []errorRow{
			// Without access to the project the plugin must not report that the volume is deleted.
			{"project_view", noToken, codes.Unavailable, "token"},
			{"project_view", forbidden, codes.Unavailable, "token"},
			{"project_view", noProject, codes.Unavailable, "token"},
			{"project_view", rackFailed, codes.Unavailable, "token"},
			{"project_view", resetAlways, codes.Unavailable, "token"},
		}},
		{"ControllerPublishVolume", func(t *testing.T, r *rig, volumeID, nodeID string) error { return r.Publish(t, volumeID, nodeID) }, []errorRow{
			{"disk_view", noToken, codes.Unauthenticated, "credentials"},
			{"disk_view", forbidden, codes.PermissionDenied, "Forbidden"},
			{"disk_view", noDisk, codes.NotFound, "not found"},
			{"disk_view", rackFailed, codes.Internal, "Internal Server Error"},
			{"disk_view", always503, codes.Unavailable, "Service Unavailable"},
			{"instance_disk_list", noToken, codes.Unauthenticated, "credentials"},
			{"instance_disk_list", forbidden, codes.PermissionDenied, "Forbidden"},
			{"instance_disk_list", noInstance, codes.NotFound, "no such instance"},
			{"instance_disk_list", always503, codes.Unavailable, "Service Unavailable"},
			{"instance_disk_attach", refused400, codes.FailedPrecondition, "only while the instance is stopped"},
			{"instance_disk_attach", notStopped, codes.FailedPrecondition, "only while the instance is stopped"},
			{"instance_disk_attach", tooMany, codes.ResourceExhausted, "allows fewer than --max-disks"},
			{"instance_disk_attach", noToken, codes.Unauthenticated, "credentials"},
			{"instance_disk_attach", forbidden, codes.PermissionDenied, "Forbidden"},
			{"instance_disk_attach", conflict, codes.Unavailable, "came first"},
			{"instance_disk_attach", rackFailed, codes.Internal, "Internal Server Error"},
			{"instance_disk_attach", badGateway, codes.Unavailable, "Internal Server Error"},
			{"instance_disk_attach", always503, codes.Unavailable, "Service Unavailable"},
			{"instance_disk_attach", resetAlways, codes.Unavailable, ""},
			{"instance_disk_attach", lost, codes.OK, ""},
		}},
		{"ControllerUnpublishVolume", func(t *testing.T, r *rig, volumeID, nodeID string) error {
			r.AttachByHand(t, volumeID, nodeID)
			return r.Unpublish(t, volumeID, nodeID)
		}, []errorRow{
			{"disk_view", noToken, codes.Unauthenticated, "credentials"},
			{"disk_view", forbidden, codes.PermissionDenied, "Forbidden"},
			{"disk_view", noDisk, codes.OK, ""},
			{"disk_view", rackFailed, codes.Internal, "Internal Server Error"},
			{"disk_view", always503, codes.Unavailable, "Service Unavailable"},
			{"instance_disk_detach", refused400, codes.FailedPrecondition, "only while the instance is stopped"},
			{"instance_disk_detach", notStoppedOff, codes.FailedPrecondition, "only while the instance is stopped"},
			{"instance_disk_detach", noToken, codes.Unauthenticated, "credentials"},
			{"instance_disk_detach", forbidden, codes.PermissionDenied, "Forbidden"},
			{"instance_disk_detach", conflict, codes.Unavailable, "came first"},
			{"instance_disk_detach", rackFailed, codes.Internal, "Internal Server Error"},
			{"instance_disk_detach", always503, codes.Unavailable, "Service Unavailable"},
			{"instance_disk_detach", resetAlways, codes.Unavailable, ""},
			{"instance_disk_detach", lost, codes.OK, ""},
		}},
		{"ValidateVolumeCapabilities", func(t *testing.T, r *rig, volumeID, _ string) error {
			_, err := r.ValidateVolumeCapabilities(t.Context(), &csi.ValidateVolumeCapabilitiesRequest{VolumeId: volumeID, VolumeCapabilities: []*csi.VolumeCapability{coretest.MountWriter()}})
			return err
		}, []errorRow{
			{"disk_view", refused400, codes.FailedPrecondition, "unknown reason"},
			{"disk_view", noToken, codes.Unauthenticated, "credentials"},
			{"disk_view", forbidden, codes.PermissionDenied, "Forbidden"},
			{"disk_view", noDisk, codes.NotFound, "not found"},
			{"disk_view", rackFailed, codes.Internal, "Internal Server Error"},
			{"disk_view", always503, codes.Unavailable, "Service Unavailable"},
		}},
		{"ControllerExpandVolume", func(t *testing.T, r *rig, volumeID, _ string) error {
			_, err := r.ControllerExpandVolume(t.Context(), &csi.ControllerExpandVolumeRequest{
				VolumeId: volumeID, CapacityRange: &csi.CapacityRange{RequiredBytes: 2 * coretest.GiB},
			})
			return err
		}, []errorRow{ // NOT_FOUND is final for Kubernetes' external-resizer
			{"anti_affinity_group_create", nothingNamed, codes.Unavailable, "nothing here"},
			{"snapshot_create", nothingNamed, codes.Unavailable, "nothing here"},
			{"utilization_view", nothingNamed, codes.Unavailable, "nothing here"},
			{"disk_create", nothingNamed, codes.Aborted, "nothing here"},
		}},
		{"ListVolumes", func(t *testing.T, r *rig, _, _ string) error {
			_, err := r.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
			return err
		}, []errorRow{
			{"disk_list", nothingNamed, codes.Unavailable, "nothing here"},
			{"disk_list", noDisk, codes.Unavailable, "not found"},
			{"anti_affinity_group_list", nothingNamed, codes.Unavailable, "nothing here"},
		}},
		{"ListSnapshots", func(t *testing.T, r *rig, _, _ string) error {
			_, err := r.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{})
			return err
		}, []errorRow{{"snapshot_list", nothingNamed, codes.Unavailable, "nothing here"}}},
		{"GetCapacity", func(t *testing.T, r *rig, _, _ string) error {
			_, err := r.GetCapacity(t.Context(), &csi.GetCapacityRequest{})
			return err
		}, []errorRow{{"utilization_view", nothingNamed, codes.Unavailable, "nothing here"}}},
	} {
		for _, row := range test.rows {
			name := test.rpc + "/" + row.operation + "/" + row.fault.Kind
			if row.fault.Status != 0 {
				name += " " + strconv.Itoa(row.fault.Status) + " " + row.fault.Message
			}
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				log := &simtest.Output{}
				r := newRig(t, func(o *coretest.Options) { o.Log = log })
				volumeID, nodeID := r.Create(t, "v"), r.Node(t, "node-a")
				r.Start(t) // it remembers no disk
				fault := row.fault
				fault.Operation = row.operation
				_, err := r.Sim.Inject(t.Context(), fault)
				r.Must(t, err)
				err = test.call(t, r, volumeID, nodeID)
				coretest.WantCode(t, err, row.code, row.mentions)
				message := status.Convert(err).Message()
				refused := row.code == codes.FailedPrecondition || row.code == codes.ResourceExhausted
				if words := row.fault.Message; refused && !strings.Contains(message+log.String(), words) {
					t.Errorf("neither the message %q nor the log has the words %q of the rack:\n%s", message, words, log)
				}
				if strings.ContainsAny(message, "\r\n\t") || strings.Contains(message, "oxide-token-") {
					t.Errorf("message %q has several lines or a token", message)
				}
				faults, err := r.Sim.Faults(t.Context())
				r.Must(t, err)
				if faults[0].Hits == 0 || fault.Count == nil && faults[0].Hits > 1 {
					t.Errorf("the fault was hit %d times", faults[0].Hits)
				}
			})
		}
	}
}

// An orchestrator takes each new text of an error for a new event. So a repeated call has the same text: the rack's ID
// of the request, which differs, is in the log only.
func TestRepeatedErrorHasTheSameText(t *testing.T) {
	for _, kind := range []string{simtest.FaultReset, simtest.FaultStatus} {
		t.Run("fault "+kind, func(t *testing.T) {
			r := newRig(t)
			times := 0
			_, err := r.Sim.Inject(t.Context(), simtest.Fault{
				Operation: "disk_create", Kind: kind, Status: 503, Message: "Service Unavailable", Count: &times,
			})
			r.Must(t, err)
			_, first := r.CreateVolume(t.Context(), coretest.CreateRequest("v"))
			_, second := r.CreateVolume(t.Context(), coretest.CreateRequest("v"))
			coretest.WantCode(t, first, codes.Unavailable)
			if first.Error() != second.Error() {
				t.Errorf("the first call says %q, the second %q", first, second)
			}
		})
	}

	log := &simtest.Output{}
	r := newRig(t, func(o *coretest.Options) { o.Log = log })
	r.Token.Store("oxide-token-wrong")
	_, first := r.CreateVolume(t.Context(), coretest.CreateRequest("v"))
	coretest.WantCode(t, first, codes.Unavailable, "credentials missing or invalid")
	_, second := r.CreateVolume(t.Context(), coretest.CreateRequest("v"))
	if first.Error() != second.Error() {
		t.Errorf("the first call says %q, the second %q", first, second)
	}
	ids := regexp.MustCompile(`rack_request_id=(\S+)`).FindAllStringSubmatch(log.String(), -1)
	if len(ids) != 2 || ids[0][1] == ids[1][1] {
		t.Errorf("the log has the request IDs %v, want two different ones", ids)
	}
}
