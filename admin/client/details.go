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

// answers are the values that a controller adds to the header of an answer on request, because CSI has no field for
// them.
type answers struct {
	// details are those of the volumes or snapshots in the answer, by ID.
	details map[string]rpc.Details
	// nodeNames are the names of all instances, by ID.
	nodeNames map[string]string
	// restarts are the planned restarts. They are nil if the controller does not plan restarts.
	restarts []rpc.Restart
}

// question is a value that a controller can be asked for: its key in the call and in the answer, and its place.
type question struct {
	ask, answer string
	into        func(*answers) any
}

var (
	wantDetails  = question{rpc.MetadataAskDetails, rpc.MetadataDetails, func(a *answers) any { return &a.details }}
	wantNames    = question{rpc.MetadataAskNodeNames, rpc.MetadataNodeNames, func(a *answers) any { return &a.nodeNames }}
	wantRestarts = question{rpc.MetadataAskRestarts, rpc.MetadataRestarts, func(a *answers) any { return &a.restarts }}
)

// ask asks a controller for values: the caller makes its call with the returned context and option, and then calls
// decode, after each page of a list. A controller of an older version does not answer, which is an error: a deletion
// by name would otherwise succeed and delete nothing.
func ask(
	ctx context.Context, questions ...question,
) (asking context.Context, option grpc.CallOption, decode func() (answers, error)) {
	var header metadata.MD
	var all answers
	answered := map[string]bool{}
	for _, q := range questions {
		ctx = metadata.AppendToOutgoingContext(ctx, q.ask, "yes")
	}
	return ctx, grpc.Header(&header), func() (answers, error) {
		for _, q := range questions {
			values := header.Get(q.answer)
			switch {
			case len(values) > 0:
				answered[q.answer] = true
				if err := json.Unmarshal([]byte(values[0]), q.into(&all)); err != nil {
					return all, fmt.Errorf(
						"the controller's %s is malformed: %w: use oxide-csi in the controller's version", q.answer, err)
				}
			case answered[q.answer]: // a list has the names of nodes with its first page only
			case q.ask != rpc.MetadataAskRestarts: // which a controller that plans none does not answer
				return all, failed(codes.Unimplemented,
					"the controller does not tell names: use oxide-csi in the controller's version")
			}
		}
		return all, nil
	}
}

// askUnfinished makes a controller also list what the rack is still making.
func askUnfinished(ctx context.Context) context.Context {
	return metadata.AppendToOutgoingContext(ctx, rpc.MetadataAskUnfinished, "yes")
}
