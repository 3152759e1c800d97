// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package core

import (
	"context"
	"errors"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/core/hostexec"
	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/restart"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/core/volumelock"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// codeTable is the one mapping from the errors of the layers below to gRPC codes. The reason says what an orchestrator
// does with the code, where that decided it.
var codeTable = []struct {
	err    error
	code   codes.Code
	reason string
}{
	{
		rack.ErrUnauthenticated,
		codes.Unauthenticated,
		"the token is missing, wrong or expired; retrying helps once it was replaced",
	},
	{rack.ErrForbidden, codes.PermissionDenied, "the token's role does not allow it"},
	{
		rack.ErrProject,
		codes.FailedPrecondition,
		"the configured project is wrong or not ours to see: an operator must act",
	},
	{
		rack.ErrNotFound,
		codes.NotFound,
		"only after the project was seen to be there: without a role everything answers 404",
	},
	{rack.ErrSize, codes.OutOfRange, "the rack's own limits on sizes; final for a provisioner, nothing was created"},
	{rack.ErrCapacity, codes.ResourceExhausted, "quota or space; a provisioner looks for another topology segment"},
	{
		rack.ErrUnavailable,
		codes.Unavailable,
		"outcome unknown or not now: the provisioner goes on asking instead of forgetting the volume",
	},
	{rack.ErrConflict, codes.Unavailable, "a race on the rack that a repetition settles"},
	{rack.ErrInternal, codes.Internal, "the rack failed; CreateVolume turns it into UNAVAILABLE, since a disk may exist"},
	{rack.ErrBusy, codes.Aborted, "the wait inside the RPC was too short; every orchestrator asks again"},
	{rack.ErrRefused, codes.Internal, "a refusal that no look at disk and instance explains"},

	{
		restart.ErrPlanned,
		codes.FailedPrecondition,
		"a restart is planned; Nomad asks again for a day for this code only, Kubernetes' attacher for every one",
	},

	// First of these, since errors further down wrap it.
	{hostexec.ErrMissing, codes.FailedPrecondition, "a program is not installed; the message names its package"},
	{
		device.ErrNotFound,
		codes.Unavailable,
		"attached and not in the guest yet: the orchestrator asks again, and the disk is not gone",
	},
	{device.ErrAmbiguous, codes.FailedPrecondition, "which device it is cannot be known; nothing is touched"},
	{device.ErrMismatch, codes.FailedPrecondition, "the device is not the disk that was asked for; nothing is touched"},
	{device.ErrInUse, codes.FailedPrecondition, "somebody else uses the device"},
	{device.ErrNotBlank, codes.FailedPrecondition, "nothing is formatted that may hold data; an operator must look at it"},
	{device.ErrUnreadable, codes.FailedPrecondition, "what cannot be read may hold data"},
	{filesystem.ErrOption, codes.InvalidArgument, "an mkfs option that is not allowed"},
	{mount.ErrOption, codes.InvalidArgument, "a mount option that is not allowed"},
	{filesystem.ErrUnsupported, codes.InvalidArgument, "a filesystem that this plugin does not make"},
	{mount.ErrFormat, codes.Internal, "mkfs failed on a blank device; the next try formats again"},
	{mount.ErrDamaged, codes.FailedPrecondition, "the filesystem needs an operator's decision; nothing is mounted"},
	{mount.ErrGrow, codes.Internal, "the disk is as it was; the next try grows again"},
	{mount.ErrMount, codes.Internal, "the kernel refused to mount"},
	{mount.ErrState, codes.FailedPrecondition, "the state folder cannot be used: an operator must act"},
	{mount.ErrBusy, codes.FailedPrecondition, "a process holds it; the message names the process"},
	{mount.ErrForeign, codes.FailedPrecondition, "the path holds something that this plugin did not put there"},
	{volumelock.ErrState, codes.FailedPrecondition, "the state folder cannot be used: an operator must act"},
	{
		volumelock.ErrHeld,
		codes.Aborted,
		"what it does to the disk is not known before it has ended; the orchestrator asks again",
	},

	{metadata.ErrNotReady, codes.Unavailable, "the source of identity does not answer yet; the orchestrator asks again"},
	{metadata.ErrConflict, codes.FailedPrecondition, "sources of identity contradict each other: an operator must act"},
	{metadata.ErrInvalid, codes.FailedPrecondition, "the identity is wrong: an operator must act"},
}

// statusOf is the gRPC status of whatever an RPC returned. The caller's own deadline or cancellation comes first where
// the error did not state a code: the SDK hides it behind text.
func statusOf(ctx context.Context, err error) *status.Status {
	if err == nil {
		return nil
	}
	var own *rpc.Error
	if errors.As(err, &own) {
		return status.New(own.Code(), err.Error())
	}
	if s, ok := status.FromError(err); ok {
		return s
	}
	switch ctxErr := ctx.Err(); {
	case errors.Is(ctxErr, context.DeadlineExceeded):
		return status.New(codes.DeadlineExceeded, err.Error())
	case ctxErr != nil:
		return status.New(codes.Canceled, err.Error())
	}
	for _, row := range codeTable {
		if errors.Is(err, row.err) {
			return status.New(row.code, err.Error())
		}
	}
	return status.New(codes.Internal, err.Error())
}
