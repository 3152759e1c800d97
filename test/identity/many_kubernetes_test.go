// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build identity

package identity_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sync/errgroup"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/kubernetes"
)

const (
	manyNodes = 1000
	// idleTime is how long the providers only wait. It is more than the longest pause of a provider that polls, 10 s.
	idleTime = 25 * time.Second
)

// TestManyProviders counts the requests of 1,000 providers at the API server, by its audit log. All wait for the cloud
// controller manager, as the plugin waits: that takes one get, one list and one watch for each, and then nothing more,
// however long it takes. When their Nodes are initialised, the open watches tell them.
func TestManyProviders(t *testing.T) {
	c := newCluster(t)
	name := func(i int) string { return fmt.Sprintf("node-%d", i) }
	id := func(i int) string { return fmt.Sprintf("00000000-0000-4000-8000-%012d", i) }
	taint := object{"key": "node.cloudprovider.kubernetes.io/uninitialized", "value": "true", "effect": "NoSchedule"}
	c.onMany(t, func(i int) {
		c.do("POST", "/api/v1/nodes", object{
			"apiVersion": "v1", "kind": "Node", "metadata": object{"name": name(i)},
			"spec": object{"taints": []object{taint}},
		}, nil)
	})
	before, began := c.requests(t), time.Now()
	var waiting errgroup.Group
	for i := range manyNodes {
		options := c.options()
		options.NodeName = name(i)
		waiting.Go(func() error {
			again := func(err error) bool { return errors.Is(err, metadata.ErrNotReady) }
			got, err := metadata.Await(t.Context(), kubernetes.New(options), again)
			if err == nil && got.ID != id(i) {
				err = fmt.Errorf("the instance is %q", got.ID)
			}
			if err != nil {
				err = fmt.Errorf("Node %s: %w", options.NodeName, err)
			}
			return err
		})
	}
	want := map[string]int{"get": manyNodes, "list": manyNodes, "watch": manyNodes}
	c.server.eventually("all providers watch", func() bool { return c.since(t, before)["watch"] >= manyNodes })
	t.Logf("%d providers: %v in %s", manyNodes, c.since(t, before), time.Since(began).Round(time.Millisecond))
	time.Sleep(idleTime)
	if diff := cmp.Diff(want, c.since(t, before)); diff != "" {
		t.Errorf("requests after %s without a change (-want +got):\n%s", idleTime, diff)
	}
	began = time.Now()
	c.onMany(t, func(i int) {
		c.do("PATCH", "/api/v1/nodes/"+name(i),
			object{"spec": object{"providerID": "oxide://" + id(i), "taints": []any{}}}, nil)
	})
	must(t, waiting.Wait())
	t.Logf("all Nodes initialised and all providers ready in %s", time.Since(began).Round(time.Millisecond))
	if diff := cmp.Diff(want, c.since(t, before)); diff != "" {
		t.Errorf("requests until all are ready (-want +got):\n%s", diff)
	}
}

// onMany calls do for each of the Nodes, some at the same time.
func (c *cluster) onMany(t *testing.T, do func(i int)) {
	t.Helper()
	var group errgroup.Group
	group.SetLimit(50)
	for i := range manyNodes {
		group.Go(func() error { do(i); return nil })
	}
	must(t, group.Wait())
}

// requests counts the requests of the plugin's packages for Nodes, by verb, as the API server's audit log has them.
func (c *cluster) requests(t *testing.T) map[string]int {
	t.Helper()
	text, err := os.ReadFile(c.audit)
	must(t, err)
	counts := map[string]int{}
	for line := range strings.Lines(string(text)) {
		if !strings.HasSuffix(line, "\n") {
			continue // it is still being written
		}
		var event struct {
			Stage, Verb, UserAgent string
			ObjectRef              struct{ Resource string }
		}
		must(t, json.Unmarshal([]byte(line), &event))
		if event.Stage == "RequestReceived" && event.UserAgent == "oxide-csi" && event.ObjectRef.Resource == "nodes" {
			counts[event.Verb]++
		}
	}
	return counts
}

// since is the difference between the requests now and before.
func (c *cluster) since(t *testing.T, before map[string]int) map[string]int {
	t.Helper()
	counts := c.requests(t)
	for verb, count := range before {
		counts[verb] -= count
	}
	maps.DeleteFunc(counts, func(_ string, count int) bool { return count == 0 })
	return counts
}
