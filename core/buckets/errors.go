// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package buckets

import (
	"errors"
	"fmt"
	"strings"

	"github.com/aws/smithy-go"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// Error codes of S3 and of the gateway's admin API that the driver tells apart.
const (
	codeNoSuchBucket   = "NoSuchBucket"
	codeNoTags         = "NoSuchTagSet"
	codeNoPolicy       = "NoSuchBucketPolicy"
	codeNoObjectLock   = "ObjectLockConfigurationNotFoundError"
	codeAlreadyOwned   = "BucketAlreadyOwnedByYou"
	codeAlreadyExists  = "BucketAlreadyExists"
	codeNotEmpty       = "BucketNotEmpty"
	codeFolderNotEmpty = "ErrDirectoryNotEmpty"
	codeLocked         = "AccessDenied"
	codeUserExists     = "XAdminUserExists"
)

// hasCode reports whether a store answered one of the codes.
func hasCode(err error, codes ...string) bool {
	var answered smithy.APIError
	if !errors.As(err, &answered) {
		return false
	}
	for _, code := range codes {
		if answered.ErrorCode() == code {
			return true
		}
	}
	return false
}

// answerError is an error that a store answered, with the HTTP status.
type answerError struct {
	smithy.GenericAPIError
	status int
}

// HTTPStatusCode is the method by which the SDK's errors tell the status, too.
func (e *answerError) HTTPStatusCode() int { return e.status }

// failed gives the error of a call to a store its gRPC code. The message has the next step, and the store's own words
// last, without the request and its headers.
func (s *Store) failed(action string, err error) error {
	var answered smithy.APIError
	if !errors.As(err, &answered) {
		return rpc.Unavailable("%s: store %q does not respond: check its gateway: %w", action, s.name, transportError(err))
	}
	words := answered.ErrorCode()
	if message := answered.ErrorMessage(); message != "" {
		words = fmt.Sprintf("%s (%s)", words, message)
	}
	switch status := statusOf(err); {
	case status == 401 || status == 403:
		return rpc.FailedPrecondition("%s: store %q denies it: check the root keys of the driver: %s", action, s.name, words)
	case status == 404 && strings.HasPrefix(answered.ErrorCode(), "NoSuch"):
		return rpc.Aborted("%s: it was deleted in store %q meanwhile: retry: %s", action, s.name, words)
	case status == 404:
		// Not NOT_FOUND: COSI's sidecar v0.2.2 would take it for a deleted bucket.
		return rpc.FailedPrecondition("%s: store %q is no versitygw: check its endpoint: %s", action, s.name, words)
	case status == 429 || status == 503:
		return rpc.Unavailable("%s: store %q is overloaded: look at the load of its gateway: %s", action, s.name, words)
	case status == 507:
		return rpc.ResourceExhausted("%s: the volume of store %q is full: expand its claim: %s", action, s.name, words)
	case status >= 500:
		// The outcome is unknown, so the CO must repeat the call.
		return rpc.Unavailable("%s: store %q failed: see the log of its gateway: %s", action, s.name, words)
	}
	return rpc.Internal("%s: store %q refused it: see the log of its gateway: %s", action, s.name, words)
}

// statusOf returns the HTTP status of an answer, or 0.
func statusOf(err error) int {
	var answered interface{ HTTPStatusCode() int }
	if !errors.As(err, &answered) {
		return 0
	}
	return answered.HTTPStatusCode()
}

// outcomeUnknown reports whether a call may have had its effect, or may have it when it is repeated.
func outcomeUnknown(err error) bool {
	var answered smithy.APIError
	status := statusOf(err)
	return !errors.As(err, &answered) || status == 429 || status >= 500 && status != 501
}

// transportError returns the innermost error: the outer ones repeat the URL and the IDs of the request.
func transportError(err error) error {
	for {
		inner := errors.Unwrap(err)
		if inner == nil {
			return err
		}
		err = inner
	}
}
