// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package nodelifecycle_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/cmd/oxide-csi/nodelifecycle"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

const (
	instanceID = "6f3a1c9e-2b7d-4e58-9a41-0d5c8e7f1a23"
	taint      = "csi.oxide.computer/agent-not-ready"
)

var (
	errDown   = &metadata.Error{Kind: metadata.ErrNotReady, What: "the API server is down", Next: "wait"}
	errDenied = &metadata.Error{Kind: metadata.ErrInvalid, What: "the API server denies access", Next: "grant it"}
)

// node is a Node whose state depends on the time since began: each function returns a part of the state.
type node struct {
	began    time.Time
	tainted  func(after time.Duration) (bool, error)
	leaving  func(after time.Duration) (string, error)
	attached func(after time.Duration) ([]string, error)

	clearedAt []time.Duration
	requests  int
}

// Follow signals a change every ten seconds.
func (n *node) Follow(ctx context.Context) <-chan struct{} {
	changes := make(chan struct{}, 1)
	go func() {
		ticker := time.NewTicker(10 * time.Second)
		defer ticker.Stop()
		for {
			select {
			case <-ticker.C:
				metadata.Signal(changes)
			case <-ctx.Done():
				return
			}
		}
	}()
	return changes
}

func (n *node) RemoveTaint(_ context.Context, key string, r orchestrator.Registration) (bool, error) {
	n.requests++
	if key != taint || r != (orchestrator.Registration{Driver: rpc.PluginName, NodeID: instanceID}) {
		return false, errors.New("wrong taint or registration")
	}
	after := time.Since(n.began)
	had, err := n.tainted(after)
	if err != nil || !had || len(n.clearedAt) > 0 {
		return had && err != nil, err
	}
	n.clearedAt = append(n.clearedAt, after)
	return true, nil
}

func (n *node) Leaving(context.Context) (string, error) { return n.leaving(time.Since(n.began)) }

func (n *node) Attachments(_ context.Context, driver string) ([]string, error) {
	if driver != rpc.PluginName {
		return nil, errors.New("wrong driver")
	}
	n.requests++
	return n.attached(time.Since(n.began))
}

type identity struct{}

func (identity) Instance(context.Context) (metadata.Instance, error) {
	return metadata.Instance{ID: instanceID}, nil
}

func TestClearTaint(t *testing.T) {
	for _, tc := range []struct {
		name    string
		tainted func(time.Duration) (bool, error)
		// cleared is the time at which the taint is removed, or empty.
		cleared []time.Duration
		logs    []string
	}{
		{"taint at the start", func(time.Duration) (bool, error) { return true, nil }, []time.Duration{0}, []string{"removed"}},
		{"taint added later", func(after time.Duration) (bool, error) { return after >= time.Minute, nil }, []time.Duration{time.Minute}, []string{"removed"}},
		{"no taint", func(time.Duration) (bool, error) { return false, nil }, nil, nil},
		{"plugin not registered at first", func(after time.Duration) (bool, error) {
			if after < 10*time.Minute {
				return true, errDown
			}
			return true, nil
		}, []time.Duration{10 * time.Minute}, []string{"level=INFO", "the API server is down", "removed"}},
		{"permission denied at first", func(after time.Duration) (bool, error) {
			if after < time.Minute {
				return true, errDenied
			}
			return true, nil
		}, []time.Duration{time.Minute}, []string{"level=ERROR", "the API server denies access; grant it"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var log bytes.Buffer
				n := &node{began: time.Now(), tainted: tc.tainted}
				nodelifecycle.ClearTaint(t.Context(), n, taint, identity{}, slog.New(slog.NewTextHandler(&log, nil)))
				if !slices.EqualFunc(
					n.clearedAt,
					tc.cleared,
					func(got, want time.Duration) bool { return got >= want && got <= want+10*time.Second },
				) {
					t.Errorf("cleared at %v, want about %v", n.clearedAt, tc.cleared)
				}
				for _, text := range tc.logs {
					if strings.Count(log.String(), text) == 0 {
						t.Errorf("the log lacks %q:\n%s", text, &log)
					}
				}
				if lines := strings.Count(log.String(), "\n"); lines > 2 {
					t.Errorf("%d lines in the log:\n%s", lines, &log)
				}
				end := time.Since(n.began)
				last := time.Duration(0)
				if len(n.clearedAt) > 0 {
					last = n.clearedAt[0]
				}
				if end < last+5*time.Minute || end > last+6*time.Minute {
					t.Errorf("ClearTaint ended after %s, want 5 minutes after the last change", end)
				}
			})
		})
	}
}

func TestClearTaintEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		n := &node{began: time.Now(), tainted: func(time.Duration) (bool, error) { return true, errDown }}
		nodelifecycle.ClearTaint(ctx, n, taint, identity{}, slog.New(slog.DiscardHandler))
		if took := time.Since(n.began); took != time.Minute {
			t.Errorf("ClearTaint ended after %s, want one minute", took)
		}
		if n.requests > 15 {
			t.Errorf("%d requests in a minute", n.requests)
		}
	})
}

func TestAwaitDetached(t *testing.T) {
	stays := func(time.Duration) (string, error) { return "", nil }
	cordoned := func(time.Duration) (string, error) { return "it is cordoned", nil }
	until := func(end time.Duration, first error, volumes ...string) func(time.Duration) ([]string, error) {
		return func(after time.Duration) ([]string, error) {
			switch {
			case after == 0 && first != nil:
				return nil, first
			case after < end:
				return volumes, nil
			}
			return nil, nil
		}
	}
	for _, tc := range []struct {
		name     string
		leaving  func(time.Duration) (string, error)
		attached func(time.Duration) ([]string, error)
		end      time.Duration
		want     string
	}{
		{"the node is not given up", stays, until(time.Hour, nil, "pvc-1"), 0, ""},
		{"no volume is attached", cordoned, until(0, nil), 0, ""},
		{"volumes are detached in time", cordoned, until(time.Minute, nil, "pvc-1", "pvc-2"), time.Minute, ""},
		{"volumes are not detached in time", cordoned, until(time.Hour, nil, "pvc-1", "pvc-2"), 5 * time.Minute, "volumes are still attached after the timeout: pvc-1, pvc-2: check which pods use them"},
		{"the API server is down at first", cordoned, until(time.Minute, errDown, "pvc-1"), time.Minute, ""},
		{"the API server is down", func(time.Duration) (string, error) { return "", errDown }, nil, 5 * time.Minute, "check whether the node is given up: the API server is down"},
		{"permission denied", cordoned, until(time.Minute, errDenied, "pvc-1"), 0, "list the attached volumes: the API server denies access"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
				defer cancel()
				n := &node{began: time.Now(), leaving: tc.leaving, attached: tc.attached}
				err := nodelifecycle.AwaitDetached(ctx, n, slog.New(slog.DiscardHandler))
				if tc.want == "" && err != nil ||
					tc.want != "" && (err == nil || !strings.HasPrefix(err.Error(), tc.want)) {
					t.Errorf("%v, want %q", err, tc.want)
				}
				if took := time.Since(n.began); took < tc.end || took > tc.end+5*time.Second {
					t.Errorf("AwaitDetached took %s, want %s", took, tc.end)
				}
				if n.requests > 70 {
					t.Errorf("%d requests, want at most 70", n.requests)
				}
			})
		})
	}
}
