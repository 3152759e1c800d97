// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build identity

package identity_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// idA and idB are instance IDs.
const (
	idA = "6f3a1c9e-2b7d-4e58-9a41-0d5c8e7f1a23"
	idB = "b81d0f42-77c3-4c0a-8e6f-93a5d2b4c716"
)

// plugin is the path of the built oxide-csi.
var plugin string

func TestMain(m *testing.M) { os.Exit(build(m)) }

func build(m *testing.M) int {
	dir, err := os.MkdirTemp("", "identity")
	if err == nil {
		var programs simtest.Programs
		programs, err = simtest.Build(dir, simtest.RaceDetector())
		plugin = programs.Plugin
	}
	code := 1
	if err == nil {
		code = m.Run()
		err = os.RemoveAll(dir)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}

// program returns the path of a program that test/programs/build.sh has built.
func program(t *testing.T, name, target string) string {
	t.Helper()
	dir := os.Getenv("OXIDE_CSI_PROGRAMS")
	if dir == "" {
		cache, err := os.UserCacheDir()
		must(t, err)
		dir = filepath.Join(cache, "oxide-csi-plugin", "programs")
	}
	path := filepath.Join(dir, name)
	if _, err := os.Stat(path); err != nil {
		t.Skipf("needs %s, which is not in %s; run test/programs/build.sh %s", name, dir, target)
	}
	return path
}

// process is a server that runs until the end of a test.
type process struct {
	t    *testing.T
	name string
	done chan struct{}
	log  string
}

// start starts a server with its own environment, and ends it with the test.
func start(t *testing.T, path string, args ...string) *process {
	t.Helper()
	p := &process{t: t, name: filepath.Base(path), done: make(chan struct{}), log: filepath.Join(t.TempDir(), "log")}
	log, err := os.Create(p.log)
	must(t, err)
	cmd := exec.Command(path, args...)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + t.TempDir()}
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	must(t, cmd.Start())
	go func() { _ = cmd.Wait(); close(p.done) }() // its log says how it ended
	t.Cleanup(func() {
		p.end(cmd.Process)
		must(t, log.Close())
		if t.Failed() {
			t.Logf("the end of the log of %s:\n%s", p.name, p.tail())
		}
	})
	return p
}

func (p *process) end(running *os.Process) {
	for _, signal := range []os.Signal{os.Interrupt, os.Kill} {
		if err := running.Signal(signal); err != nil && !errors.Is(err, os.ErrProcessDone) {
			p.t.Errorf("end %s: %v", p.name, err)
		}
		select {
		case <-p.done:
			return
		case <-time.After(20 * time.Second):
		}
	}
	p.t.Errorf("%s does not end", p.name)
}

func (p *process) tail() []byte {
	text, err := os.ReadFile(p.log)
	if err != nil {
		return []byte(err.Error())
	}
	return text[max(0, len(text)-4000):]
}

// eventually polls ask until it returns true, while the server runs.
func (p *process) eventually(what string, ask func() bool) {
	p.t.Helper()
	await.Within(p.t, waitLimit, p.name+": "+what, func() bool {
		select {
		case <-p.done:
			p.t.Fatalf("%s has ended:\n%s", p.name, p.tail())
		default:
		}
		return ask()
	})
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// freePort returns a TCP port that was free a moment ago.
func freePort(t *testing.T) int {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	must(t, listener.Close())
	return listener.Addr().(*net.TCPAddr).Port
}

// gate is a TCP proxy before a server. It can refuse or delay connections.
type gate struct {
	t       *testing.T
	to      string
	address string

	mu       sync.Mutex
	listener net.Listener
	held     chan struct{} // closed when connections pass
	through  []net.Conn    // passed connections, including ended ones
}

// newGate returns an open gate to an address.
func newGate(t *testing.T, to string) *gate {
	g := &gate{t: t, to: to, address: fmt.Sprintf("127.0.0.1:%d", freePort(t)), held: make(chan struct{})}
	close(g.held)
	g.open()
	t.Cleanup(func() { g.release(); g.shut() })
	return g
}

func (g *gate) open() {
	listener, err := net.Listen("tcp", g.address)
	if err != nil {
		g.t.Error(err)
		return
	}
	g.mu.Lock()
	g.listener = listener
	g.mu.Unlock()
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return // The gate was shut.
			}
			go g.pass(conn)
		}
	}()
}

// cut ends the current connections.
func (g *gate) cut() {
	for _, conn := range g.through {
		_ = conn.Close() // the error does not matter
	}
	g.through = nil
}

// shut ends the current connections, and refuses new ones.
func (g *gate) shut() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.cut()
	if g.listener != nil {
		_ = g.listener.Close() // the error does not matter
	}
	g.listener = nil
}

// hold ends the current connections, and accepts new ones without an answer until release.
func (g *gate) hold() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.cut()
	g.held = make(chan struct{})
}

func (g *gate) release() {
	g.mu.Lock()
	defer g.mu.Unlock()
	select {
	case <-g.held:
	default:
		close(g.held)
	}
}

func (g *gate) pass(from net.Conn) {
	g.mu.Lock()
	held := g.held
	g.through = append(g.through, from)
	g.mu.Unlock()
	<-held
	to, err := net.Dial("tcp", g.to)
	if err != nil {
		_ = from.Close() // this looks like a server that is down
		return
	}
	var both sync.WaitGroup
	for _, pair := range [][2]net.Conn{{from, to}, {to, from}} {
		both.Go(func() {
			_, _ = io.Copy(pair[0], pair[1]) // until one side ends
			_ = pair[0].Close()
		})
	}
	both.Wait()
}

// run runs the plugin's program to its end, inside a wrapping command if there is one.
func run(t *testing.T, environ []string, wrapped []string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	all := append(append(append([]string{}, wrapped...), plugin), args...)
	cmd := exec.CommandContext(ctx, all[0], all[1:]...)
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "GORACE=atexit_sleep_ms=10"}, environ...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	var exit *exec.ExitError
	if err := cmd.Run(); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), out.String(), errs.String()
}
