// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package kubernetes_test

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/kubernetes"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/kubernetes/kubetest"
)

const (
	listNodes  = "LIST " + allNodes
	watchNodes = "WATCH " + allNodes
)

// restarting returns a Node with a request for a restart.
func restarting(id string) object { return node(annotation("csi.oxide.computer/restart", id)) }

// A broken watch resumes at the version of the last event or bookmark, and misses no change.
func TestWatchResumes(t *testing.T) {
	kubetest.InBubble(t, func(t *testing.T) {
		w := kubetest.NewWatched(t)
		changes := kubernetes.New(w.Options).Follow(t.Context())
		kubetest.Signal(t, "at first", changes)
		w.Await("at first", 1, listNodes, watchNodes)
		if got := w.LastVersion(); got != "101" {
			t.Errorf("watched from version %s, want the version of the list", got)
		}
		w.Change(allNodes, restarting("7-1")) // version 102
		kubetest.Signal(t, "requested", changes)
		w.CutWatches(func() {})
		w.Await("cut", 1, watchNodes)
		if got := w.LastVersion(); got != "102" {
			t.Errorf("resumed at version %s, want the version of the event", got)
		}
		w.Bookmark()                      // version 1102
		time.Sleep(50 * time.Millisecond) // of the bubble's clock: it goes on when the bookmark was read
		w.CutWatches(func() {})
		w.Await("cut after a bookmark", 1, watchNodes)
		if got := w.LastVersion(); got != "1102" {
			t.Errorf("resumed at version %s, want the version of the bookmark", got)
		}
		kubetest.Silent(t, "cut", changes)
		w.CutWatches(func() {
			w.Version++
			next := restarting("7-2")
			next["metadata"].(object)["resourceVersion"] = strconv.Itoa(w.Version)
			w.Objects[allNodes] = next
			w.Add(allNodes, "MODIFIED", next)
		})
		kubetest.Signal(t, "requested while the watch was cut", changes)
	})
}

// The Node is listed again when the API server no longer has the version. The API server may say so in the HTTP status
// or in an event.
func TestWatchListsAnewWhenGone(t *testing.T) {
	t.Parallel()
	for name, gone := range map[string]func(w *kubetest.Watched){
		"refused": func(w *kubetest.Watched) {
			w.CutWatches(func() { w.Version, w.Oldest = 5000, 5000 })
		},
		"ended": func(w *kubetest.Watched) {
			w.Update(func() {
				w.Version++
				w.Add(allNodes, "ERROR", object{"kind": "Status", "code": http.StatusGone, "message": "canary"})
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			kubetest.InBubble(t, func(t *testing.T) {
				w := kubetest.NewWatched(t)
				changes := kubernetes.New(w.Options).Follow(t.Context())
				kubetest.Signal(t, "at first", changes)
				w.Await("at first", 1, listNodes, watchNodes)
				gone(w)
				want := []string{listNodes, watchNodes}
				if name == "refused" {
					want = append([]string{watchNodes}, want...)
				}
				for end := time.Now().Add(10 * time.Second); len(w.Seen()) < len(want) && time.Now().Before(end); time.Sleep(time.Millisecond) {
				}
				w.Await("gone", 1, want...)
				kubetest.Signal(t, "listed again", changes)
				w.Change(allNodes, restarting("7-1"))
				kubetest.Signal(t, "requested", changes)
			})
		})
	}
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
			kubetest.InBubble(t, func(t *testing.T) {
				w := kubetest.NewWatched(t)
				w.Update(func() { w.Status = status })
				w.Objects[allNodes] = node(providerID("oxide://" + idA))
				p := kubernetes.New(w.Options)
				changes := p.Follow(t.Context())
				kubetest.Signal(t, "fails", changes)
				_, err := p.Instance(t.Context())
				kubetest.Judge(t, err, want.kind, want.says)
				time.Sleep(10 * time.Minute)
				if got := len(w.Did()); got < 20 || got > 50 {
					t.Errorf("%d requests in ten minutes, want one every 15 to 30 s", got)
				}
				w.Update(func() { w.Status = 0 })
				time.Sleep(time.Minute) // longer than a pause
				if _, err := p.Instance(t.Context()); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// Await opens one watch while it waits for the cloud controller manager. It opens none if the first answer has the ID.
func TestIdentityIsAwaitedByAWatch(t *testing.T) {
	kubetest.InBubble(t, func(t *testing.T) {
		w := kubetest.NewWatched(t)
		w.Change(allNodes, node(tainted))
		p := kubernetes.New(w.Options)
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
		asked := slices.DeleteFunc(w.Did(), func(request string) bool { return request == get })
		if diff := cmp.Diff([]string{listNodes, watchNodes}, asked); diff != "" {
			t.Errorf("not known yet: requests\n%s", diff)
		}
		time.Sleep(time.Minute) // Await retries, without requests to the API server
		w.Await("waits", 1)
		w.Change(allNodes, node(providerID("oxide://"+idA)))
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
		w.Await("found", 0)
		if got, err := metadata.Await(
			t.Context(),
			kubernetes.New(w.Options),
			func(error) bool { return false },
		); err != nil ||
			got.ID != idA {
			t.Errorf("known at once: %+v, %v", got, err)
		}
		w.Await("known at once", 0, get)
	})
}

// On a machine without a free processor, an answer of the API server may have been read only after its time was over.
// What the answer says counts all the same: the API server does not send it again.
func TestWatchOnASlowMachine(t *testing.T) {
	kubetest.InBubble(t, func(t *testing.T) {
		w := kubetest.NewWatched(t)
		w.Change(allNodes, restarting("first"))
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		annotation := kubernetes.WatchSlowly(ctx, w.Options, 11*time.Second, 11*time.Minute)
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
		w.Change(allNodes, restarting("second"))
		is("second", 12*time.Minute)
	})
}

// After any event of the watch, the provider's errors follow the contract.
func TestFollowedProvider(t *testing.T) {
	kubetest.InBubble(t, func(t *testing.T) {
		w := kubetest.NewWatched(t)
		p := kubernetes.New(w.Options)
		ctx, cancel := context.WithCancel(t.Context())
		changes := p.Follow(ctx)
		kubetest.Signal(t, "at first", changes)
		for _, step := range []struct {
			name   string
			change func()
			kind   error
			says   string
		}{
			{"provider ID of another cloud", func() { w.Change(allNodes, node(providerID("aws:///i-0"))) }, metadata.ErrInvalid, "does not begin with oxide://"},
			{"deleted", func() { w.Change(allNodes, nil) }, metadata.ErrNotReady, "HTTP 404; check that --node-name"},
			{"created again", func() { w.Change(allNodes, node(providerID("oxide://"+idA))) }, nil, ""},
			{"not JSON", func() {
				w.Update(func() {
					w.Version++
					w.Events[allNodes] = append(w.Events[allNodes], kubetest.Event{Version: w.Version, Text: "<html>"})
				})
			}, metadata.ErrInvalid, "unexpected response from"},
		} {
			step.change()
			kubetest.Signal(t, step.name, changes)
			_, err := p.Instance(t.Context())
			kubetest.Judge(t, err, step.kind, step.says)
		}
		cancel()
		stopped, stop := context.WithCancel(t.Context())
		stop()
		if _, err := p.Instance(stopped); !errors.Is(err, context.Canceled) {
			t.Errorf("cancelled: %v", err)
		}
	})
}
