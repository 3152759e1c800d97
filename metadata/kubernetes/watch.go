// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package kubernetes

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strconv"
	"sync"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

const (
	// A watch ends by itself after shortestWatch to twice as long, as those of kubelets do: not all at once.
	shortestWatch = 5 * time.Minute
	// watchGrace is for how long the API server may keep a watch open after it should have ended.
	watchGrace = 30 * time.Second
	// listTime bounds a list, so that an API server that hangs is named as the reason.
	listTime = 10 * time.Second
	// firstPause and longestPause are the bounds of the pause after a failure. It doubles, and half of it is random.
	firstPause   = time.Second
	longestPause = 30 * time.Second
)

// watch keeps one object in memory as it is now, while anybody follows it: it lists the object, then watches it. When a
// watch ends or breaks, the next one resumes at the last resource version that was seen. When the API server does not
// know that version any more (410 Gone), the object is listed anew.
type watch[T named] struct {
	client *client
	// collection is the path of the list, and resource and kind are those of the object.
	collection, resource, kind string
	// metadataOnly leaves out everything but the object's metadata.
	metadataOnly bool

	mu sync.Mutex
	// followers are signalled after each change. The last one that goes ends the watch.
	followers map[chan struct{}]struct{}
	stop      context.CancelFunc
	// known is closed once the state is known.
	known chan struct{}
	state state[T]
}

type named interface{ name() string }

// state is what is known of an object.
type state[T any] struct {
	object T
	// exists says that the object exists.
	exists bool
	// err is why it is not known.
	err error
}

// follow keeps the object in memory until ctx ends. The channel receives when the state is known, and after each change
// of it.
func (w *watch[T]) follow(ctx context.Context) <-chan struct{} {
	changes := make(chan struct{}, 1)
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.followers) == 0 {
		w.followers, w.known, w.state = map[chan struct{}]struct{}{}, make(chan struct{}), state[T]{}
		var watching context.Context
		watching, w.stop = context.WithCancel(context.WithoutCancel(ctx))
		go w.run(watching)
	} else if closed(w.known) {
		changes <- struct{}{}
	}
	w.followers[changes] = struct{}{}
	context.AfterFunc(ctx, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		if delete(w.followers, changes); len(w.followers) == 0 {
			w.stop()
		}
	})
	return changes
}

// get returns the state of the object, once it is known. It reports false if nobody follows the object.
func (w *watch[T]) get(ctx context.Context) (s state[T], followed bool) {
	w.mu.Lock()
	followed, first := len(w.followers) > 0, w.known
	w.mu.Unlock()
	if !followed {
		return state[T]{}, false
	}
	select {
	case <-first:
	case <-ctx.Done():
	}
	if ctx.Err() != nil {
		return state[T]{err: &metadata.Error{
			Kind: metadata.ErrNotReady, What: "wait for the first list of " + w.what(), Cause: ctx.Err(),
			Next: "check that the API server runs and can be reached from here",
		}}, true
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.state, true
}

func (w *watch[T]) what() string { return fmt.Sprintf("%s %q", w.kind, w.client.options.NodeName) }

// put takes what the API server has answered to a change of ours, so that the change is not made again before the watch
// tells of it.
func (w *watch[T]) put(o T) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.state.object = o
}

// set changes the state and signals the followers. A watch that was ended changes nothing any more.
func (w *watch[T]) set(ctx context.Context, change func(*state[T])) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if ctx.Err() != nil {
		return
	}
	change(&w.state)
	if !closed(w.known) {
		close(w.known)
	}
	for changes := range w.followers {
		metadata.Signal(changes)
	}
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// errGone says that the API server does not know the resource version any more.
var errGone = errors.New("the resource version is too old")

// run lists and watches until ctx ends.
func (w *watch[T]) run(ctx context.Context) {
	version, pause := "", firstPause
	for ctx.Err() == nil {
		began := time.Now()
		err := w.listAndWatch(ctx, &version)
		if errors.Is(err, errGone) {
			version = ""
		} else if err != nil && ctx.Err() == nil {
			w.set(ctx, func(s *state[T]) { s.err = err })
		}
		lasted := time.Since(began)
		if lasted > longestPause {
			pause = firstPause
		}
		if err == nil && lasted >= shortestWatch {
			continue // it has ended in time
		}
		if !sleep(ctx, pause/2+rand.N(pause/2)) {
			return
		}
		pause = min(2*pause, longestPause)
	}
}

