// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// rpc is an RPC method of a client that protoc generated.
type rpc[Request, Response proto.Message] = func(context.Context, Request, ...grpc.CallOption) (Response, error)

// unknown are the codes after which the outcome is unknown. After any other error of CreateVolume,
// external-provisioner v6.4.0 takes the error as final and drops the volume.
var unknown = []codes.Code{codes.Canceled, codes.DeadlineExceeded, codes.Unavailable, codes.Aborted}

// accessCodes are the codes of a token that the rack does not accept.
var accessCodes = []codes.Code{codes.Unauthenticated, codes.PermissionDenied}

// The steps that make an object.
const (
	creating     = "create"
	snapshotting = "snapshot"
)

func isUnknown(err error) bool { return err != nil && slices.Contains(unknown, status.Code(err)) }

// object is a volume or a snapshot: what a client requested, and the answers that it got.
type object struct {
	name string
	// id is empty until the create succeeded.
	id        string
	sizeBytes int64
	fate      fate
	// content is the data on it.
	content content
	// begun is when the first request was sent that the plugin may still be working on. Zero means none.
	begun time.Time
	// sidecars sent the requests since begun.
	sidecars []string
	// orphansDone is when the rack has executed all requests of a killed plugin, or of before a hand-over.
	orphansDone time.Time
	// killedDuring means that a plugin was killed while it worked on this object.
	killedDuring bool
	// history lists requests and answers, for the report of a violation.
	history []string
	// repeats is how often the last entry came in a row.
	repeats int
	// reported means that an unexpected code was reported. Only the first one is.
	reported bool
}

// fate is what the client knows about an object.
type fate string

const (
	// wanted: requested, and not known to exist.
	wanted fate = "wanted"
	// lives: known to exist.
	lives fate = "lives"
	// failed: the creation failed with a final code, and no client requests it again.
	failed fate = "failed"
	// gone: known to be deleted.
	gone fate = "gone"
)

// maxHistory is the maximum length of a history.
const maxHistory = 30

// remember adds an entry to the history. Equal entries in a row become one entry with a count.
func (t *object) remember(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if n := len(t.history); n > 0 && strings.HasSuffix(t.history[n-1], " "+text) {
		t.repeats++
		t.history[n-1] = fmt.Sprintf("%s (%d times) %s", stamp(time.Now()), t.repeats, text)
		return
	}
	t.repeats = 1
	if len(t.history) == maxHistory {
		t.history = slices.Delete(t.history, 0, 1)
	}
	t.history = append(t.history, stamp(time.Now())+" "+text)
}

// historyText is the history as text.
func (t *object) historyText() string {
	return fmt.Sprintf("%q (%s), which %s:\n    %s", t.name, t.id, t.fate, strings.Join(t.history, "\n    "))
}

const (
	firstBackoff = 20 * time.Millisecond
	maxBackoff   = 500 * time.Millisecond
)

// ask repeats a request until the outcome is known: OK or a code that is not in unknown. It returns that code's error,
// or the context's error if ctx ends first. After each unknown outcome giveUp, which may be nil, decides whether to
// stop. While the rack may still execute a request of a killed plugin, an answer is not final, because that request
// may revert the result.
func ask[Request, Response proto.Message](
	ctx context.Context,
	w *worker,
	t *object,
	call rpc[Request, Response],
	req Request,
	giveUp func() bool,
) (Response, error) {
	for backoff := firstBackoff; ; backoff = min(2*backoff, maxBackoff) {
		sent := time.Now()
		resp, err := try(ctx, w, t, call, req)
		if orphansDone := w.orphansDoneAt(t); !isUnknown(err) && sent.Before(orphansDone) {
			if err := pause(ctx, time.Until(orphansDone)); err != nil {
				return resp, err
			}
			continue
		}
		if !isUnknown(err) {
			return resp, err
		}
		if ctx.Err() != nil {
			return resp, ctx.Err()
		}
		if giveUp != nil && giveUp() {
			return resp, err
		}
		if err := pause(ctx, backoff/2+time.Duration(w.random.Int64N(int64(backoff)))); err != nil {
			return resp, err
		}
	}
}

