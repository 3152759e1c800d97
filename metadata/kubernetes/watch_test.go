// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package kubernetes_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/kubernetes"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// watched simulates the API server for lists and watches of one Node and its CSINode. It keeps every event, and records
// the requests.
type watched struct {
	*httptest.Server
	t       *testing.T
	options kubernetes.Options

	mu sync.Mutex
	// version counts all changes. A watch from a version before oldest gets 410 Gone.
	version, oldest int
	objects         map[string]object  // by collection
	events          map[string][]event // by collection
	requests        []string
	queries         []url.Values // of the watches
	status          int          // if not 0, the status of every answer
	open            int          // the number of open watches
	changed         chan struct{}
	cut             chan struct{} // closed to end all watches
	patched         []string
}

type event struct {
	version int
	text    string
}

const (
	allNodes    = "/api/v1/nodes"
	allCSINodes = "/apis/storage.k8s.io/v1/csinodes"
)

func newWatched(t *testing.T) *watched {
	w := &watched{
		t: t, version: 100, objects: map[string]object{}, events: map[string][]event{},
		changed: make(chan struct{}), cut: make(chan struct{}),
	}
	l := newPipeListener()
	w.Server = &httptest.Server{Listener: l, Config: &http.Server{Handler: w}}
	w.StartTLS()
	t.Cleanup(func() {
		w.CloseClientConnections()
		w.Close()
	})
	s := &server{Server: w.Server, t: t, dir: t.TempDir()}
	s.write("ca.crt", string(s.ca()))
	s.write("token", token)
	w.options = s.options()
	w.options.Dial = l.dial
	w.change(allNodes, node())
	return w
}

// update calls do with mu held, and wakes the watches.
func (w *watched) update(do func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	do()
	close(w.changed)
	w.changed = make(chan struct{})
}

// change replaces an object, or deletes it if o is nil.
func (w *watched) change(collection string, o object) {
	w.update(func() {
		w.version++
		kind, old := "MODIFIED", w.objects[collection]
		switch {
		case o == nil:
			kind, o = "DELETED", old
			delete(w.objects, collection)
		case old == nil:
			kind = "ADDED"
			fallthrough
		default:
			w.objects[collection] = o
		}
		o["metadata"].(object)["resourceVersion"] = strconv.Itoa(w.version)
		w.add(collection, kind, o)
	})
}

// add adds an event.
func (w *watched) add(collection, kind string, o object) {
	text, err := json.Marshal(object{"type": kind, "object": o})
	if err != nil {
		w.t.Error(err)
	}
	w.events[collection] = append(w.events[collection], event{w.version, string(text)})
}

// bookmark adds a bookmark: a new version without a change of the Node.
func (w *watched) bookmark() {
	w.update(func() {
		w.version += 1000
		w.add(
			allNodes,
			"BOOKMARK",
			object{"kind": "Node", "metadata": object{"resourceVersion": strconv.Itoa(w.version)}},
		)
	})
}

// cutWatches closes all connections. It calls meanwhile before a watch can begin again.
func (w *watched) cutWatches(meanwhile func()) {
	w.update(func() {
		meanwhile()
		close(w.cut)
		w.cut = make(chan struct{})
	})
	w.CloseClientConnections()
}

func (w *watched) ServeHTTP(response http.ResponseWriter, r *http.Request) {
	w.mu.Lock()
	defer w.mu.Unlock()
	query := r.URL.Query()
	verb, status := r.Method, w.status
	switch {
	case query.Get("watch") == "true":
		verb = "WATCH"
		w.queries = append(w.queries, query)
	case query.Has("fieldSelector"):
		verb = "LIST"
	}
	w.requests = append(w.requests, verb+" "+r.URL.Path)
	since, _ := strconv.Atoi(query.Get("resourceVersion"))
	switch {
	case status != 0:
	case verb == "PATCH":
		w.patched = append(w.patched, r.URL.Path)
		w.answer(response, w.objects[allNodes])
	case verb == "GET" && r.URL.Path == allNodes+"/"+nodeName && w.objects[allNodes] != nil:
		w.answer(response, w.objects[allNodes])
	case verb == "GET":
		status = http.StatusNotFound
	case query.Get("fieldSelector") != "metadata.name="+nodeName:
		status = http.StatusForbidden // by the Node authorizer, or by a Role with resourceNames
	case verb == "LIST":
		items := []object{}
		if o := w.objects[r.URL.Path]; o != nil {
			items = append(items, o)
		}
		w.answer(
			response,
			object{"kind": "List", "metadata": object{"resourceVersion": strconv.Itoa(w.version)}, "items": items},
		)
	case since < w.oldest:
		status = http.StatusGone
	default:
		w.watch(response, r, since)
	}
	if status != 0 {
		http.Error(response, `{"kind":"Status","message":"canary"}`, status)
	}
}

