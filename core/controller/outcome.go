// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller

import (
	"context"
	"errors"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// The functions below keep a caller retrying. A CO treats most codes as final: after a final error of CreateVolume,
// Kubernetes' external-provisioner drops the volume. If the rack made a disk and only its answer was lost, no later
// call would find that disk. UNAVAILABLE is not final.

// retryable gives err the code UNAVAILABLE. It is for an error after which a disk or snapshot may exist or appear
// later. If the caller's context has ended, err stays as it is: the interceptor answers DEADLINE_EXCEEDED or CANCELED.
func retryable(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return err
	}
	return rpc.Unavailable("%w", err)
}

// retryableIfUnknown is [retryable] for an error that leaves the outcome of a rack's call unknown. Other errors, and
// nil, stay as they are.
func retryableIfUnknown(ctx context.Context, err error) error {
	if rack.OutcomeUnknown(err) {
		return retryable(ctx, err)
	}
	return err
}

// retryableCreate is [retryableIfUnknown] for the error of a create. It also covers refused access, and a disk or
// snapshot that this version does not understand: an earlier call may have made it and lost the answer.
func retryableCreate(ctx context.Context, err error) error {
	for _, passing := range []error{
		rack.ErrUnauthenticated, rack.ErrForbidden, rack.ErrProject, record.ErrFormat, rack.ErrUnknown,
	} {
		if errors.Is(err, passing) {
			return retryable(ctx, err)
		}
	}
	return retryableIfUnknown(ctx, err)
}
