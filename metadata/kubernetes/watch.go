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

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	apiwatch "k8s.io/apimachinery/pkg/watch"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

const (
	// shortestWatch is the least time that the API server is asked to keep a watch open. The longest is twice as long.
	// The time is random, as for the watches of kubelets, so that not all watches end at once.
	shortestWatch = 5 * time.Minute
	// watchGrace is how long the API server may keep a watch open after it should have ended.
	watchGrace = 30 * time.Second
	// listTimeout bounds a list, so that an API server that hangs is named as the reason.
	listTimeout = 10 * time.Second
	// backoffReset is how long a watch must last until the pauses begin with the shortest again.
	backoffReset = 30 * time.Second
)

// backoff is the pause after a failure: first 0.5 to 1 s, then longer up to 15 to 30 s.
var backoff = wait.Backoff{Duration: 500 * time.Millisecond, Factor: 2, Jitter: 1, Steps: 6, Cap: 15 * time.Second}

// Watch keeps the current state of one object in memory while it has followers. It lists the object, then watches it.
// When a watch ends or breaks, the next watch resumes at the last resource version that was seen. When the API server
// no longer knows that version (410 Gone), the object is listed again.
//
// client-go's informers are not used: they need a typed or dynamic client, and keep errors to themselves.
type Watch[T named] struct {
	Client *Client
	// Collection is the path of the list. Resource and Kind are those of the object.
	Collection, Resource, Kind string
	// MetadataOnly leaves out everything but the object's metadata.
	MetadataOnly bool

	mu sync.Mutex
	// followers are signalled after each change. The watch stops when the last follower has gone.
	followers map[chan struct{}]struct{}
	stop      context.CancelFunc
	// known is closed once the state is known.
	known chan struct{}
	state State[T]
}

type named interface {
	GetName() string
	is(kind, name string) bool
}

// State is what is known about an object.
type State[T any] struct {
	Object T
	// Exists says that the object exists.
	Exists bool
	// Err is why the state is not known.
	Err error
}

