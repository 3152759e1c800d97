// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build identity

package identity_test

import (
	"context"
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
	// waitLimit is how long the providers may take in all, also on a slow machine.
	waitLimit = 5 * time.Minute
)

// TestManyProviders counts the requests of 1,000 providers at the API server, by its audit log. All begin at the same
// moment and wait for the cloud controller manager, as the plugin waits. That takes one get, one list and one watch for
// each, and a few more that the API server refuses while it has too many (HTTP 429). Then no request is made, however
// long it takes. When their Nodes are initialised, the open watches tell the providers.
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
	ctx, cancel := context.WithTimeout(t.Context(), waitLimit)
	defer cancel()
	var waiting errgroup.Group
	for i := range manyNodes {
		options := c.options()
		options.NodeName = name(i)
		waiting.Go(func() error {
			again := func(err error) bool { return errors.Is(err, metadata.ErrNotReady) }
			got, err := metadata.Await(ctx, kubernetes.New(options), again)
			if err == nil && got.ID != id(i) {
				err = fmt.Errorf("the instance is %q", got.ID)
			}
			if err != nil {
				err = fmt.Errorf("Node %s: %w", options.NodeName, err)
			}
			return err
		})
	}
	c.server.eventually("all providers watch", func() bool { return c.watching(t, before) >= manyNodes })
	start := c.since(t, before)
	t.Logf("%d providers: %v in %s", manyNodes, start, time.Since(began).Round(time.Millisecond))
	// On a slow machine a get may be given up before the API server has seen it, or be sent twice.
	if start["get"] > 2*manyNodes || start["list"] > 2*manyNodes || start["watch"] > 2*manyNodes {
		t.Errorf("%d providers made these requests at their start: %v", manyNodes, start)
	}
	time.Sleep(idleTime)
	if diff := cmp.Diff(start, c.since(t, before)); diff != "" {
		t.Errorf("requests within %s without a change (-before +after):\n%s", idleTime, diff)
	}
	began = time.Now()
	c.onMany(t, func(i int) {
		c.do("PATCH", "/api/v1/nodes/"+name(i),
			object{"spec": object{"providerID": "oxide://" + id(i), "taints": []any{}}}, nil)
	})
	must(t, waiting.Wait())
	t.Logf("all Nodes initialised and all providers ready in %s", time.Since(began).Round(time.Millisecond))
	ready := c.since(t, before)
	if ready["get"] != start["get"] || ready["list"] != start["list"] || ready["watch"] != start["watch"] {
		t.Errorf("requests until all are ready: %v, before their Nodes were initialised: %v", ready, start)
	}
}

// onMany calls do for each of the Nodes, some at the same time.
func (c *cluster) onMany(t *testing.T, do func(i int)) {
	t.Helper()
	var group errgroup.Group
	group.SetLimit(10) // each must be answered in time, also on a busy machine
	for i := range manyNodes {
		group.Go(func() error { do(i); return nil })
	}
	must(t, group.Wait())
}

// requests counts the requests of the plugin's packages for Nodes in the API server's audit log: those that arrived by
// their verb, and those that ended by verb and HTTP status.
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
			ResponseStatus         struct{ Code int }
		}
		must(t, json.Unmarshal([]byte(line), &event))
		switch {
		case event.UserAgent != "oxide-csi" || event.ObjectRef.Resource != "nodes":
		case event.Stage == "RequestReceived":
			counts[event.Verb]++
		default:
			counts[fmt.Sprintf("%s %d", event.Verb, event.ResponseStatus.Code)]++
		}
	}
	return counts
}

// watching is the number of watches that are open.
func (c *cluster) watching(t *testing.T, before map[string]int) int {
	t.Helper()
	counts := c.since(t, before)
	open := counts["watch"]
	for end, count := range counts {
		if strings.HasPrefix(end, "watch ") {
			open -= count
		}
	}
	return open
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
