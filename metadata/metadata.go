// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package metadata says how the plugin learns who it is: which Oxide instance
// it runs in, and on which rack. Oxide has no instance metadata service
// (docs/reference/rack.md §9), so the answer comes from whatever knows it: the operator,
// Kubernetes, Nomad, the guest's firmware. Each of these is a [Provider].
//
// The package is the contract and nothing else: it knows no orchestrator and no
// CSI. To add a source, implement [Provider] and run the suite of
// metadata/metadatatest on it.
package metadata

import (
	"context"
	"errors"
	"fmt"
	"strings"
)

// Instance is what a node has to know about itself before it can serve.
type Instance struct {
	// ID is the instance's UUID in lower case with hyphens, as the rack's API
	// prints it. It is the CSI node ID. In an answer it is never empty.
	ID string
	// Rack is the name of the rack the instance runs on: the value of the
	// plugin's topology segment, see [CheckRack]. Empty means that this
	// provider does not know it; whoever asks decides what holds then.
	Rack string
}

// Provider finds out which instance this process runs in.
//
// # Answers
//
// An answer is whole: ID MUST come from [ParseInstanceID], Rack MUST be empty
// or pass [CheckRack], and both MUST be from one state of the source, never the
// ID of one and the rack of another. A source that says something about the
// rack which is no rack name MUST be an error, since an answer without it would
// put the node on the default rack. Asked again, a provider MUST give the same
// answer unless its source says something else.
//
// # Errors
//
// Every error MUST be an [*Error] (found with errors.As) whose Next tells the
// operator what to do, and errors.Is MUST find exactly one of these:
//
//   - [ErrNotReady]: the source is down, slow or not filled in yet. What MUST
//     say what is waited for.
//   - [ErrInvalid]: the source says something unusable, or refuses us. Time
//     alone does not repair it.
//
// The message MUST be one line and MUST NOT hold a token, a password or any
// content of the source other than the identity itself.
//
// Callers ask again after either, because the world can be repaired while the
// process runs. So a provider MUST NOT remember an error: the next call asks
// the source anew. It MAY remember an answer.
//
// # Calls
//
// Instance blocks on its source for as long as ctx allows. Once ctx has ended,
// before or during the call, it MUST return soon with an [ErrNotReady] for
// which errors.Is also finds ctx.Err(). It MUST be safe for concurrent use.
//
// A constructor of a provider MUST NOT do I/O: it has to work on a machine where
// the source is down.
type Provider interface {
	Instance(ctx context.Context) (Instance, error)
}

// PartialProvider is what a [Provider] can do besides whose source may say on which
// rack this is without saying which instance: a label of a Node, a line of a
// file. Whoever has the ID from elsewhere asks it for the rest.
type PartialProvider interface {
	// PartialInstance is Instance for a source that mentions less than the whole: an ID or
	// rack that it does not mention is empty, and is no error. Everything else of
	// [Provider]'s contract holds. Where the source will say more later by itself,
	// what it lacks now is an [ErrNotReady].
	PartialInstance(ctx context.Context) (Instance, error)
}

var (
	// ErrNotReady is the kind of an error that may pass by itself: waiting is
	// the right answer to it.
	ErrNotReady = errors.New("instance identity is not known yet")
	// ErrInvalid is the kind of an error that lasts until somebody changes
	// something: what the source says is wrong, or we may not read it.
	ErrInvalid = errors.New("instance identity cannot be used")
	// ErrConflict is what errors.Is finds besides ErrInvalid when two sources
	// name different instances. Then no source is to be believed, and none asked
	// in its place.
	ErrConflict = errors.New("sources contradict each other")
)

// Error is the only error that a [Provider] returns. It is read by the person
// who finds a node that does not come up, mostly through one line of a log.
type Error struct {
	// Kind is [ErrNotReady] or [ErrInvalid].
	Kind error
	// What happened, and to which object: a file, a Node, an address.
	What string
	// Cause is what a lower layer said, or nil. It MUST NOT hold secrets.
	Cause error
	// Next is what the operator does about it. Never empty.
	Next string
}

// Error is "what: cause; next" on one line.
func (e *Error) Error() string {
	s := e.What
	if e.Cause != nil {
		s += ": " + e.Cause.Error()
	}
	return s + "; " + e.Next
}

// Unwrap lets errors.Is find the kind and the cause.
func (e *Error) Unwrap() []error {
	if e.Cause == nil {
		return []error{e.Kind}
	}
	return []error{e.Kind, e.Cause}
}