// Follow keeps the object in memory until ctx ends. The channel receives when the state is known, and after each change
// of the state.
func (w *Watch[T]) Follow(ctx context.Context) <-chan struct{} {
	changes := make(chan struct{}, 1)
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.followers) == 0 {
		w.followers, w.known, w.state = map[chan struct{}]struct{}{}, make(chan struct{}), State[T]{}
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

// Get waits until the state of the object is known, and returns it. followed is false if the watch has no followers.
func (w *Watch[T]) Get(ctx context.Context) (s State[T], followed bool) {
	w.mu.Lock()
	followed, known := len(w.followers) > 0, w.known
	w.mu.Unlock()
	if !followed {
		return State[T]{}, false
	}
	select {
	case <-known:
	case <-ctx.Done():
	}
	if ctx.Err() != nil {
		return State[T]{Err: metadata.NotReady("wait for the first list of "+w.what(), ctx.Err(),
			"check that the API server runs and can be reached from here")}, true
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.state, true
}

// Read returns the state of the object: from memory while the watch has followers, otherwise from the API server.
func (w *Watch[T]) Read(ctx context.Context) State[T] {
	s, followed := w.Get(ctx)
	if followed {
		return s
	}
	name := w.Client.Options.NodeName
	r := Request{
		Method: http.MethodGet, Path: w.Collection + "/" + name, What: "get " + w.what(), Verb: "get", Resource: w.Resource,
	}
	status, err := w.Client.Do(ctx, r, &s.Object, http.StatusNotFound)
	s.Exists, s.Err = status == http.StatusOK, err
	if s.Exists && err == nil && !s.Object.is(w.Kind, name) {
		s.Err = w.Client.UnexpectedAnswer(r)
	}
	return s
}

func (w *Watch[T]) what() string { return fmt.Sprintf("%s %q", w.Kind, w.Client.Options.NodeName) }

// Put stores the object that the API server has returned for our own change. Without it the change could be made again
// before the watch reports it.
func (w *Watch[T]) Put(o T) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.state.Object = o
}

// set changes the state and signals the followers. A watch that was stopped changes nothing. ctx is that of the watch's
// whole life, never that of one request: what an answer says counts also if the time of its request is over by now,
// because the API server does not say it again.
func (w *Watch[T]) set(ctx context.Context, change func(*State[T])) {
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

// errGone says that the API server no longer knows the resource version.
var errGone = errors.New("the resource version is too old")

// run lists and watches until ctx ends, with a pause after each failure.
func (w *Watch[T]) run(ctx context.Context) {
	version, pauses := "", backoff
	for {
		began := time.Now()
		if whole := w.runOnce(ctx, &version); whole {
			continue
		}
		if time.Since(began) > backoffReset {
			pauses = backoff
		}
		select {
		case <-time.After(pauses.Step()):
		case <-ctx.Done():
			return
		}
	}
}

// runOnce lists the object if no version is known, and watches it once. It reports whether the watch lasted for its
// whole time, so that no pause is needed.
func (w *Watch[T]) runOnce(ctx context.Context, version *string) (whole bool) {
	began := time.Now()
	err := w.listAndWatch(ctx, version)
	switch {
	case ctx.Err() != nil:
		return false
	case errors.Is(err, errGone):
		*version = ""
	case err != nil:
		w.set(ctx, func(s *State[T]) { s.Err = err })
	}
	return err == nil && time.Since(began) >= shortestWatch
}

// listAndWatch watches the object from a resource version on. If the version is empty, it lists the object first. It
// stores the last version that was seen. It returns nil when the watch has ended or is broken.
func (w *Watch[T]) listAndWatch(ctx context.Context, version *string) error {
	if *version == "" {
		var err error
		if *version, err = w.list(ctx); err != nil {
			return err
		}
	}
	seconds := int((shortestWatch + rand.N(shortestWatch)).Seconds())
	limited, cancel := context.WithTimeout(ctx, time.Duration(seconds)*time.Second+watchGrace)
	defer cancel()
	r := w.request("watch", MetadataOnly)
	r.Query.Set("watch", "true")
	r.Query.Set("allowWatchBookmarks", "true")
	r.Query.Set("resourceVersion", *version)
	r.Query.Set("timeoutSeconds", strconv.Itoa(seconds))
	body, err := w.Client.stream(limited, r)
	if err != nil {
		return err
	}
	defer func() { _ = body.Close() }() // it was only read
	w.clearError(ctx)
	return w.read(ctx, r, body, version)
}

// clearError clears the error once the API server answers again.
func (w *Watch[T]) clearError(ctx context.Context) {
	w.mu.Lock()
	failed := w.state.Err != nil
	w.mu.Unlock()
	if failed {
		w.set(ctx, func(s *State[T]) { s.Err = nil })
	}
}

// request is the request that lists or watches the object.
func (w *Watch[T]) request(verb, accept string) Request {
	name := w.Client.Options.NodeName
	r := Request{
		Method: http.MethodGet, Path: w.Collection, Query: url.Values{"fieldSelector": {"metadata.name=" + name}},
		What: verb + " " + w.what(), Verb: verb, Resource: w.Resource,
	}
	if w.MetadataOnly {
		r.Accept = accept
	}
	return r
}

// list reads the object, and returns the resource version of the list.
func (w *Watch[T]) list(ctx context.Context) (version string, err error) {
	limited, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	var list List[T]
	r := w.request("list", metadataList)
	if _, err := w.Client.Do(limited, r, &list); err != nil {
		return "", err
	}
	version = list.ResourceVersion
	if version == "" {
		return "", w.Client.UnexpectedAnswer(r)
	}
	w.set(ctx, func(s *State[T]) {
		*s = State[T]{}
		for _, item := range list.Items {
			if item.GetName() == w.Client.Options.NodeName {
				s.Object, s.Exists = item, true
			}
		}
	})
	return version, nil
}

// read applies the events of a watch until the watch ends.
func (w *Watch[T]) read(ctx context.Context, r Request, body io.Reader, version *string) error {
	for decoder := json.NewDecoder(body); ; {
		var event metav1.WatchEvent
		if err := decoder.Decode(&event); err != nil {
			if syntax := (*json.SyntaxError)(nil); errors.As(err, &syntax) {
				return w.Client.UnexpectedAnswer(r)
			}
			return nil // The watch has ended, in time or not. If something is wrong, the next watch fails with it.
		}
		kind, text := apiwatch.EventType(event.Type), event.Object.Raw
		if kind == apiwatch.Error {
			return w.errorEvent(r, text)
		}
		var of Object
		if err := json.Unmarshal(text, &of); err != nil || of.ResourceVersion == "" {
			return w.Client.UnexpectedAnswer(r)
		}
		if err := w.apply(ctx, kind, of.Name, text); err != nil {
			return w.Client.UnexpectedAnswer(r)
		}
		*version = of.ResourceVersion
	}
}

// apply changes the state as an event says. A bookmark changes only the version.
func (w *Watch[T]) apply(ctx context.Context, kind apiwatch.EventType, name string, text json.RawMessage) error {
	if kind == apiwatch.Bookmark || name != w.Client.Options.NodeName {
		return nil
	}
	var next State[T]
	if kind != apiwatch.Deleted {
		next.Exists = true
		if err := json.Unmarshal(text, &next.Object); err != nil {
			return err
		}
	}
	w.set(ctx, func(s *State[T]) { *s = next })
	return nil
}

// errorEvent turns the event with which the API server ends a watch into an error.
func (w *Watch[T]) errorEvent(r Request, text json.RawMessage) error {
	var status metav1.Status
	if err := json.Unmarshal(text, &status); err != nil {
		return w.Client.UnexpectedAnswer(r)
	}
	if status.Code == http.StatusGone {
		return errGone
	}
	return metadata.NotReady(fmt.Sprintf("%s: HTTP %d", r.What, status.Code), nil, "check the API server")
}
