// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package core

import (
	"context"
	"errors"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/expand"
	"github.com/oxidecomputer/oxide-csi-plugin/core/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/core/hostexec"
	"github.com/oxidecomputer/oxide-csi-plugin/core/luks"
	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/restart"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/core/statefile"
	"github.com/oxidecomputer/oxide-csi-plugin/core/volumelock"
	"github.com/oxidecomputer/oxide-csi-plugin/core/volumerecord"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// codeTable is the only mapping from the errors of the packages below to gRPC codes. The reason says why the error has
// this code, and what an orchestrator does with the code where that decided the choice.
var codeTable = []struct {
	err    error
	code   codes.Code
	reason string
}{
	{
		rack.ErrUnauthenticated,
		codes.Unauthenticated,
		"the token is missing, wrong or expired: replace it; creates answer UNAVAILABLE instead, which is not final",
	},
	{
		rack.ErrForbidden,
		codes.PermissionDenied,
		"the role of the token does not allow the call; creates answer UNAVAILABLE instead",
	},
	{
		rack.ErrProject,
		codes.FailedPrecondition,
		"the configured project is wrong, or hidden from this token; creates answer UNAVAILABLE instead",
	},
	{
		rack.ErrNotFound,
		codes.NotFound,
		"only after the token was seen to have access to the project: without a role every look-up answers 404",
	},
	{
		rack.ErrSize,
		codes.OutOfRange,
		"the rack does not make disks of this size; final for a provisioner, and nothing was created",
	},
	{
		rack.ErrCapacity,
		codes.ResourceExhausted,
		"quota or physical capacity is used up; a provisioner tries another topology segment",
	},
	{
		rack.ErrUnavailable,
		codes.Unavailable,
		"outcome unknown, or not possible now; a provisioner retries and does not drop the volume",
	},
	{rack.ErrFormat, codes.FailedPrecondition, "after a rollback: an operator must upgrade; nothing was changed"},
	{
		rack.ErrUnknown,
		codes.FailedPrecondition,
		"the rack is newer than this plugin: an operator must upgrade it; creates answer UNAVAILABLE instead",
	},
	{rack.ErrConflict, codes.Unavailable, "another change on the rack came first; a retry succeeds"},
	{
		rack.ErrInternal,
		codes.Internal,
		"the rack failed; CreateVolume answers UNAVAILABLE instead, because a disk may exist",
	},
	{
		rack.ErrBusy,
		codes.Aborted,
		"the disk is still changing state at the end of the RPC's wait; every orchestrator retries",
	},
	{
		rack.ErrRefused,
		codes.Internal,
		"the rack rejected the call, and the states of disk and instance do not explain why",
	},

	{
		expand.ErrOnlySnapshot,
		codes.FailedPrecondition,
		"the rack has no room for a disk of the volume, so an operator must act; the message names the snapshot",
	},
	{
		expand.ErrNameTaken,
		codes.FailedPrecondition,
		"another disk has the name of the volume's disk: an operator must act",
	},
	{
		expand.ErrAttached,
		codes.FailedPrecondition,
		"an attached disk is not replaced; Kubernetes' external-resizer tries again until no pod uses the volume",
	},
	{
		expand.ErrTakenBack,
		codes.FailedPrecondition,
		"the volume was published while it was expanded; as for an attached disk",
	},
	{expand.ErrUnderWay, codes.Aborted, "another process is replacing the disk; every orchestrator retries"},
	{
		rack.ErrReplaced,
		codes.Aborted,
		"the volume has no disk until its expansion is finished; every orchestrator retries",
	},
	{expand.ErrDeleted, codes.NotFound, "the volume was deleted while it was expanded"},
	{
		expand.ErrNoRoom,
		codes.OutOfRange,
		"the volume keeps its size; RESOURCE_EXHAUSTED would tell a resizer that the expansion goes on",
	},

	{
		restart.ErrPlanned,
		codes.FailedPrecondition,
		"a restart is planned; Nomad retries only this code, for a day; Kubernetes' external-attacher retries every code",
	},

	// This row comes before those below, because their errors can wrap this one.
	{hostexec.ErrMissing, codes.FailedPrecondition, "a program is not installed; the message names its package"},
	{
		device.ErrNotFound,
		codes.Unavailable,
		"the disk is attached and not yet visible in the guest; the orchestrator retries, and does not take the volume for deleted",
	},
	{
		device.ErrAmbiguous,
		codes.FailedPrecondition,
		"several devices match, so the right one is unknown; no device is changed",
	},
	{device.ErrMismatch, codes.FailedPrecondition, "the device is not the requested disk; no device is changed"},
	{device.ErrInUse, codes.FailedPrecondition, "another process or mount uses the device"},
	{
		device.ErrNotBlank,
		codes.FailedPrecondition,
		"the device may hold data and is not formatted; an operator must decide",
	},
	{device.ErrNoAnswer, codes.Unavailable, "nothing was changed; the disk may answer again; every orchestrator retries"},
	{device.ErrUnreadable, codes.FailedPrecondition, "a device that cannot be read may hold data"},
	{filesystem.ErrOption, codes.InvalidArgument, "the mkfs option or mount flag is not allowed"},
	{filesystem.ErrUnsupported, codes.InvalidArgument, "the plugin does not support this filesystem"},
	{mount.ErrFormat, codes.Internal, "mkfs failed on a blank device; a retry formats again"},
	{mount.ErrDamaged, codes.FailedPrecondition, "the filesystem is damaged and not mounted; an operator must decide"},
	{
		mount.ErrChecking,
		codes.Aborted,
		"the check goes on without the call; the orchestrator repeats it, and the repetition waits for the check",
	},
	{mount.ErrMount, codes.Internal, "the kernel rejected the mount"},
	{statefile.ErrFolder, codes.FailedPrecondition, "the state folder is not usable: an operator must act"},
	{mount.ErrBusy, codes.FailedPrecondition, "a process uses the mount; the message names the process"},
	{mount.ErrForeign, codes.FailedPrecondition, "another program put something at the path"},
	{luks.ErrPassphrase, codes.FailedPrecondition, "no key slot has the passphrase; nothing was changed"},
	{luks.ErrHeader, codes.FailedPrecondition, "the header is damaged: an operator must restore its backup"},
	{luks.ErrNoDeviceMapper, codes.FailedPrecondition, "the node's kernel lacks a module: an operator must act"},
	{luks.ErrBusy, codes.FailedPrecondition, "a process, or a device built on it, uses the mapping of an encrypted disk"},
	{luks.ErrMemory, codes.FailedPrecondition, "the key needs more memory than the plugin may use: an operator must act"},
	{luks.ErrCryptsetup, codes.Internal, "cryptsetup failed; a retry repeats the step"},
	{volumerecord.ErrUnreadable, codes.FailedPrecondition, "the volume may be on any disk: an operator must decide"},
	{
		volumelock.ErrHeld,
		codes.Aborted,
		"a program of an earlier call still works on the disk; the orchestrator retries",
	},
	{volumelock.ErrNodeHeld, codes.Aborted, "one key at a time is derived on a node; the orchestrator retries"},

	{
		metadata.ErrNotReady,
		codes.Unavailable,
		"the source of the node's identity does not answer yet; the orchestrator retries",
	},
	{
		metadata.ErrConflict,
		codes.FailedPrecondition,
		"two sources of the node's identity contradict each other: an operator must act",
	},
	{metadata.ErrInvalid, codes.FailedPrecondition, "the node's identity is wrong: an operator must act"},
}

// statusOf returns the gRPC status for the error of an RPC, with printable text. If the error has no code of its own
// and the caller's context has ended, the code is that of the context: the SDK does not wrap the context's error.
func statusOf(ctx context.Context, err error) *status.Status {
	if err == nil {
		return nil
	}
	text := rpc.Printable(err.Error())
	var coded *rpc.Error
	if errors.As(err, &coded) {
		return status.New(coded.Code(), text)
	}
	if s, ok := status.FromError(err); ok {
		return s
	}
	switch ctxErr := ctx.Err(); {
	case errors.Is(ctxErr, context.DeadlineExceeded):
		return status.New(codes.DeadlineExceeded, text)
	case ctxErr != nil:
		return status.New(codes.Canceled, text)
	}
	for _, row := range codeTable {
		if errors.Is(err, row.err) {
			return withReason(row.err, status.New(row.code, text))
		}
	}
	return status.New(codes.Internal, text)
}

// withReason adds what the commands of oxide-csi must know of an error, and its code does not tell.
func withReason(err error, s *status.Status) *status.Status {
	if err != rack.ErrProject {
		return s
	}
	detailed, failed := s.WithDetails(&errdetails.ErrorInfo{Reason: rpc.ReasonProject, Domain: rpc.PluginName})
	if failed != nil {
		return s // only a status without an error takes no details
	}
	return detailed
}
