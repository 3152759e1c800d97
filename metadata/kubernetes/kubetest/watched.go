// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package kubetest

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata/kubernetes"
)

// Watched simulates the API server for lists and watches of one Node and its CSINode. It keeps every event, and records
// the requests.
type Watched struct {
	*httptest.Server
	t *testing.T
	// Options lead to the server.
	Options kubernetes.Options

	mu sync.Mutex
	// Version counts all changes. A watch from a version before Oldest gets 410 Gone.
	Version, Oldest int
	Objects         map[string]Object  // by collection
	Events          map[string][]Event // by collection
	requests        []string
	Queries         []url.Values // of the watches
	Status          int          // if not 0, the status of every answer
	open            int          // the number of open watches
	changed         chan struct{}
	cut             chan struct{} // closed to end all watches
	patched         []string
}

// Event is an event of a watch.
type Event struct {
	Version int
	Text    string
}

// Collections.
const (
	AllNodes    = "/api/v1/nodes"
	AllCSINodes = "/apis/storage.k8s.io/v1/csinodes"
)

// NewWatched starts an API server with a Node.
func NewWatched(t *testing.T) *Watched {
	w := &Watched{
		t: t, Version: 100, Objects: map[string]Object{}, Events: map[string][]Event{},
		changed: make(chan struct{}), cut: make(chan struct{}),
	}
	l := newPipeListener()
	w.Server = &httptest.Server{Listener: l, Config: &http.Server{Handler: w}}
	w.StartTLS()
	t.Cleanup(func() {
		w.CloseClientConnections()
		w.Close()
	})
	w.Options = Credentials(t, w.Server).Options()
	w.Options.Dial = l.dial
	w.Change(AllNodes, Node())
	return w
}

// Update calls do with mu held, and wakes the watches.
func (w *Watched) Update(do func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	do()
	close(w.changed)
	w.changed = make(chan struct{})
}

// Change replaces an Object, or deletes it if o is nil.
func (w *Watched) Change(collection string, o Object) {
	w.Update(func() {
		w.Version++
		kind, old := "MODIFIED", w.Objects[collection]
		switch {
		case o == nil:
			kind, o = "DELETED", old
			delete(w.Objects, collection)
		case old == nil:
			kind = "ADDED"
			fallthrough
		default:
			w.Objects[collection] = o
		}
		o["metadata"].(Object)["resourceVersion"] = strconv.Itoa(w.Version)
		w.Add(collection, kind, o)
	})
}

// Add adds an event.
func (w *Watched) Add(collection, kind string, o Object) {
	text, err := json.Marshal(Object{"type": kind, "object": o})
	if err != nil {
		w.t.Error(err)
	}
	w.Events[collection] = append(w.Events[collection], Event{w.Version, string(text)})
}

// Bookmark adds a bookmark: a new version without a change of the Node.
func (w *Watched) Bookmark() {
	w.Update(func() {
		w.Version += 1000
		w.Add(
			AllNodes,
			"BOOKMARK",
			Object{"kind": "Node", "metadata": Object{"resourceVersion": strconv.Itoa(w.Version)}},
		)
	})
}

// CutWatches closes all connections. It calls meanwhile before a watch can begin again.
func (w *Watched) CutWatches(meanwhile func()) {
	w.Update(func() {
		meanwhile()
		close(w.cut)
		w.cut = make(chan struct{})
	})
	w.CloseClientConnections()
}

// ServeHTTP implements [http.Handler].
func (w *Watched) ServeHTTP(response http.ResponseWriter, r *http.Request) {
	w.mu.Lock()
	defer w.mu.Unlock()
	query := r.URL.Query()
	verb, status := r.Method, w.Status
	switch {
	case query.Get("watch") == "true":
		verb = "WATCH"
		w.Queries = append(w.Queries, query)
	case query.Has("fieldSelector"):
		verb = "LIST"
	}
	w.requests = append(w.requests, verb+" "+r.URL.Path)
	since, _ := strconv.Atoi(query.Get("resourceVersion"))
	switch {
	case status != 0:
	case verb == "PATCH":
		w.patched = append(w.patched, r.URL.Path)
		w.answer(response, w.Objects[AllNodes])
	case verb == "GET" && r.URL.Path == AllNodes+"/"+NodeName && w.Objects[AllNodes] != nil:
		w.answer(response, w.Objects[AllNodes])
	case verb == "GET":
		status = http.StatusNotFound
	case query.Get("fieldSelector") != "metadata.name="+NodeName:
		status = http.StatusForbidden // by the Node authorizer, or by a Role with resourceNames
	case verb == "LIST":
		items := []Object{}
		if o := w.Objects[r.URL.Path]; o != nil {
			items = append(items, o)
		}
		w.answer(
			response,
			Object{"kind": "List", "metadata": Object{"resourceVersion": strconv.Itoa(w.Version)}, "items": items},
		)
	case since < w.Oldest:
		status = http.StatusGone
	default:
		w.watch(response, r, since)
	}
	if status != 0 {
		http.Error(response, `{"kind":"Status","message":"canary"}`, status)
	}
}

func (w *Watched) answer(response http.ResponseWriter, o Object) {
	if err := json.NewEncoder(response).Encode(o); err != nil {
		w.t.Error(err)
	}
}

// watch sends events until the client disconnects or the connection is cut. The caller holds mu.
func (w *Watched) watch(response http.ResponseWriter, r *http.Request, since int) {
	w.open++
	defer func() { w.open-- }()
	flush := http.NewResponseController(response).Flush
	cut := w.cut
	for {
		for _, e := range w.Events[r.URL.Path] {
			if e.Version > since {
				since = e.Version
				fmt.Fprintln(response, e.Text)
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

// Did returns the requests since its last call.
func (w *Watched) Did() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	requests := w.requests
	w.requests = nil
	return requests
}

// Await waits until this many watches are open, and checks the requests since the last call of did.
func (w *Watched) Await(when string, open int, want ...string) {
	w.t.Helper()
	var got []string
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
		w.mu.Lock()
		now := w.open
		w.mu.Unlock()
		if got = append(got, w.Did()...); now == open && len(got) >= len(want) {
			break
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		w.t.Errorf("%s: requests\n%s", when, diff)
	}
}

// LastVersion is the version at which the last watch began.
func (w *Watched) LastVersion() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.Queries[len(w.Queries)-1].Get("resourceVersion")
}

// Signal waits for a signal.
func Signal(t *testing.T, when string, changes <-chan struct{}) {
	t.Helper()
	select {
	case <-changes:
	case <-time.After(time.Minute):
		t.Fatalf("%s: no signal", when)
	}
}

// Silent fails if there is a signal.
func Silent(t *testing.T, when string, changes <-chan struct{}) {
	t.Helper()
	select {
	case <-changes:
		t.Errorf("%s: a signal", when)
	case <-time.After(50 * time.Millisecond): // in a bubble: when all goroutines wait
	}
}

// Seen are the requests that did has not returned yet.
func (w *Watched) Seen() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.requests)
}

// InAnyOrder waits for these requests in any order, and returns them in their actual order.
func (w *Watched) InAnyOrder(want ...string) []string {
	w.t.Helper()
	for end := time.Now().Add(10 * time.Second); len(w.Seen()) < len(want) && time.Now().Before(end); time.Sleep(time.Millisecond) {
	}
	got := w.Seen()
	if diff := cmp.Diff(slices.Sorted(slices.Values(want)), slices.Sorted(slices.Values(got))); diff != "" {
		w.t.Error(diff)
	}
	return got
}
