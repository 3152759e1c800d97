// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package metadata defines how the plugin learns in which Oxide instance it runs, and on which rack. Oxide has no
// instance metadata service (docs/reference/rack.md §9). So the answer comes from another source: the operator,
// Kubernetes, Nomad or the guest's firmware. Each source is a [Provider].
//
// A provider can also be a [PartialProvider] and a [Follower].
//
// The package imports no CSI and talks to no orchestrator. What the plugin asks of an orchestrator besides, package
// orchestrator defines. To add a source, implement [Provider] and run the suite of metadata/metadatatest on it.
package metadata

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/google/uuid"
)

// Instance is what a node must know about itself before it can serve.
type Instance struct {
	// ID is the instance's UUID in lower case with hyphens, as the rack's API prints it. It is the CSI node ID. A
	// [Provider] never returns an empty ID.
	ID string
	// Rack is the name of the rack that the instance runs on. It is the value of the plugin's topology segment, see
	// [CheckRack]. Empty means that this provider does not know the rack; the caller then decides which one to use.
	Rack string
}

// Provider finds out which instance this process runs in.
//
// # Answers
//
// ID MUST come from [ParseInstanceID]. Rack MUST be empty or pass [CheckRack]. Both MUST come from the same state of
// the source. If the source holds an invalid rack name, Instance MUST return an error: an answer without a rack would
// put the node on the default rack. Repeated calls MUST return the same answer while the source does not change.
//
// # Errors
//
// Every error MUST be an [*Error] (found with errors.As) whose Next tells the operator what to do, and errors.Is MUST
// find exactly one of these:
//
//   - [ErrNotReady]: the source is down, slow or not filled in yet. What MUST say what the provider waits for.
//   - [ErrInvalid]: the content of the source is invalid, or the source denies access. Waiting does not help.
//
// The message MUST be one line. It MUST NOT contain a token, a password or any content of the source except the
// identity itself.
//
// Callers retry after either kind, because the source can be repaired while the process runs. So a provider MUST NOT
// cache an error: the next call asks the source again. It MAY cache an answer.
//
// # Calls
//
// Instance may block on its source until ctx ends. Once ctx has ended, before or during the call, it MUST return soon
// with an [ErrNotReady] for which errors.Is also finds ctx.Err(). It MUST be safe for concurrent use.
//
// A constructor of a provider MUST NOT do I/O: it must work on a machine where the source is down.
type Provider interface {
	Instance(ctx context.Context) (Instance, error)
}

// PartialProvider is an optional second interface of a [Provider]. Its source can name the rack without naming the
// instance, as a label of a Node or a line of a file does. A caller that has the ID from another source asks it for the
// rack.
type PartialProvider interface {
	// PartialInstance is like Instance, but an ID or a rack that the source does not mention is empty and no error.
	// Otherwise the contract of [Provider] holds. If the source is going to be filled in later, the missing value is an
	// [ErrNotReady].
	PartialInstance(ctx context.Context) (Instance, error)
}

var (
	// ErrNotReady is the kind of an error that may go away by itself. The caller should wait.
	ErrNotReady = errors.New("instance identity is not known yet")
	// ErrInvalid is the kind of an error that an operator must repair: the content of the source is wrong, or the plugin
	// may not read it.
	ErrInvalid = errors.New("instance identity cannot be used")
	// ErrConflict is found by errors.Is besides ErrInvalid when two sources name different instances. Then no answer can
	// be trusted, and no other source is asked.
	ErrConflict = errors.New("sources contradict each other")
)

// Error is the only type of error that a [Provider] returns. Operators read it in the log of a node that does not
// start.
type Error struct {
	// Kind is [ErrNotReady] or [ErrInvalid].
	Kind error
	// What says what failed, and on which object: a file, a Node, an address.
	What string
	// Cause is the error of a lower layer, or nil. It MUST NOT contain secrets.
	Cause error
	// Next is the operator's next step. It is never empty.
	Next string
}

// NotReady returns an error that may go away by itself. cause may be nil.
func NotReady(what string, cause error, next string) *Error {
	return &Error{ErrNotReady, what, cause, next}
}

// Invalid returns an error that an operator must repair. cause may be nil.
func Invalid(what string, cause error, next string) *Error {
	return &Error{ErrInvalid, what, cause, next}
}

// Error is "what: cause; next" on one line.
func (e *Error) Error() string { return e.Fact() + "; " + e.Next }

// Fact is the error without the next step.
func (e *Error) Fact() string {
	if e.Cause == nil {
		return e.What
	}
	return e.What + ": " + e.Cause.Error()
}

// Unwrap lets errors.Is find the kind and the cause.
func (e *Error) Unwrap() []error {
	if e.Cause == nil {
		return []error{e.Kind}
	}
	return []error{e.Kind, e.Cause}
}

// ParseInstanceID returns the UUID in s in lower case with hyphens. It accepts the four notations that a rack accepts
// (docs/reference/rack.md §1), in upper or lower case, with space around it: with hyphens, also after "urn:uuid:" or in
// braces, and 32 hexadecimal digits.
//
// It rejects an empty text, and a template that an orchestrator did not fill in: "${meta.oxide.instance_id}" of a Nomad
// job file whose client lacks that key, or "$(NODE_ID)" of a pod. It also rejects the two UUIDs by which firmware says
// that no UUID was set, all zeros and all ones (SMBIOS specification, System UUID). The error is one line for an
// operator. It contains s, shortened, unless s looks like an Oxide API token.
func ParseInstanceID(s string) (string, error) {
	s = strings.TrimSpace(s)
	if s == "" {
		return "", errors.New("the instance ID is empty")
	}
	if isTemplate(s) {
		return "", fmt.Errorf("the instance ID is %s, a template that the orchestrator did not fill in", quote(s))
	}
	id, err := uuid.Parse(s)
	if err != nil || uuid.Validate(s) != nil { // which also looks at the braces
		return "", fmt.Errorf("the instance ID %s is not a UUID", quote(s))
	}
	if id == uuid.Nil || id == uuid.Max {
		return "", fmt.Errorf("the instance ID %s means that none was set", quote(s))
	}
	return id.String(), nil
}

// rackNames is the rule of the CSI specification for a topology segment (message Topology).
var rackNames = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$`)

// CheckRack returns an error if a rack's name is invalid. The name is the value of a topology segment.
func CheckRack(name string) error {
	switch {
	case name == "":
		return errors.New("the rack name is empty")
	case isTemplate(name):
		return fmt.Errorf("the rack name is %s, a template that the orchestrator did not fill in", quote(name))
	case !rackNames.MatchString(name):
		return fmt.Errorf(
			"the rack name %s is not 1 to 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends",
			quote(name),
		)
	}
	return nil
}

// isTemplate reports whether s contains a reference that Nomad ("${…}") or Kubernetes ("$(…)") did not fill in.
func isTemplate(s string) bool {
	return strings.Contains(s, "${") || strings.Contains(s, "$(")
}

// quote quotes a rejected value for an error. It hides a value that might be an API token in the wrong place.
func quote(s string) string {
	const limit = 80
	if strings.Contains(strings.ToLower(s), "oxide-token") {
		return "(redacted)"
	}
	if len(s) > limit {
		return fmt.Sprintf("%q and %d more bytes", s[:limit], len(s)-limit)
	}
	return fmt.Sprintf("%q", s)
}
