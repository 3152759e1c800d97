// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"path"
	"regexp"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
	"github.com/oxidecomputer/oxide-csi-plugin/core/redact"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// Errors of this package. Each failed call wraps one of them, and says what was attempted and what the rack answered.
var (
	// ErrNotFound means that the disk or instance does not exist, or that the token may not see it: a rack answers 404
	// in both cases (docs/reference/rack.md §1). Trust it only after [Client.ConfirmProject].
	ErrNotFound = fault.NotFound.New("not found")
	// ErrProject means that the configured project does not exist, or that the token may not see it.
	ErrProject = fault.ProjectUnusable.New("the project cannot be used")
	// ErrAlreadyExists means that the name is taken in the project.
	ErrAlreadyExists = errors.New("name is taken")
	// ErrUnauthenticated means that the token is missing, wrong or expired.
	ErrUnauthenticated = fault.TokenRejected.New("not authenticated")
	// ErrForbidden means that the token's role does not allow the call.
	ErrForbidden = fault.RoleTooLow.New("forbidden")
	// ErrSize means that the rack does not support disks of this size.
	ErrSize = fault.SizeUnsupported.New("size is not supported")
	// ErrCapacity means that the quota or the free space is too small. A rack checks the quota before the name
	// (docs/reference/rack.md §2), so a disk with this name may exist nevertheless.
	ErrCapacity = fault.QuotaExhausted.New("insufficient capacity")
	// ErrRefused means that the state of the disk or instance does not allow the call. Nothing was changed.
	ErrRefused = fault.RackRefused.New("refused")
	// ErrNotStopped is an [ErrRefused]: the instance is not stopped (docs/reference/rack.md §4).
	ErrNotStopped = fmt.Errorf("%w: the instance is not stopped", ErrRefused)
	// ErrFull is an [ErrRefused]: the instance already has the largest number of disks that the rack allows.
	ErrFull = fmt.Errorf("%w: the instance takes no more disks", ErrRefused)
	// ErrConflict means that another client was faster, or that the disk is a boot disk. Nothing was changed.
	ErrConflict = fault.ChangedMeanwhile.New("conflict")
	// ErrUnavailable means that the rack did not answer, or cannot serve the request now. The change may have been
	// made, may still be made, or may never be made.
	ErrUnavailable = fault.RackUnavailable.New("the rack is unavailable")
	// ErrProxy comes with [ErrUnavailable]. It means that what answered is no rack, for instance a proxy before the rack.
	ErrProxy = fault.ProxyAnswered.New("a proxy or another server responded, not the rack")
	// ErrUnknown means that the rack shows a disk or snapshot in a state, or of a type, that this version of the plugin
	// does not know. Nothing was changed: what may be done with it is unknown, too.
	ErrUnknown = fault.StateUnknown.New("this version of the plugin does not know that, upgrade it")
	// ErrInternal means that the rack failed. The change may have been made.
	ErrInternal = fault.RackFailed.New("the rack failed")
	// ErrBusy means that a disk or a snapshot did not reach a stable state in time, or that the rack refused a request
	// because of such a state. Nothing was changed.
	ErrBusy = fault.DiskBusy.New("the disk is still changing state")
)

// errUnconfirmedNotFound is an [ErrNotFound] in other words than a rack of a known release uses. It may be about the
// project.
var errUnconfirmedNotFound = fmt.Errorf("%w", ErrNotFound)

// OutcomeUnknown reports whether a change may have been made, or may still be made, although the call failed.
func OutcomeUnknown(err error) bool {
	return errors.Is(err, ErrUnavailable) || errors.Is(err, ErrInternal)
}

// requestIDHeader is in every answer of a rack (docs/reference/rack.md §1).
const requestIDHeader = "x-request-id"

