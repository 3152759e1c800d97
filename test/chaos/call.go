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

// rpc is an RPC as the clients that protoc makes offer it.
type rpc[Request, Response proto.Message] = func(context.Context, Request, ...grpc.CallOption) (Response, error)

// unknown are the codes that tell nothing about what was done. external-provisioner v6.3.0 takes every other one of
// CreateVolume as final: it forgets the volume.
var unknown = []codes.Code{codes.Canceled, codes.DeadlineExceeded, codes.Unavailable, codes.Aborted}

func isUnknown(err error) bool { return err != nil && slices.Contains(unknown, status.Code(err)) }

// thing is a volume or a snapshot: what a client asked for, and was told.
type thing struct {
	name string
	// id is empty until a client was told of it.
	id        string
	sizeBytes int64
	fate      fate
	// content is what is on it.
	content content
	// begun is when the first request was sent of which it is not known whether the plugin is still at it; zero is none.
	begun time.Time
	// quiet is when the rack has done whatever a plugin that was killed had begun.
	quiet time.Time
	// killedIn says that a plugin was killed while it was at something for this thing.
	killedIn bool
	// history is what was asked and answered, for a violation.
	history []string
	// same counts how often the last of them came in a row.
	same int
	// accused says that an odd answer has been reported: one is enough.
	accused bool
}

// fate is what the client was told of a thing, as far as that goes.
type fate string

const (
	// wanted: asked for and not known to exist.
	wanted fate = "wanted"
	// lives: told to exist.
	lives fate = "lives"
	// failed: told with a final code that it could not be made, after which nobody asks any more.
	failed fate = "failed"
	// gone: told to be deleted.
	gone fate = "gone"
)

// keptHistory is how many answers back a history goes.
const keptHistory = 30

// remember adds to the history, where what comes several times in a row stands once.
func (t *thing) remember(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if n := len(t.history); n > 0 && strings.HasSuffix(t.history[n-1], " "+text) {
		t.same++
		t.history[n-1] = fmt.Sprintf("%s (%d times until now) %s", stamp(time.Now()), t.same, text)
		return
	}
	t.same = 1
	if len(t.history) == keptHistory {
		t.history = slices.Delete(t.history, 0, 1)
	}
	t.history = append(t.history, stamp(time.Now())+" "+text)
}

// story is the history as a violation shows it.
func (t *thing) story() string {
	return fmt.Sprintf("%q (%s), which %s:\n    %s", t.name, t.id, t.fate, strings.Join(t.history, "\n    "))
}

const (
	firstBackoff = 20 * time.Millisecond
	maxBackoff   = 500 * time.Millisecond
)

// ask sends a request until the answer is clear: OK or a code that says something. Its error is that code's, or the
// context's when it ends first. giveUp, which may be nil, is asked after each unclear answer whether to go on. An answer to what
// was asked while the rack may still be doing what a killed plugin had begun is no last word: the rack may undo it.
func ask[Request, Response proto.Message](
	ctx context.Context,
	w *worker,
	t *thing,
	call rpc[Request, Response],
	req Request,
	giveUp func() bool,
) (Response, error) {
	for backoff := firstBackoff; ; backoff = min(2*backoff, maxBackoff) {
		sent := time.Now()
		resp, err := try(ctx, w, t, call, req)
		if quiet := w.orphaned(t); !isUnknown(err) && sent.Before(quiet) {
			if err := pause(ctx, time.Until(quiet)); err != nil {
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

// clear takes note of a clear answer to a request. Whatever a plugin was at for this thing before has come to its end, unless
// the plugin was killed: then the rack may do it still.
func (w *worker) clear(t *thing, begun time.Time) {
	w.orphaned(t)
	if w.lastKill().Before(begun) {
		t.begun = time.Time{}
	}
}

// orphaned returns when the rack has done whatever was begun for this thing by a plugin that was killed since.
func (w *worker) orphaned(t *thing) time.Time {
	if kill := w.lastKill(); !t.begun.IsZero() && !kill.Before(t.begun) {
		t.killedIn = true
		t.quiet = later(t.quiet, kill.Add(lateness))
	}
	return t.quiet
}

// answer is what one of two equal requests got.
type answer[Response any] struct {
	resp Response
	err  error
}

// try sends a request once, or twice at the same time, as two replicas do of which one does not know yet that it leads no
// more. Of two answers an OK counts more than an unclear one, and this more than a refusal: either client would have it
// that way.
func try[Request, Response proto.Message](
	ctx context.Context,
	w *worker,
	t *thing,
	call rpc[Request, Response],
	req Request,
) (Response, error) {
	name := strings.TrimSuffix(string(req.ProtoReflect().Descriptor().Name()), "Request")
	copies := 1
	if w.random.IntN(20) == 0 {
		copies = 2
	}
	begun := time.Now()
	if t.begun.IsZero() {
		t.begun = begun
	}
	answers := make(chan answer[Response], copies)
	for range copies {
		patience := w.patience() // the random numbers are this goroutine's
		go func() {
			ctx, cancel := context.WithTimeout(ctx, patience)
			defer cancel()
			resp, err := call(ctx, req)
			w.books.answered(name, status.Code(err))
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
			w.books.violation("%s: two answers to one request differ: %v and %v, for %s", name, best.resp, other.resp, t.story())
		}
		if rank(other.err) < rank(best.err) {
			best = other
		}
		clear = clear && !isUnknown(other.err)
	}
	if clear {
		w.clear(t, begun)
	}
	return best.resp, best.err
}

// creates says which requests make something and must be answered alike.
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

// patience is the deadline of a request: sometimes too short.
func (w *worker) patience() time.Duration {
	if w.random.IntN(5) == 0 {
		return 5*time.Millisecond + time.Duration(w.random.IntN(400))*time.Millisecond
	}
	return 10 * time.Second
}
