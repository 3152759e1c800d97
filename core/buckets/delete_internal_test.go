// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package buckets

import (
	"errors"
	"testing"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// TestNotDeleted checks that only a lock is a refusal. Other errors were seen while a gateway still deleted objects for
// a driver that was killed: the repeated call succeeds.
func TestNotDeleted(t *testing.T) {
	store := &Store{name: "main"}
	if err := store.notDeleted("b", nil); err != nil {
		t.Error(err)
	}
	for code, want := range map[string]codes.Code{
		"AccessDenied": codes.FailedPrecondition, "InvalidArgument": codes.Unavailable, "InternalError": codes.Unavailable,
	} {
		var got *rpc.Error
		err := store.notDeleted("b", []types.Error{{Code: aws.String(code)}})
		if !errors.As(err, &got) || got.Code() != want {
			t.Errorf("%s: %v, want %s", code, err, want)
		}
	}
}