// translate turns an error of the SDK into one of this package, prefixed with what was attempted. The text of an SDK
// error spans several lines and contains response headers. So only the rack's message is passed on, and its request ID
// for the log, without any API token in them.
func translate(ctx context.Context, err error, doing string, args ...any) error {
	if err == nil {
		return nil
	}
	doing = fmt.Sprintf(doing, args...)
	var httpErr *oxide.HTTPError
	if !errors.As(err, &httpErr) {
		// The SDK formats transport errors with %v, which hides the end of the caller's context, and an [ErrProxy].
		if ctxErr := ctx.Err(); ctxErr != nil {
			return fmt.Errorf("%s: %w: %w", doing, ErrUnavailable, ctxErr)
		}
		unanswered := fmt.Errorf("%s: %w: %s", doing, ErrUnavailable, sanitize(withoutVarying(err.Error())))
		if strings.Contains(err.Error(), ErrProxy.Error()) {
			return fault.ProxyAnswered.Errorf("%w", unanswered)
		}
		return unanswered
	}
	kind, status, message := classify(httpErr), httpErr.HTTPResponse.StatusCode, ""
	requestID := httpErr.HTTPResponse.Header.Get(requestIDHeader)
	if resp := httpErr.ErrorResponse; resp != nil {
		message = resp.Message
		if resp.RequestId != "" {
			requestID = resp.RequestId
		}
	}
	switch {
	case requestID == "":
		kind = fmt.Errorf("%w: %w", ErrUnavailable, ErrProxy)
		message = cmp.Or(message, http.StatusText(status))
	case message == "":
		message = "no reason given"
	}
	message = strings.TrimPrefix(sanitize(message), kind.Error()+": ") // a rack begins with the same words
	err = fmt.Errorf("%s: %w: %s (HTTP %d)", doing, kind, message, status)
	return rpc.WithRackRequestID(err, sanitize(requestID))
}

// classify decides by HTTP status and error code (docs/reference/rack.md §1).
func classify(err *oxide.HTTPError) error {
	code, message := "", ""
	if err.ErrorResponse != nil {
		code, message = err.ErrorResponse.ErrorCode, err.ErrorResponse.Message
	}
	if message == "" && slices.Contains([]int{400, 409, 507}, err.HTTPResponse.StatusCode) {
		// Part of the answer is missing, or a server in front of the rack gave it: this refusal proves nothing.
		return ErrUnavailable
	}
	switch err.HTTPResponse.StatusCode {
	case 400:
		switch {
		case code == "ObjectAlreadyExists":
			return ErrAlreadyExists
		case code == "InvalidValue":
			return invalidValue(message)
		case strings.HasPrefix(message, "cannot attach more than "):
			return ErrFull
		}
		return ErrRefused
	case 404:
		if strings.HasPrefix(message, "not found: project ") {
			return ErrProject
		}
		named := strings.HasPrefix(message, "not found: ")
		switch {
		case code != "ObjectNotFound":
			// It comes from a server that is not an Oxide API, or from a route that this release lacks.
			return ErrUnavailable
		case asksForNoObject(err.HTTPResponse.Request, named):
			return ErrUnavailable
		case named:
			return ErrNotFound
		}
		return errUnconfirmedNotFound
	case 500:
		return ErrInternal
	}
	return cmp.Or(byStatus[err.HTTPResponse.StatusCode], ErrUnavailable)
}

// byStatus has the errors of refusals that the HTTP status alone decides.
var byStatus = map[int]error{401: ErrUnauthenticated, 403: ErrForbidden, 409: ErrConflict, 507: ErrCapacity}

// asksForNoObject reports whether a 404 cannot be about an object that was asked for: a list asks for none. A create
// can ask for its source, and then a rack names that. named says that the answer names an object.
func asksForNoObject(req *http.Request, named bool) bool {
	wholeCollection, _ := path.Match("/v1/*", req.URL.Path) // the pattern is well-formed
	return wholeCollection && (req.Method == http.MethodGet || !named)
}

// invalidValue tells an unsupported size from other invalid values. Of the values that this plugin sends, the caller
// chooses only the size.
func invalidValue(message string) error {
	if strings.HasPrefix(message, `unsupported value for "size`) {
		return ErrSize
	}
	return ErrRefused
}

var (
	// perConnection matches what Go's errors say of one connection: the port on this side, the last HTTP/2 stream.
	perConnection = regexp.MustCompile(`\S+:\d+->|LastStreamID=\d+, |stream ID \d+; `)
	// clockTime matches the time in the error about a certificate that is not valid now.
	clockTime = regexp.MustCompile(`current time \S+ is`)
)

// withoutVarying removes what differs each time from the text of a transport's error. Kubernetes makes a new Event of
// each new text.
func withoutVarying(text string) string {
	return clockTime.ReplaceAllLiteralString(perConnection.ReplaceAllLiteralString(text, ""), "the current time is")
}

// tokenPattern matches API tokens, also revoked ones.
var tokenPattern = regexp.MustCompile("(?i)oxide-token-[^\\s\"'`]+")

// sanitize puts text from outside on one line and removes API tokens, and users and passwords of URLs. A rack repeats
// no token, but a proxy in front of it, or a server that is not a rack, may echo the request.
func sanitize(text string) string {
	return redact.UserInfo(tokenPattern.ReplaceAllLiteralString(strings.Join(strings.Fields(text), " "), redact.Redacted))
}