func (w *watched) answer(response http.ResponseWriter, o object) {
	if err := json.NewEncoder(response).Encode(o); err != nil {
		w.t.Error(err)
	}
}

// watch sends events until the client disconnects or the connection is cut. The caller holds mu.
func (w *watched) watch(response http.ResponseWriter, r *http.Request, since int) {
	w.open++
	defer func() { w.open-- }()
	flush := http.NewResponseController(response).Flush
	cut := w.cut
	for {
		for _, e := range w.events[r.URL.Path] {
			if e.version > since {
				since = e.version
				fmt.Fprintln(response, e.text)
			}
		}
		_ = flush() // the client has gone, which shows below
		changed := w.changed
		w.mu.Unlock()
		ended := false
		select {
		case <-changed:
		case <-cut:
			ended = true
		case <-r.Context().Done():
			ended = true
		}
		w.mu.Lock()
		if ended {
			return
		}
	}
}

// did returns the requests since its last call.
func (w *watched) did() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	requests := w.requests
	w.requests = nil
	return requests
}

// await waits until this many watches are open, and checks the requests since the last call of did.
func (w *watched) await(when string, open int, want ...string) {
	w.t.Helper()
	var got []string
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
		w.mu.Lock()
		now := w.open
		w.mu.Unlock()
		if got = append(got, w.did()...); now == open && len(got) >= len(want) {
			break
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		w.t.Errorf("%s: requests\n%s", when, diff)
	}
}

// lastVersion is the version at which the last watch began.
func (w *watched) lastVersion() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.queries[len(w.queries)-1].Get("resourceVersion")
}

// signal waits for a signal.
func signal(t *testing.T, when string, changes <-chan struct{}) {
	t.Helper()
	select {
	case <-changes:
	case <-time.After(time.Minute):
		t.Fatalf("%s: no signal", when)
	}
}

// silent fails if there is a signal.
func silent(t *testing.T, when string, changes <-chan struct{}) {
	t.Helper()
	select {
	case <-changes:
		t.Errorf("%s: a signal", when)
	case <-time.After(50 * time.Millisecond): // in a bubble: when all goroutines wait
	}
}

const (
	listNodes  = "LIST " + allNodes
	watchNodes = "WATCH " + allNodes
)

// restarting returns a Node with a request for a restart.
func restarting(id string) object { return node(annotation("csi.oxide.computer/restart", id)) }

// A listener for planned restarts keeps one watch open. It sends no other request when the kubelet changes the Node.
func TestIdleNodeHasOneWatch(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		w := newWatched(t)
		l := kubernetes.NewListener(w.options)
		changes := l.Changes(t.Context())
		signal(t, "at first", changes)
		w.await("at first", 1, listNodes, watchNodes)
		for i := range 20 {
			w.change(allNodes, node(in("status", "heartbeat", i)))
		}
		silent(t, "idle", changes)
		w.await("idle", 1)
		query := w.queries[0]
		if timeout, err := strconv.Atoi(query.Get("timeoutSeconds")); err != nil || timeout < 300 || timeout > 600 {
			t.Errorf("the watch lasts %d seconds, %v", timeout, err)
		}
		if query.Get("allowWatchBookmarks") != "true" {
			t.Errorf("the watch gets no bookmarks: %v", query)
		}
		// The watch signals a request for a restart at once. Requested then reads the Node from the API server.
		began := time.Now()
		w.change(allNodes, restarting("7-1"))
		signal(t, "requested", changes)
		if took := time.Since(began); took > time.Second {
			t.Errorf("the change was signalled after %s", took)
		}
		if id, _, err := l.Requested(t.Context()); id != "7-1" || err != nil {
			t.Errorf("requested: %q, %v", id, err)
		}
		w.await("requested", 1, "GET "+allNodes+"/"+nodeName)
	})
}

// A broken watch resumes at the version of the last event or bookmark, and misses no change.
func TestWatchResumes(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		w := newWatched(t)
		changes := kubernetes.NewListener(w.options).Changes(t.Context())
		signal(t, "at first", changes)
		w.await("at first", 1, listNodes, watchNodes)
		if got := w.lastVersion(); got != "101" {
			t.Errorf("watched from version %s, want the version of the list", got)
		}
		w.change(allNodes, restarting("7-1")) // version 102
		signal(t, "requested", changes)
		w.cutWatches(func() {})
		w.await("cut", 1, watchNodes)
		if got := w.lastVersion(); got != "102" {
			t.Errorf("resumed at version %s, want the version of the event", got)
		}
		w.bookmark()                      // version 1102
		time.Sleep(50 * time.Millisecond) // of the bubble's clock: it goes on when the bookmark was read
		w.cutWatches(func() {})
		w.await("cut after a bookmark", 1, watchNodes)
		if got := w.lastVersion(); got != "1102" {
			t.Errorf("resumed at version %s, want the version of the bookmark", got)
		}
		silent(t, "cut", changes)
		w.cutWatches(func() {
			w.version++
			next := restarting("7-2")
			next["metadata"].(object)["resourceVersion"] = strconv.Itoa(w.version)
			w.objects[allNodes] = next
			w.add(allNodes, "MODIFIED", next)
		})
		signal(t, "requested while the watch was cut", changes)
	})
}