// outcomeKnown records that the outcome of a request is known. All earlier work of the plugin on this object has ended,
// unless the plugin was killed: then the rack may still execute a request.
func (w *worker) outcomeKnown(t *object, begun time.Time) {
	w.orphansDoneAt(t)
	if w.lastBreak(t.sidecars).Before(begun) {
		t.begun, t.sidecars = time.Time{}, nil
	}
}

// orphansDoneAt returns when the rack has executed all requests for this object that a killed plugin made, or a plugin
// that has lost the lease since.
func (w *worker) orphansDoneAt(t *object) time.Time {
	if t.begun.IsZero() {
		return t.orphansDone
	}
	if !w.lastKill().Before(t.begun) {
		t.killedDuring = true
	}
	if at := w.lastBreak(t.sidecars); !at.Before(t.begun) {
		t.orphansDone = later(t.orphansDone, at.Add(lateness))
	}
	return t.orphansDone
}

// noteRequest notes that a sidecar begins a request about the object, and returns the time.
func (t *object) noteRequest(sidecar string) (begun time.Time) {
	begun = time.Now()
	if t.begun.IsZero() {
		t.begun = begun
	}
	if !slices.Contains(t.sidecars, sidecar) {
		t.sidecars = append(t.sidecars, sidecar)
	}
	return begun
}

// answer is the answer to one of two equal requests.
type answer[Response any] struct {
	resp Response
	err  error
}

// try sends a request once, or sometimes twice at the same time, to one controller or to both, as two sidecars do if
// one does not know yet that it lost the lease. Of two answers it returns the better: OK before an unknown outcome, and
// that before an error.
func try[Request, Response proto.Message](
	ctx context.Context,
	w *worker,
	t *object,
	call rpc[Request, Response],
	req Request,
) (Response, error) {
	name := strings.TrimSuffix(string(req.ProtoReflect().Descriptor().Name()), "Request")
	copies := 1
	if w.random.IntN(20) == 0 {
		copies = 2
	}
	begun := t.noteRequest(sidecarOf(name))
	answers := make(chan answer[Response], copies)
	wrong := false
	for number := range copies {
		deadline := w.randomDeadline() // here, because w.random belongs to this goroutine
		ctx := ctx
		if number > 0 && w.random.IntN(2) == 0 {
			ctx, wrong = context.WithValue(ctx, wrongReplica{}, true), true
		}
		go func() {
			ctx, cancel := context.WithTimeout(ctx, deadline)
			defer cancel()
			resp, err := call(ctx, req)
			w.results.answered(name, status.Code(err))
			answers <- answer[Response]{resp, err}
		}()
	}
	best := <-answers
	clear := !isUnknown(best.err)
	t.remember("%s %s", name, outcome(best.err))
	for range copies - 1 {
		other := <-answers
		t.remember("%s, sent twice, %s", name, outcome(other.err))
		if creates(req) && best.err == nil && other.err == nil && !proto.Equal(best.resp, other.resp) {
			w.results.violation(
				"%s: two answers to one request differ: %v and %v, for %s",
				name,
				best.resp,
				other.resp,
				t.historyText(),
			)
		}
		if rank(other.err) < rank(best.err) {
			best = other
		}
		clear = clear && !isUnknown(other.err)
	}
	switch {
	case clear:
		w.outcomeKnown(t, begun)
	case wrong: // the next request may go to the other controller, which does not wait for this one
		t.orphansDone = later(t.orphansDone, time.Now().Add(lateness))
	}
	return best.resp, best.err
}

// creates reports whether a request creates an object. Such requests must always get the same answer.
func creates(req proto.Message) bool {
	switch req.(type) {
	case *csi.CreateVolumeRequest, *csi.CreateSnapshotRequest:
		return true
	}
	return false
}

func rank(err error) int {
	switch {
	case err == nil:
		return 0
	case isUnknown(err):
		return 1
	}
	return 2
}

func outcome(err error) string {
	if err == nil {
		return "OK"
	}
	text := status.Convert(err).Message()
	return fmt.Sprintf("%s: %s", status.Code(err), text[:min(len(text), 240)])
}

// randomDeadline returns the deadline of a request. It is sometimes too short on purpose.
func (w *worker) randomDeadline() time.Duration {
	if w.random.IntN(5) == 0 {
		return 5*time.Millisecond + time.Duration(w.random.IntN(400))*time.Millisecond
	}
	return 10 * time.Second
}
