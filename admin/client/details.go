// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package client

import (
	"context"
	"encoding/json"
	"fmt"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// ask makes a controller add a value to the header of an answer: the caller makes its call with the returned context
// and option, and then calls decode. The value is not answered by a controller that does not have it.
func ask[T any](
	ctx context.Context,
	question, answer string,
) (asking context.Context, option grpc.CallOption, decode func() (value T, answered bool, err error)) {
	var header metadata.MD
	asking = metadata.AppendToOutgoingContext(ctx, question, "yes")
	return asking, grpc.Header(&header), func() (value T, answered bool, err error) {
		values := header.Get(answer)
		if len(values) == 0 {
			return value, false, nil
		}
		if err = json.Unmarshal([]byte(values[0]), &value); err != nil {
			err = fmt.Errorf("the controller's %s is malformed; use oxide-csi in the controller's version: %w", answer, err)
		}
		return value, true, err
	}
}

// askUnfinished makes a controller also list what the rack is still making.
func askUnfinished(ctx context.Context) context.Context {
	return metadata.AppendToOutgoingContext(ctx, rpc.MetadataAskUnfinished, "yes")
}

// askDetails is [ask] for the details of the volumes or snapshots in an answer, by ID.
func askDetails(
	ctx context.Context,
) (asking context.Context, option grpc.CallOption, decode func() (map[string]rpc.Details, error)) {
	asking, option, answer := ask[map[string]rpc.Details](ctx, rpc.MetadataAskDetails, rpc.MetadataDetails)
	return asking, option, func() (map[string]rpc.Details, error) { return required(answer()) }
}

// askNodeNames is [ask] for the names of all instances by ID.
func askNodeNames(
	ctx context.Context,
) (asking context.Context, option grpc.CallOption, decode func() (map[string]string, error)) {
	asking, option, answer := ask[map[string]string](ctx, rpc.MetadataAskNodeNames, rpc.MetadataNodeNames)
	return asking, option, func() (map[string]string, error) { return required(answer()) }
}

// required returns an error if a controller of an older version has not answered: a deletion by name would otherwise
// succeed and delete nothing.
func required[T any](value T, answered bool, err error) (T, error) {
	if err == nil && !answered {
		err = failed(codes.Unimplemented, "the controller does not tell names: use oxide-csi in the controller's version")
	}
	return value, err
}