// listAndWatch watches the object from a resource version on, and lists it first if that is empty. It keeps the version
// that was seen last. It returns nil when the watch has ended or is broken.
func (w *watch[T]) listAndWatch(ctx context.Context, version *string) error {
	if *version == "" {
		var err error
		if *version, err = w.list(ctx); err != nil {
			return err
		}
	}
	seconds := int((shortestWatch + rand.N(shortestWatch)).Seconds())
	ctx, cancel := context.WithTimeout(ctx, time.Duration(seconds)*time.Second+watchGrace)
	defer cancel()
	r := w.request("watch", metadataOnly)
	r.query.Set("watch", "true")
	r.query.Set("allowWatchBookmarks", "true")
	r.query.Set("resourceVersion", *version)
	r.query.Set("timeoutSeconds", strconv.Itoa(seconds))
	body, err := w.client.stream(ctx, r)
	if err != nil {
		return err
	}
	defer func() { _ = body.Close() }() // nothing is lost with it
	w.recovered(ctx)
	return w.read(ctx, r, body, version)
}

// recovered ends an error once the API server answers again.
func (w *watch[T]) recovered(ctx context.Context) {
	if s, _ := w.get(ctx); s.err != nil {
		w.set(ctx, func(s *state[T]) { s.err = nil })
	}
}

// request lists the object, or watches it.
func (w *watch[T]) request(verb, accept string) request {
	name := w.client.options.NodeName
	r := request{
		method: http.MethodGet, path: w.collection, query: url.Values{"fieldSelector": {"metadata.name=" + name}},
		what: verb + " " + w.what(), verb: verb, resource: w.resource,
	}
	if w.metadataOnly {
		r.accept = accept
	}
	return r
}

// list reads the object, and returns the resource version of the list.
func (w *watch[T]) list(ctx context.Context) (version string, err error) {
	ctx, cancel := context.WithTimeout(ctx, listTime)
	defer cancel()
	var list struct {
		object
		Items []T
	}
	r := w.request("list", metadataList)
	if _, err := w.client.do(ctx, r, &list); err != nil {
		return "", err
	}
	version = list.Metadata.ResourceVersion
	if version == "" {
		return "", w.client.unexpectedAnswer(r)
	}
	w.set(ctx, func(s *state[T]) {
		*s = state[T]{}
		for _, item := range list.Items {
			if item.name() == w.client.options.NodeName {
				s.object, s.exists = item, true
			}
		}
	})
	return version, nil
}

// read takes the events of a watch until it ends.
func (w *watch[T]) read(ctx context.Context, r request, body io.Reader, version *string) error {
	for decoder := json.NewDecoder(body); ; {
		var event struct {
			Type   string
			Object json.RawMessage
		}
		if err := decoder.Decode(&event); err != nil {
			if syntax := (*json.SyntaxError)(nil); errors.As(err, &syntax) {
				return w.client.unexpectedAnswer(r)
			}
			return nil // it has ended, in time or not: the next watch says what is wrong
		}
		if event.Type == "ERROR" {
			return w.errorEvent(r, event.Object)
		}
		var of object
		if err := json.Unmarshal(event.Object, &of); err != nil || of.Metadata.ResourceVersion == "" {
			return w.client.unexpectedAnswer(r)
		}
		if err := w.apply(ctx, event.Type, of.name(), event.Object); err != nil {
			return w.client.unexpectedAnswer(r)
		}
		*version = of.Metadata.ResourceVersion
	}
}

// apply changes the state as an event says. A bookmark changes nothing but the version.
func (w *watch[T]) apply(ctx context.Context, event, name string, text json.RawMessage) error {
	if event == "BOOKMARK" || name != w.client.options.NodeName {
		return nil
	}
	var next state[T]
	if event != "DELETED" {
		next.exists = true
		if err := json.Unmarshal(text, &next.object); err != nil {
			return err
		}
	}
	w.set(ctx, func(s *state[T]) { *s = next })
	return nil
}

// errorEvent is the error with which the API server has errorEvent a watch.
func (w *watch[T]) errorEvent(r request, text json.RawMessage) error {
	var status struct{ Code int }
	if err := json.Unmarshal(text, &status); err != nil {
		return w.client.unexpectedAnswer(r)
	}
	if status.Code == http.StatusGone {
		return errGone
	}
	return &metadata.Error{
		Kind: metadata.ErrNotReady, What: fmt.Sprintf("%s: HTTP %d", r.what, status.Code), Next: "check the API server",
	}
}

// sleep waits, and reports whether ctx has not ended meanwhile.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
