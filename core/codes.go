// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package core

import (
	"context"
	"errors"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// statusOf returns the gRPC status for the error of an RPC, with printable text. This is the only place that adds the
// word of [fault.Table]. The RPC's own code comes first. If it has none, and the caller's context has ended, the code
// is that of the context: the SDK does not wrap the context's error. Otherwise the code is that of the table.
func statusOf(ctx context.Context, err error) *status.Status {
	if err == nil {
		return nil
	}
	text := rpc.Printable(fault.Message(err))
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
	if row := fault.Of(err); row != nil {
		return status.New(row.Code, text)
	}
	return status.New(codes.Internal, text)
}
