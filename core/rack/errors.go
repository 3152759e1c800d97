// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/oxidecomputer/oxide.go/oxide"
)

// Errors of this package. Each call wraps one of them with what was being done and what the rack said.
var (
	// ErrNotFound says that the rack knows no such disk or instance, or that the token may not see it: a rack answers
	// 404 to both (docs/reference/rack.md §1). It is believed only after [Client.ConfirmProject].
	ErrNotFound = errors.New("not found")
	// ErrProject says that the configured project is not there, or hidden from this token.
	ErrProject = errors.New("the project cannot be used")
	// ErrAlreadyExists says that the name is taken in the project.
	ErrAlreadyExists = errors.New("name is taken")
	// ErrUnauthenticated says that the token is missing, wrong or expired.
	ErrUnauthenticated = errors.New("not authenticated")
	// ErrForbidden says that the token's role does not allow the call.
	ErrForbidden = errors.New("forbidden")
	// ErrSize says that the rack does not make disks of this size.
	ErrSize = errors.New("size is not supported")
	// ErrCapacity says that quota or space does not suffice. A rack checks the quota before the name (docs/reference/rack.md §2),
	// so a disk of that name may exist all the same.
	ErrCapacity = errors.New("insufficient capacity")
	// ErrRefused says that the state of disk or instance does not allow the call; nothing was changed.
	ErrRefused = errors.New("refused")
	// ErrNotStopped is an [ErrRefused] because the instance is not stopped (docs/reference/rack.md §4).
	ErrNotStopped = fmt.Errorf("%w: the instance is not stopped", ErrRefused)
	// ErrFull is an [ErrRefused] because the instance has as many disks as it takes.
	ErrFull = fmt.Errorf("%w: the instance takes no more disks", ErrRefused)
	// ErrConflict says that somebody else was faster, or that the boot disk is concerned; nothing was changed.
	ErrConflict = errors.New("conflict")
	// ErrUnavailable says that the rack did not answer, or not now. What was asked may have been done, may be done later,
	// or not at all.
	ErrUnavailable = errors.New("the rack is unavailable")
	// ErrInternal says that the rack failed. What was asked may have been done.
	ErrInternal = errors.New("the rack failed")
	// ErrBusy says that a disk did not come to rest in time.
	ErrBusy = errors.New("the disk is still changing state")
)

// OutcomeUnknown reports whether what was asked may have been done, or be done still, although the call failed.
func OutcomeUnknown(err error) bool {
	return errors.Is(err, ErrUnavailable) || errors.Is(err, ErrInternal)
}

// translate gives the error of an SDK call in the words of this package, prefixed with what was being done. The text of
// an SDK error spans lines and holds response headers; only the rack's message and its request ID are passed on, and no
// token that they repeat.
func translate(ctx context.Context, err error, doing string, args ...any) error {
	if err == nil {
		return nil
	}
	doing = fmt.Sprintf(doing, args...)
	var httpErr *oxide.HTTPError
	if !errors.As(err, &httpErr) {
		// The SDK formats transport errors with %v, which hides the caller's own deadline.
		if ctxErr := ctx.Err(); ctxErr != nil {
			return fmt.Errorf("%s: %w: %w", doing, ErrUnavailable, ctxErr)
		}
		return fmt.Errorf("%s: %w: %s", doing, ErrUnavailable, passOn(err.Error()))
	}
	kind, status, message := classify(httpErr), httpErr.HTTPResponse.StatusCode, ""
	requestID := httpErr.HTTPResponse.Header.Get("x-request-id")
	if resp := httpErr.ErrorResponse; resp != nil {
		message = resp.Message
		if resp.RequestId != "" {
			requestID = resp.RequestId
		}
	}
	if message == "" {
		message = "no reason given"
	}
	return fmt.Errorf("%s: %w: %s (HTTP %d, request ID %s)", doing, kind, passOn(message), status, passOn(requestID))
}

// classify decides by status and error code, see docs/reference/rack.md §1.
func classify(err *oxide.HTTPError) error {
	code, message := "", ""
	if err.ErrorResponse != nil {
		code, message = err.ErrorResponse.ErrorCode, err.ErrorResponse.Message
	}
	switch err.HTTPResponse.StatusCode {
	case 400:
		switch {
		case code == "ObjectAlreadyExists":
			return ErrAlreadyExists
		case code == "InvalidValue":
			return invalidValue(message)
		default:
			return refusal(message)
		}
	case 401:
		return ErrUnauthenticated
	case 403:
		return ErrForbidden
	case 404:
		if strings.HasPrefix(message, "not found: project ") {
			return ErrProject
		}
		if code == "ObjectNotFound" {
			return ErrNotFound
		}
		// A 404 without that code comes from something that is not an Oxide API, or from a route it does not have.
		return ErrUnavailable
	case 409:
		return ErrConflict
	case 500:
		return ErrInternal
	case 507:
		return ErrCapacity
	}
	return ErrUnavailable
}

// refusal is the last resort of reading a message: for a rack that refuses an attach or a detach, states alone do not
// tell "not stopped" from "full" where racks can hot-plug. docs/reference/rack.md §4 has the texts.
func refusal(message string) error {
	switch {
	case strings.HasSuffix(message, "instance is not fully stopped"):
		return ErrNotStopped
	case strings.HasPrefix(message, "cannot attach more than "):
		return ErrFull
	}
	return ErrRefused
}

// invalidValue tells sizes from other values: of what this plugin sends, only sizes are the caller's to mend.
func invalidValue(message string) error {
	if strings.HasPrefix(message, `unsupported value for "size`) {
		return ErrSize
	}
	return ErrRefused
}

// tokens matches API tokens, also those that are no longer in use.
var tokens = regexp.MustCompile("(?i)oxide-token-[^\\s\"'`]+")

// passOn makes foreign text one line without an API token in it. A rack repeats none; a proxy before it, or a program that
// is no rack, may show what it was sent.
func passOn(text string) string {
	return tokens.ReplaceAllLiteralString(strings.Join(strings.Fields(text), " "), "(redacted)")
}
