// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package kubernetes_test

import (
	"errors"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/kubernetes/kubetest"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator/kubernetes"
)

const (
	listNodes  = "LIST " + allNodes
	watchNodes = "WATCH " + allNodes
)

// restarting returns a Node with a request for a restart.
func restarting(id string) object { return node(annotation("csi.oxide.computer/restart", id)) }

// A listener for planned restarts keeps one watch open. It sends no other request when the kubelet changes the Node.
func TestIdleNodeHasOneWatch(t *testing.T) {
	kubetest.InBubble(t, func(t *testing.T) {
		w := kubetest.NewWatched(t)
		l := kubernetes.NewListener(w.Options)
		changes := l.Changes(t.Context())
		kubetest.Signal(t, "at first", changes)
		w.Await("at first", 1, listNodes, watchNodes)
		for i := range 20 {
			w.Change(allNodes, node(in("status", "heartbeat", i)))
		}
		kubetest.Silent(t, "idle", changes)
		w.Await("idle", 1)
		query := w.Queries[0]
		if timeout, err := strconv.Atoi(query.Get("timeoutSeconds")); err != nil || timeout < 300 || timeout > 600 {
			t.Errorf("the watch lasts %d seconds, %v", timeout, err)
		}
		if query.Get("allowWatchBookmarks") != "true" {
			t.Errorf("the watch gets no bookmarks: %v", query)
		}
		// The watch signals a request for a restart at once. Requested then reads the Node from the API server.
		began := time.Now()
		w.Change(allNodes, restarting("7-1"))
		kubetest.Signal(t, "requested", changes)
		if took := time.Since(began); took > time.Second {
			t.Errorf("the change was signalled after %s", took)
		}
		if id, _, err := l.Requested(t.Context()); id != "7-1" || err != nil {
			t.Errorf("requested: %q, %v", id, err)
		}
		w.Await("requested", 1, "GET "+allNodes+"/"+nodeName)
	})
}

// Removal of the startup taint waits with one watch of the Node and one watch of the CSINode.
func TestStartupTaintIsWatched(t *testing.T) {
	kubetest.InBubble(t, func(t *testing.T) {
		w := kubetest.NewWatched(t)
		n := kubernetes.NewNode(w.Options)
		registration := orchestrator.Registration{Driver: driver, NodeID: idA}
		changes := n.Follow(t.Context())
		kubetest.Signal(t, "at first", changes)
		w.Await("at first", 2, w.InAnyOrder(listNodes, watchNodes, "LIST "+allCSINodes, "WATCH "+allCSINodes)...)
		for _, step := range []struct {
			name   string
			change func()
			had    bool
			kind   error
			says   string
		}{
			{"no taint", func() {}, false, nil, ""},
			{"tainted", func() { w.Change(allNodes, node(taints(object{"key": taintKey}))) }, true, metadata.ErrNotReady, "wait for the kubelet to write"},
			{"no limit yet", func() { w.Change(allCSINodes, csiNode(idA, nil)) }, true, metadata.ErrNotReady, "wait for the kubelet to write"},
			{"registered", func() { w.Change(allCSINodes, csiNode(idA, 7)) }, true, nil, ""},
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
		w.Await("all that was sent", 2, "PATCH "+allNodes+"/"+nodeName)
	})
}
