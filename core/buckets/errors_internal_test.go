// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package buckets

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/aws/smithy-go"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// TestFailed checks the code of each answer of a store, and that the message has one next step and the store's words
// last.
func TestFailed(t *testing.T) {
	answer := func(status int, code string) error {
		return fmt.Errorf("operation error S3: %w",
			&answerError{smithy.GenericAPIError{Code: code, Message: "its words"}, status})
	}
	for _, test := range []struct {
		name string
		err  error
		code codes.Code
		step string
		last string
	}{
		{"no answer", fmt.Errorf("send: %w", errors.New("connection refused")), codes.Unavailable, "check its gateway", "connection refused"},
		{"wrong keys", answer(403, "AccessDenied"), codes.FailedPrecondition, "check the root keys of the driver", ""},
		{"bucket gone", answer(404, "NoSuchBucket"), codes.Aborted, "retry", ""},
		// Not NOT_FOUND: COSI's sidecar takes that for a deleted bucket.
		{"no gateway", answer(404, "HTTP404"), codes.FailedPrecondition, "check its endpoint", ""},
		{"too many requests", answer(429, "SlowDown"), codes.Unavailable, "look at the load of its gateway", ""},
		{"overloaded", answer(503, "SlowDown"), codes.Unavailable, "look at the load of its gateway", ""},
		{"full", answer(507, "InsufficientStorage"), codes.ResourceExhausted, "expand its claim", ""},
		{"failed", answer(500, "InternalError"), codes.Unavailable, "see the log of its gateway", ""},
		{"refused", answer(400, "MalformedXML"), codes.Internal, "see the log of its gateway", ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			err := (&Store{name: "main"}).failed("delete bucket "+strings.Repeat("b", 63), test.err)
			var got *rpc.Error
			if !errors.As(err, &got) || got.Code() != test.code {
				t.Errorf("%v, want %s", err, test.code)
			}
			last := test.last
			if last == "" {
				last = "(its words)"
			}
			text := err.Error()
			if !strings.Contains(text, ": "+test.step+": ") || !strings.Contains(text, `"main"`) ||
				!strings.HasSuffix(text, last) || len(text) > 250 {
				t.Errorf("want the step %q, and %q last: %s", test.step, last, text)
			}
		})
	}
}