// The Node is listed again when the API server no longer has the version. The API server may say so in the HTTP status
// or in an event.
func TestWatchListsAnewWhenGone(t *testing.T) {
	t.Parallel()
	for name, gone := range map[string]func(w *watched){
		"refused": func(w *watched) {
			w.cutWatches(func() { w.version, w.oldest = 5000, 5000 })
		},
		"ended": func(w *watched) {
			w.update(func() {
				w.version++
				w.add(allNodes, "ERROR", object{"kind": "Status", "code": http.StatusGone, "message": "canary"})
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				w := newWatched(t)
				changes := kubernetes.NewListener(w.options).Changes(t.Context())
				signal(t, "at first", changes)
				w.await("at first", 1, listNodes, watchNodes)
				gone(w)
				want := []string{listNodes, watchNodes}
				if name == "refused" {
					want = append([]string{watchNodes}, want...)
				}
				for end := time.Now().Add(10 * time.Second); len(w.seen()) < len(want) && time.Now().Before(end); time.Sleep(time.Millisecond) {
				}
				w.await("gone", 1, want...)
				silent(t, "listed again without a change", changes)
				w.change(allNodes, restarting("7-1"))
				signal(t, "requested", changes)
			})
		})
	}
}

// seen are the requests that did has not returned yet.
func (w *watched) seen() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.requests)
}

// The error of a failing watch is reported, and so is its end. Meanwhile the pauses grow, so that few requests are
// sent.
func TestWatchFails(t *testing.T) {
	t.Parallel()
	for status, want := range map[int]struct {
		kind error
		says string
	}{
		http.StatusForbidden:           {metadata.ErrInvalid, `the verb "list" on "nodes"`},
		http.StatusUnauthorized:        {metadata.ErrInvalid, "does not accept the credentials"},
		http.StatusServiceUnavailable:  {metadata.ErrNotReady, "check the API server"},
		http.StatusInternalServerError: {metadata.ErrNotReady, "check the API server"},
	} {
		t.Run(strconv.Itoa(status), func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				w := newWatched(t)
				w.update(func() { w.status = status })
				l := kubernetes.NewListener(w.options)
				changes := l.Changes(t.Context())
				signal(t, "fails", changes)
				_, _, err := l.Requested(t.Context())
				judge(t, err, want.kind, want.says)
				time.Sleep(10 * time.Minute)
				if got := len(w.did()); got < 20 || got > 50 {
					t.Errorf("%d requests in ten minutes, want one every 15 to 30 s", got)
				}
				w.update(func() { w.status = 0 })
				signal(t, "works again", changes)
				if _, _, err := l.Requested(t.Context()); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// Await opens one watch while it waits for the cloud controller manager. It opens none if the first answer has the ID.
func TestIdentityIsAwaitedByAWatch(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		w := newWatched(t)
		w.change(allNodes, node(tainted))
		p := kubernetes.New(w.options)
		found := make(chan metadata.Instance)
		for range 3 {
			go func() {
				instance, err := metadata.Await(t.Context(), p, func(error) bool { return true })
				if err != nil {
					t.Error(err)
				}
				found <- instance
			}()
		}
		get := "GET " + allNodes + "/" + nodeName
		// A caller that comes after the answer to another one waits without a request of its own.
		synctest.Wait()
		asked := slices.DeleteFunc(w.did(), func(request string) bool { return request == get })
		if diff := cmp.Diff([]string{listNodes, watchNodes}, asked); diff != "" {
			t.Errorf("not known yet: requests\n%s", diff)
		}
		time.Sleep(time.Minute) // Await retries, without requests to the API server
		w.await("waits", 1)
		w.change(allNodes, node(providerID("oxide://"+idA)))
		for range 3 {
			select {
			case instance := <-found:
				if instance.ID != idA {
					t.Errorf("found %+v", instance)
				}
			case <-time.After(10 * time.Second):
				t.Fatal("not found")
			}
		}
		w.await("found", 0)
		if got, err := metadata.Await(
			t.Context(),
			kubernetes.New(w.options),
			func(error) bool { return false },
		); err != nil ||
			got.ID != idA {
			t.Errorf("known at once: %+v, %v", got, err)
		}
		w.await("known at once", 0, get)
	})
}

// On a machine without a free processor, an answer of the API server may have been read only after its time was over.
// What the answer says counts all the same: the API server does not send it again.
func TestWatchOnASlowMachine(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		w := newWatched(t)
		w.change(allNodes, restarting("first"))
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		annotation := kubernetes.WatchSlowly(ctx, w.options, 11*time.Second, 11*time.Minute)
		is := func(want string, within time.Duration) {
			t.Helper()
			time.Sleep(within)
			limited, cancel := context.WithTimeout(ctx, time.Second)
			defer cancel()
			if got, err := annotation(limited, "csi.oxide.computer/restart"); err != nil || got != want {
				t.Errorf("got %q, %v, want %q", got, err, want)
			}
		}
		is("first", time.Minute)
		w.change(allNodes, restarting("second"))
		is("second", 12*time.Minute)
	})
}

