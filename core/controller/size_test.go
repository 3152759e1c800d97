// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller

import (
	"errors"
	"math"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

func TestChooseSize(t *testing.T) {
	for _, test := range []struct {
		name            string
		required, limit int64
		source          int64
		want            int64
		code            codes.Code
	}{
		{name: "nothing requested", want: 10 * gib},
		{name: "one byte", required: 1, want: gib},
		{name: "a whole GiB", required: gib, limit: gib, want: gib},
		{name: "a byte more than a GiB", required: gib + 1, want: 2 * gib},
		{name: "rounded past the limit", required: gib + 1, limit: 2*gib - 1, code: codes.OutOfRange},
		{name: "rounded to the limit", required: gib + 1, limit: 2 * gib, want: 2 * gib},
		{name: "limit only, large", limit: 50 * gib, want: 10 * gib},
		{name: "limit only, small", limit: 3*gib + 5, want: 3 * gib},
		{name: "limit below the smallest disk", limit: gib - 1, code: codes.OutOfRange},
		{name: "largest that can be rounded", required: math.MaxInt64 - gib, want: math.MaxInt64 - gib + 1},
		{name: "too large to round", required: math.MaxInt64 - gib + 1, code: codes.OutOfRange},
		{name: "largest number", required: math.MaxInt64, code: codes.OutOfRange},
		{name: "nothing requested, from a source", source: 3 * gib, want: 3 * gib},
		{name: "less than the source", required: gib, source: 3 * gib, want: 3 * gib},
		{name: "as much as the source", required: 3 * gib, limit: 3 * gib, source: 3 * gib, want: 3 * gib},
		{name: "more than the source", required: 3*gib + 1, source: 3 * gib, want: 4 * gib},
		{name: "more than the source, rounded past the limit", required: 3*gib + 1, limit: 3*gib + 2, source: 3 * gib, code: codes.OutOfRange},
		{name: "limit below the source", required: gib, limit: 2 * gib, source: 3 * gib, code: codes.OutOfRange},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := chooseSize(&csi.CapacityRange{RequiredBytes: test.required, LimitBytes: test.limit}, test.source)
			code := codes.OK
			if failed := new(rpc.Error); errors.As(err, &failed) {
				code = failed.Code()
			}
			if code != test.code {
				t.Fatalf("code %s, want %s (%v)", code, test.code, err)
			}
			if got != test.want {
				t.Errorf("%d bytes, want %d", got, test.want)
			}
		})
	}
}

// An error about a size has GiB, and no limit that was not asked for.
func TestRangeText(t *testing.T) {
	for want, capacity := range map[string]*csi.CapacityRange{
		"20GiB or more":  {RequiredBytes: 20 * gib},
		"19GiB or more":  {RequiredBytes: 18*gib + 1},
		"20GiB or less":  {LimitBytes: 20*gib + 5},
		"20GiB":          {RequiredBytes: 19*gib + 1, LimitBytes: 20 * gib},
		"20GiB to 30GiB": {RequiredBytes: 20 * gib, LimitBytes: 30 * gib},
	} {
		if got := rangeText(capacity); got != want {
			t.Errorf("%v is %q, want %q", capacity, got, want)
		}
	}
}
