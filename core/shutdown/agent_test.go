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

// guest is an orchestrator's node and a way to power it off, both in memory.
type guest struct {
	mu      sync.Mutex
	wanted  string
	said    metadata.RestartReply
	refuses error // of Check
	fails   error // of PowerOff
	deaf    error // of Requested
	mute    error // of Reply, after it has done what it should
	done    []string
	logged  strings.Builder
}

func (g *guest) Requested(context.Context) (string, metadata.RestartReply, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.wanted, g.said, g.deaf
}

func (g *guest) want(restart string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.wanted = restart
}

func (g *guest) Reply(_ context.Context, restartID string, answer metadata.RestartReply) error {
	if restartID != g.wanted {
		return errors.New("nobody asks for it")
	}
	g.said = answer
	g.done = append(g.done, "say "+string(answer.State))
	return g.mute
}

func (g *guest) Check(context.Context) error { return g.refuses }

func (g *guest) PowerOff(context.Context) error {
	g.done = append(g.done, "power off")
	return g.fails
}

// boot is a boot of the guest with this ID.
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

// did is what was done since the last time.
func (g *guest) did(t *testing.T, when string, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, g.done); diff != "" {
		t.Errorf("%s:\n%s", when, diff)
	}
	g.done = nil
}

func TestAcceptedAndBack(t *testing.T) {
	g := &guest{}
	a := g.boot(t, "first")
	a.Poll(t.Context())
	g.did(t, "nobody asks")
	g.wanted = "1"
	a.Poll(t.Context())
	g.did(t, "asked", "say accepted", "power off")
	if g.said != (metadata.RestartReply{State: metadata.RestartAccepted, Boot: "first"}) {
		t.Errorf("said %+v", g.said)
	}
	a.Poll(t.Context())
	g.did(t, "going down")
	a = g.boot(t, "second")
	a.Poll(t.Context())
	g.did(t, "up again", "say back")
	a.Poll(t.Context())
	g.did(t, "said")
	g.wanted, g.said = "2", metadata.RestartReply{}
	a.Poll(t.Context())
	g.did(t, "the next restart", "say accepted", "power off")
}

func TestRefused(t *testing.T) {
	g := &guest{wanted: "1", refuses: errors.New("an inhibitor\nof dpkg")}
	a := g.boot(t, "first")
	a.Poll(t.Context())
	g.did(t, "asked", "say refused")
	if g.said.Reason != "an inhibitor of dpkg" {
		t.Errorf("said %+v", g.said)
	}
	g.refuses = nil
	a.Poll(t.Context())
	g.did(t, "a refusal is not taken back")
}

// Nobody starts an instance again that goes down for what was asked long ago.
func TestAskedLongAgo(t *testing.T) {
	for ago, want := range map[time.Duration][]string{
		time.Hour:            {"say accepted", "power off"},
		3 * time.Hour:        {"say refused"},
		300 * 24 * time.Hour: {"say refused"},
	} {
		g := &guest{wanted: metadata.NewRestartID(time.Now().Add(-ago))}
		g.boot(t, "first").Poll(t.Context())
		g.did(t, "asked "+ago.String()+" ago", want...)
	}
}

// Whatever dies between the two, who has accepted goes down, and who has not does not.
func TestAcceptanceInterrupted(t *testing.T) {
	t.Run("plugin restarted before the power-off", func(t *testing.T) {
		g := &guest{wanted: "1", said: metadata.RestartReply{State: metadata.RestartAccepted, Boot: "first"}}
		a := g.boot(t, "first")
		a.Poll(t.Context())
		g.did(t, "accepted before", "say accepted", "power off")
		a.Poll(t.Context())
		g.did(t, "going down")
	})
	t.Run("answer lost", func(t *testing.T) {
		g := &guest{wanted: "1", mute: errors.New("connection reset")}
		a := g.boot(t, "first")
		a.Poll(t.Context())
		g.did(t, "not known to be said", "say accepted")
		g.mute = nil
		a.Poll(t.Context())
		g.did(t, "said again", "say accepted", "power off")
	})
	t.Run("power-off fails", func(t *testing.T) {
		g := &guest{wanted: "1", fails: errors.New("no bus")}
		a := g.boot(t, "first")
		a.Poll(t.Context())
		a.Poll(t.Context())
		g.did(t, "twice", "say accepted", "power off", "say accepted", "power off")
		if n := strings.Count(g.logged.String(), "no bus"); n != 1 {
			t.Errorf("logged %d times: %s", n, &g.logged)
		}
		g.fails = nil
		a.Poll(t.Context())
		a.Poll(t.Context())
		g.did(t, "at last", "say accepted", "power off")
	})
	t.Run("withdrawn", func(t *testing.T) {
		g := &guest{wanted: "1", fails: errors.New("no bus")}
		a := g.boot(t, "first")
		a.Poll(t.Context())
		g.done, g.wanted, g.said = nil, "", metadata.RestartReply{}
		a.Poll(t.Context())
		g.did(t, "nobody asks any more")
	})
	t.Run("not to be heard", func(t *testing.T) {
		g := &guest{wanted: "1", deaf: errors.New("the orchestrator is down")}
		a := g.boot(t, "first")
		a.Poll(t.Context())
		g.did(t, "unknown")
	})
}

func TestWithoutABootID(t *testing.T) {
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

func TestRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &guest{}
		a := g.boot(t, "first")
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { a.Run(ctx); close(ended) }()
		time.AfterFunc(7*time.Second, func() { g.want("1") })
		time.Sleep(12 * time.Second) // of the bubble's time
		cancel()
		<-ended
		g.did(t, "in twelve seconds", "say accepted", "power off")
	})
}