// After any event of the watch, the provider's errors follow the contract.
func TestFollowedProvider(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		w := newWatched(t)
		p := kubernetes.New(w.options)
		ctx, cancel := context.WithCancel(t.Context())
		changes := p.Follow(ctx)
		signal(t, "at first", changes)
		for _, step := range []struct {
			name   string
			change func()
			kind   error
			says   string
		}{
			{"provider ID of another cloud", func() { w.change(allNodes, node(providerID("aws:///i-0"))) }, metadata.ErrInvalid, "does not begin with oxide://"},
			{"deleted", func() { w.change(allNodes, nil) }, metadata.ErrNotReady, "HTTP 404; check that --node-name"},
			{"created again", func() { w.change(allNodes, node(providerID("oxide://"+idA))) }, nil, ""},
			{"not JSON", func() {
				w.update(func() {
					w.version++
					w.events[allNodes] = append(w.events[allNodes], event{w.version, "<html>"})
				})
			}, metadata.ErrInvalid, "unexpected answer from"},
		} {
			step.change()
			signal(t, step.name, changes)
			_, err := p.Instance(t.Context())
			judge(t, err, step.kind, step.says)
		}
		cancel()
		stopped, stop := context.WithCancel(t.Context())
		stop()
		if _, err := p.Instance(stopped); !errors.Is(err, context.Canceled) {
			t.Errorf("cancelled: %v", err)
		}
	})
}

// Removal of the startup taint waits with one watch of the Node and one watch of the CSINode.
func TestStartupTaintIsWatched(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		w := newWatched(t)
		n := kubernetes.NewNode(w.options)
		registration := orchestrator.Registration{Driver: driver, NodeID: idA}
		changes := n.Follow(t.Context())
		signal(t, "at first", changes)
		w.await("at first", 2, w.inAnyOrder(listNodes, watchNodes, "LIST "+allCSINodes, "WATCH "+allCSINodes)...)
		for _, step := range []struct {
			name   string
			change func()
			had    bool
			kind   error
			says   string
		}{
			{"no taint", func() {}, false, nil, ""},
			{"tainted", func() { w.change(allNodes, node(taints(object{"key": taintKey}))) }, true, metadata.ErrNotReady, "wait for the kubelet to write"},
			{"no limit yet", func() { w.change(allCSINodes, csiNode(idA, nil)) }, true, metadata.ErrNotReady, "wait for the kubelet to write"},
			{"registered", func() { w.change(allCSINodes, csiNode(idA, 7)) }, true, nil, ""},
		} {
			step.change()
			for late := time.After(10 * time.Second); ; {
				had, err := n.RemoveTaint(t.Context(), taintKey, registration)
				if had == step.had && errors.Is(err, step.kind) &&
					(err == nil || strings.Contains(err.Error(), step.says)) {
					break
				}
				select {
				case <-changes: // perhaps a signal of the other watch
				case <-late:
					t.Fatalf("%s: had the taint: %v, %v", step.name, had, err)
				}
			}
		}
		w.await("all that was sent", 2, "PATCH "+allNodes+"/"+nodeName)
	})
}

// inAnyOrder waits for these requests in any order, and returns them in their actual order.
func (w *watched) inAnyOrder(want ...string) []string {
	w.t.Helper()
	for end := time.Now().Add(10 * time.Second); len(w.seen()) < len(want) && time.Now().Before(end); time.Sleep(time.Millisecond) {
	}
	got := w.seen()
	if diff := cmp.Diff(slices.Sorted(slices.Values(want)), slices.Sorted(slices.Values(got))); diff != "" {
		w.t.Error(diff)
	}
	return got
}
