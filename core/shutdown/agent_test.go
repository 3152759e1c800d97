// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package shutdown_test

import (
	"cmp"
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

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/core/shutdown"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// guest is a node of an orchestrator and its power-off method, both in memory.
type guest struct {
	mu           sync.Mutex
	request      string
	sent         orchestrator.RestartReply
	checkErr     error
	powerOffErr  error
	requestedErr error
	uptimeErr    error
	replyErr     error // the reply takes effect all the same
	calls        []string
	logged       strings.Builder
	changes      chan struct{} // returned by Changes
	attempts     int
	uptime       time.Duration // 0: a day
}

func (g *guest) Changes(context.Context) <-chan struct{} { return g.changes }

func (g *guest) Requested(context.Context) (string, orchestrator.RestartReply, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.attempts++
	return g.request, g.sent, g.requestedErr
}

func (g *guest) Reply(_ context.Context, restartID string, answer orchestrator.RestartReply) error {
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
	uptime := func() (time.Duration, error) { return cmp.Or(g.uptime, 24*time.Hour), g.uptimeErr }
	agent, err := shutdown.New(g, g, file, uptime, slog.New(slog.NewTextHandler(&g.logged, nil)))
	if err != nil {
		t.Fatal(err)
	}
	return agent
}

// wantCalls compares the calls since the last comparison.
func (g *guest) wantCalls(t *testing.T, when string, want ...string) {
	t.Helper()
	if diff := gocmp.Diff(want, g.calls); diff != "" {
		t.Errorf("%s:\n%s", when, diff)
	}
	g.calls = nil
}

func TestAcceptedAndBack(t *testing.T) {
	g := &guest{}
	a := g.boot(t, "first")
	a.HandleRequest(t.Context())
	g.wantCalls(t, "no request")
	g.request = orchestrator.NewRestartID(time.Now())
	a.HandleRequest(t.Context())
	g.wantCalls(t, "requested", "reply accepted", "power off")
	if g.sent != (orchestrator.RestartReply{State: orchestrator.RestartAccepted, Boot: "first"}) {
		t.Errorf("sent %+v", g.sent)
	}
	a.HandleRequest(t.Context())
	g.wantCalls(t, "going down")
	a = g.boot(t, "second")
	a.HandleRequest(t.Context())
	g.wantCalls(t, "up again", "reply back")
	a.HandleRequest(t.Context())
	g.wantCalls(t, "after the reply")
	g.request, g.sent = orchestrator.NewRestartID(time.Now()), orchestrator.RestartReply{}
	a.HandleRequest(t.Context())
	g.wantCalls(t, "the next restart", "reply accepted", "power off")
}

func TestRefused(t *testing.T) {
	g := &guest{request: orchestrator.NewRestartID(time.Now()), checkErr: errors.New("an inhibitor\nof dpkg")}
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

// A request that may be left from long ago, or that no controller has written, powers no guest off. No controller would
// start the instance again.
func TestRequestsThatPowerNothingOff(t *testing.T) {
	planned := func(ago time.Duration) string { return orchestrator.NewRestartID(time.Now().Add(-ago)) }
	accepted := orchestrator.RestartReply{State: orchestrator.RestartAccepted, Boot: "first"}
	const day = 24 * time.Hour
	powersOff, refused, ignored := []string{"reply accepted", "power off"}, []string{"reply refused"}, []string(nil)
	for _, test := range []struct {
		name    string
		request string
		sent    orchestrator.RestartReply
		uptime  time.Duration
		want    []string
	}{
		{"now", planned(0), orchestrator.RestartReply{}, day, powersOff},
		{"an hour ago", planned(time.Hour), orchestrator.RestartReply{}, day, powersOff},
		{"three hours ago", planned(3 * time.Hour), orchestrator.RestartReply{}, day, refused},
		{"300 days ago", planned(300 * day), orchestrator.RestartReply{}, 400 * day, refused},
		{"by a clock that is a minute ahead", planned(-time.Minute), orchestrator.RestartReply{}, day, powersOff},
		{"in three minutes", planned(-3 * time.Minute), orchestrator.RestartReply{}, day, refused},
		{"in 50 years", planned(-50 * 365 * day), orchestrator.RestartReply{}, day, refused},
		{"before the boot", planned(time.Hour), orchestrator.RestartReply{}, 59 * time.Minute, refused},
		{"after the boot", planned(time.Hour), orchestrator.RestartReply{}, 61 * time.Minute, powersOff},
		{"any text", "please restart\n", orchestrator.RestartReply{}, day, ignored},
		{"a word", "true", orchestrator.RestartReply{}, day, ignored},
		{"no time", "7-prod-0001", orchestrator.RestartReply{}, day, ignored},
		{"a time and any text", planned(0)[:8] + "-anytext", orchestrator.RestartReply{}, day, ignored},
		{"capital letters", strings.ToUpper("69a42a40deadbeef"), orchestrator.RestartReply{}, day, ignored},
		{"too long", planned(0) + "0", orchestrator.RestartReply{}, day, ignored},
		{"accepted an hour ago", planned(time.Hour), accepted, day, powersOff},
		{"accepted 300 days ago in this boot", planned(300 * day), accepted, 400 * day, ignored},
		{"accepted in the future", planned(-day), accepted, day, ignored},
		{"accepted, and any text", "true", accepted, day, ignored},
		{
			"accepted in an earlier boot, 300 days ago", planned(300 * day),
			orchestrator.RestartReply{State: orchestrator.RestartAccepted, Boot: "earlier"}, day, []string{"reply back"},
		},
		{
			"accepted in an earlier boot, and any text", "true",
			orchestrator.RestartReply{State: orchestrator.RestartAccepted, Boot: "earlier"}, day, ignored,
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			g := &guest{request: test.request, sent: test.sent, uptime: test.uptime}
			a := g.boot(t, "first")
			if !a.HandleRequest(t.Context()) {
				t.Error("the request is handled again")
			}
			a.HandleRequest(t.Context())
			g.wantCalls(t, "handled twice", test.want...)
			if lines := strings.Count(g.logged.String(), "\n"); lines != 1 {
				t.Errorf("logged %d lines, want one:\n%s", lines, &g.logged)
			}
		})
	}
}

// If the time of the boot is unknown, an earlier boot may have carried the request out.
func TestBootTimeUnknown(t *testing.T) {
	g := &guest{request: orchestrator.NewRestartID(time.Now()), uptimeErr: errors.New("no clock")}
	g.boot(t, "first").HandleRequest(t.Context())
	g.wantCalls(t, "requested", "reply refused")
}

// An accepted restart is carried out and an unaccepted one is not, whatever fails in between.
func TestAcceptanceInterrupted(t *testing.T) {
	t.Run("plugin restarted before the power-off", func(t *testing.T) {
		g := &guest{
			request: orchestrator.NewRestartID(time.Now()),
			sent:    orchestrator.RestartReply{State: orchestrator.RestartAccepted, Boot: "first"},
		}
		a := g.boot(t, "first")
		a.HandleRequest(t.Context())
		g.wantCalls(t, "accepted before", "reply accepted", "power off")
		a.HandleRequest(t.Context())
		g.wantCalls(t, "going down")
	})
	t.Run("answer lost", func(t *testing.T) {
		g := &guest{request: orchestrator.NewRestartID(time.Now()), replyErr: errors.New("connection reset")}
		a := g.boot(t, "first")
		a.HandleRequest(t.Context())
		g.wantCalls(t, "the first reply fails", "reply accepted")
		g.replyErr = nil
		a.HandleRequest(t.Context())
		g.wantCalls(t, "the second reply succeeds", "reply accepted", "power off")
	})
	t.Run("power-off fails", func(t *testing.T) {
		g := &guest{request: orchestrator.NewRestartID(time.Now()), powerOffErr: errors.New("no bus")}
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
		g := &guest{request: orchestrator.NewRestartID(time.Now()), powerOffErr: errors.New("no bus")}
		a := g.boot(t, "first")
		a.HandleRequest(t.Context())
		g.calls, g.request, g.sent = nil, "", orchestrator.RestartReply{}
		a.HandleRequest(t.Context())
		g.wantCalls(t, "no request any more")
	})
	t.Run("request unreadable", func(t *testing.T) {
		g := &guest{request: orchestrator.NewRestartID(time.Now()), requestedErr: errors.New("the orchestrator is down")}
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
		if _, err := shutdown.New(&guest{}, &guest{}, file, shutdown.Uptime, slog.New(slog.DiscardHandler)); err == nil {
			t.Errorf("%s: no error", file)
		}
	}
	if _, err := shutdown.New(
		&guest{},
		&guest{},
		"/proc/sys/kernel/random/boot_id",
		shutdown.Uptime,
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
		g.requestedErr, g.request = nil, orchestrator.NewRestartID(time.Now())
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
