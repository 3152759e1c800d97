// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package coretest

import (
	"context"
	"os"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
)

// maxErrorLength is how many characters of ours an RPC's error may have before its word. Users read it in an event.
const maxErrorLength = 250

// foreignWords matches what does not count: what package rack says of a request, with the rack's answer or the reason
// why there was none; the output of a program that failed; the temporary folders of the test; and a path or name of a
// request that is long by itself.
var foreignWords = func() *regexp.Regexp {
	var kinds []string
	for _, kind := range []error{
		rack.ErrNotFound, rack.ErrProject, rack.ErrAlreadyExists, rack.ErrUnauthenticated, rack.ErrForbidden, rack.ErrSize,
		rack.ErrCapacity, rack.ErrRefused, rack.ErrConflict, rack.ErrUnavailable, rack.ErrInternal,
	} {
		kinds = append(kinds, regexp.QuoteMeta(kind.Error()))
	}
	kind := `(` + strings.Join(kinds, "|") + `)`
	return regexp.MustCompile(
		`rack "[^"]*": [^;]*?` + kind + `: (.*? \(HTTP [0-9]{3}\)|error sending request: [^;]*)|` +
			`exit code [0-9]+: .*|` + regexp.QuoteMeta(os.TempDir()) + `/\S*/|\S{100,}`)
}()

// checkErrorLengths fails the test if the error of an RPC is too long for an event.
func checkErrorLengths(t *testing.T) grpc.UnaryClientInterceptor {
	return func(
		ctx context.Context,
		method string,
		req, reply any,
		cc *grpc.ClientConn,
		invoke grpc.UnaryInvoker,
		opts ...grpc.CallOption,
	) error {
		err := invoke(ctx, method, req, reply, cc, opts...)
		message, _ := fault.Cut(status.Convert(err).Message())
		ours := utf8.RuneCountInString(foreignWords.ReplaceAllLiteralString(message, ""))
		if ours > maxErrorLength {
			t.Errorf("the error of %s has %d characters of ours, more than %d: %s", method, ours, maxErrorLength, message)
		}
		return err
	}
}
