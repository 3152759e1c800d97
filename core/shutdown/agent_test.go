// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package shutdown_test

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/core/shutdown"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// guest is a node of an orchestrator and its power-off method, both in memory.
type guest struct {
	mu           sync.Mutex
	request      string
	sent         metadata.RestartReply
	checkErr     error
	powerOffErr  error
	requestedErr error
	replyErr     error // the reply takes effect all the same
	calls        []string
	logged       strings.Builder
	changes      chan struct{} // returned by Changes
	attempts     int
}

func (g *guest) Changes(context.Context) <-chan struct{} { return g.changes }

func (g *guest) Requested(context.Context) (string, metadata.RestartReply, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.attempts++
	return g.request, g.sent, g.requestedErr
}

func (g *guest) Reply(_ context.Context, restartID string, answer metadata.RestartReply) error {
	if restartID != g.request {
		return errors.New("not requested")
	}
	g.sent = answer
	g.calls = append(g.calls, "reply "+string(answer.State))
	return g.replyErr
}

func (g *guest) Check(context.Context) error { return g.checkErr }

func (g *guest) PowerOff(context.Context) error {
	g.calls = append(g.calls, "power off")
	return g.powerOffErr
}

// boot returns the agent of a guest with this boot ID.
func (g *guest) boot(t *testing.T, id string) *shutdown.Agent {
	t.Helper()
	file := filepath.Join(t.TempDir(), "boot_id")
	if err := os.WriteFile(file, []byte(id+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	agent, err := shutdown.New(g, g, file, slog.New(slog.NewTextHandler(&g.logged, nil)))
	if err != nil {
		t.Fatal(err)
	}
	return agent
}

// wantCalls compares the calls since the last comparison.
func (g *guest) wantCalls(t *testing.T, when string, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, g.calls); diff != "" {
		t.Errorf("%s:\n%s", when, diff)
	}
	g.calls = nil
}

func TestAcceptedAndBack(t *testing.T) {
	g := &guest{}
	a := g.boot(t, "first")
	a.HandleRequest(t.Context())
	g.wantCalls(t, "no request")
	g.request = "1"
	a.HandleRequest(t.Context())
	g.wantCalls(t, "requested", "reply accepted", "power off")
	if g.sent != (metadata.RestartReply{State: metadata.RestartAccepted, Boot: "first"}) {
		t.Errorf("sent %+v", g.sent)
	}
	a.HandleRequest(t.Context())
	g.wantCalls(t, "going down")
	a = g.boot(t, "second")
	a.HandleRequest(t.Context())
	g.wantCalls(t, "up again", "reply back")
	a.HandleRequest(t.Context())
	g.wantCalls(t, "after the reply")
	g.request, g.sent = "2", metadata.RestartReply{}
	a.HandleRequest(t.Context())
	g.wantCalls(t, "the next restart", "reply accepted", "power off")
}

func TestRefused(t *testing.T) {
	g := &guest{request: "1", checkErr: errors.New("an inhibitor\nof dpkg")}
	a := g.boot(t, "first")
	a.HandleRequest(t.Context())
	g.wantCalls(t, "requested", "reply refused")
	if g.sent.Reason != "an inhibitor of dpkg" {
		t.Errorf("sent %+v", g.sent)
	}
	g.checkErr = nil
	a.HandleRequest(t.Context())
	g.wantCalls(t, "a refusal is not taken back")
}

// No controller would start an instance that stops for an old request.
func TestOldRequestIsRefused(t *testing.T) {
	for ago, want := range map[time.Duration][]string{
		time.Hour:            {"reply accepted", "power off"},
		3 * time.Hour:        {"reply refused"},
		300 * 24 * time.Hour: {"reply refused"},
	} {
		g := &guest{request: metadata.NewRestartID(time.Now().Add(-ago))}
		g.boot(t, "first").HandleRequest(t.Context())
		g.wantCalls(t, "requested "+ago.String()+" ago", want...)
	}
}

// An accepted restart is carried out and an unaccepted one is not, whatever fails in between.
func TestAcceptanceInterrupted(t *testing.T) {
	t.Run("plugin restarted before the power-off", func(t *testing.T) {
		g := &guest{request: "1", sent: metadata.RestartReply{State: metadata.RestartAccepted, Boot: "first"}}
		a := g.boot(t, "first")
		a.HandleRequest(t.Context())
		g.wantCalls(t, "accepted before", "reply accepted", "power off")
		a.HandleRequest(t.Context())
		g.wantCalls(t, "going down")
	})
	t.Run("answer lost", func(t *testing.T) {
		g := &guest{request: "1", replyErr: errors.New("connection reset")}
		a := g.boot(t, "first")
		a.HandleRequest(t.Context())
		g.wantCalls(t, "the first reply fails", "reply accepted")
		g.replyErr = nil
		a.HandleRequest(t.Context())
		g.wantCalls(t, "the second reply succeeds", "reply accepted", "power off")
	})
	t.Run("power-off fails", func(t *testing.T) {
		g := &guest{request: "1", powerOffErr: errors.New("no bus")}
		a := g.boot(t, "first")
		a.HandleRequest(t.Context())
		a.HandleRequest(t.Context())
		g.wantCalls(t, "twice", "reply accepted", "power off", "reply accepted", "power off")
		if n := strings.Count(g.logged.String(), "no bus"); n != 1 {
			t.Errorf("logged %d times: %s", n, &g.logged)
		}
		g.powerOffErr = nil
		a.HandleRequest(t.Context())
		a.HandleRequest(t.Context())
		g.wantCalls(t, "at last", "reply accepted", "power off")
	})
	t.Run("withdrawn", func(t *testing.T) {
		g := &guest{request: "1", powerOffErr: errors.New("no bus")}
		a := g.boot(t, "first")
		a.HandleRequest(t.Context())
		g.calls, g.request, g.sent = nil, "", metadata.RestartReply{}
		a.HandleRequest(t.Context())
		g.wantCalls(t, "no request any more")
	})
	t.Run("request unreadable", func(t *testing.T) {
		g := &guest{request: "1", requestedErr: errors.New("the orchestrator is down")}
		a := g.boot(t, "first")
		a.HandleRequest(t.Context())
		g.wantCalls(t, "unknown")
	})
}

func TestNewNeedsABootID(t *testing.T) {
	empty := filepath.Join(t.TempDir(), "empty")
	if err := os.WriteFile(empty, []byte("\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{filepath.Join(t.TempDir(), "none"), empty} {
		if _, err := shutdown.New(&guest{}, &guest{}, file, slog.New(slog.DiscardHandler)); err == nil {
			t.Errorf("%s: no error", file)
		}
	}
	if _, err := shutdown.New(
		&guest{},
		&guest{},
		"/proc/sys/kernel/random/boot_id",
		slog.New(slog.DiscardHandler),
	); err != nil {
		t.Error(err)
	}
}

// The agent handles a request when the orchestrator reports a change. After a failure it retries with growing pauses.
func TestRunHandlesChangesAndRetries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &guest{changes: make(chan struct{})}
		a := g.boot(t, "first")
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { a.Run(ctx); close(ended) }()
		wantAttempts := func(when string, want int) {
			t.Helper()
			synctest.Wait()
			g.mu.Lock()
			defer g.mu.Unlock()
			if g.attempts != want {
				t.Errorf("%s: %d attempts, want %d", when, g.attempts, want)
			}
		}
		time.Sleep(time.Hour) // in the bubble's time
		wantAttempts("no change", 0)
		g.changes <- struct{}{}
		time.Sleep(time.Hour)
		wantAttempts("one change", 1)
		g.mu.Lock()
		g.requestedErr = errors.New("the orchestrator is down")
		g.mu.Unlock()
		g.changes <- struct{}{}
		time.Sleep(36 * time.Second) // 5 + 10 + 20, and a bit
		wantAttempts("failures", 5)
		time.Sleep(100 * time.Second) // 40 + 60
		wantAttempts("further failures", 7)
		g.mu.Lock()
		g.requestedErr, g.request = nil, "1"
		g.mu.Unlock()
		time.Sleep(time.Minute)
		wantAttempts("success", 8)
		time.Sleep(time.Hour)
		wantAttempts("no further change", 8)
		cancel()
		<-ended
		g.wantCalls(t, "at last", "reply accepted", "power off")
	})
}