// Notations in which an instance ID is accepted, beside the hyphenated one.
const (
	urnPrefix = "urn:uuid:"
	nilUUID   = "00000000-0000-0000-0000-000000000000"
	maxUUID   = "ffffffff-ffff-ffff-ffff-ffffffffffff"
)

// ParseInstanceID returns the UUID in s in lower case with hyphens. It takes any
// notation: hyphenated, 32 hexadecimal digits, either of them after "urn:uuid:"
// or in braces, in upper or lower case, with space around it.
//
// It refuses what can only be a mistake: nothing, a template that an
// orchestrator left unfilled ("${meta.oxide.instance_id}" of a Nomad job file
// whose client lacks that key, "$(NODE_ID)" of a pod), and the two UUIDs with
// which firmware says that none was set, all zeros and all ones (SMBIOS
// specification, System UUID). The error is one line for an operator; it repeats
// s, shortened, unless s looks like an Oxide API token.
func ParseInstanceID(s string) (string, error) {
	s = strings.TrimSpace(s)
	if s == "" {
		return "", errors.New("the instance ID is empty")
	}
	if isTemplate(s) {
		return "", fmt.Errorf("the instance ID is %s, a template that the orchestrator did not fill in", quote(s))
	}
	id, ok := canonicalUUID(s)
	if !ok {
		return "", fmt.Errorf("the instance ID %s is not a UUID", quote(s))
	}
	if id == nilUUID || id == maxUUID {
		return "", fmt.Errorf("the instance ID %s stands for no instance", quote(s))
	}
	return id, nil
}

// canonicalUUID reports whether s is a UUID in a notation that ParseInstanceID
// takes, and returns it with hyphens in lower case.
func canonicalUUID(s string) (string, bool) {
	s = strings.ToLower(s)
	if inner, ok := strings.CutPrefix(s, urnPrefix); ok {
		s = inner
	} else if inner, ok := strings.CutPrefix(s, "{"); ok {
		if s, ok = strings.CutSuffix(inner, "}"); !ok {
			return "", false
		}
	}
	if len(s) == 32 {
		s = s[:8] + "-" + s[8:12] + "-" + s[12:16] + "-" + s[16:20] + "-" + s[20:]
	}
	if len(s) != 36 {
		return "", false
	}
	for i, c := range []byte(s) {
		switch {
		case i == 8 || i == 13 || i == 18 || i == 23:
			if c != '-' {
				return "", false
			}
		case !('0' <= c && c <= '9' || 'a' <= c && c <= 'f'):
			return "", false
		}
	}
	return s, true
}

// maxRackLen is the CSI specification's limit for a topology segment, in bytes.
const maxRackLen = 63

// CheckRack says what is wrong with a rack's name, or nil. The name is the value
// of a topology segment, so the CSI specification's rule for those holds
// (message Topology): 1 to 63 bytes, letters, digits, '-', '_' and '.', a
// letter or digit at both ends.
func CheckRack(name string) error {
	switch {
	case name == "":
		return errors.New("the rack name is empty")
	case isTemplate(name):
		return fmt.Errorf("the rack name is %s, a template that the orchestrator did not fill in", quote(name))
	case len(name) > maxRackLen:
		return fmt.Errorf("the rack name has %d bytes, and a topology segment holds at most %d", len(name), maxRackLen)
	case !alphanumeric(name[0]) || !alphanumeric(name[len(name)-1]):
		return fmt.Errorf("the rack name %s must begin and end with a letter or digit", quote(name))
	}
	for i := range len(name) {
		if c := name[i]; !alphanumeric(c) && c != '-' && c != '_' && c != '.' {
			return fmt.Errorf("the rack name %s may hold only letters, digits, '-', '_' and '.'", quote(name))
		}
	}
	return nil
}

func alphanumeric(c byte) bool {
	return '0' <= c && c <= '9' || 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z'
}

// isTemplate reports whether s is what Nomad ("${…}") or Kubernetes ("$(…)")
// passes on when it knows no value for a reference.
func isTemplate(s string) bool {
	return strings.Contains(s, "${") || strings.Contains(s, "$(")
}

// quote shows a refused value. A value that might be an API token, pasted into
// the wrong place, is not shown.
func quote(s string) string {
	const most = 80
	if strings.Contains(strings.ToLower(s), "oxide-token") {
		return "(redacted)"
	}
	if len(s) > most {
		return fmt.Sprintf("%q and %d more bytes", s[:most], len(s)-most)
	}
	return fmt.Sprintf("%q", s)
}
