// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main_test

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// floodClients is the number of connections of a flood, which each need a file descriptor of the test.
const floodClients = 10_000

// floodRate is the number of new connections per second of a flood.
const floodRate = 100

// rudeRequests are what the connections of a flood send. None of them reads.
var rudeRequests = []string{
	"",
	"GET /livez HTTP/1.1\r\nHost: pl",
	"GET /metrics HTTP/1.1\r\nHost: plugin\r\nContent-Length: 100000\r\n\r\nbody",
	strings.Repeat("GET /metrics HTTP/1.1\r\nHost: plugin\r\n\r\n", 100),
}

// TestProbeAnswersInAFlood opens 10,000 connections that keep silent, send slowly or never read, and goes on opening
// new ones. Meanwhile the probe of kubelet is answered within a second, also if the flood has kubelet's address. This
// test is not parallel: a flood would disturb other tests.
func TestProbeAnswersInAFlood(t *testing.T) {
	var files unix.Rlimit
	must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &files))
	if files.Cur < floodClients+1000 {
		t.Fatalf(
			"this test needs %d open files, and may have %d: raise the limit with ulimit -Hn",
			floodClients+1000,
			files.Cur,
		)
	}
	sim := startSim(t)
	for mode, from := range map[string]string{"controller": "127.0.0.2", "node": "127.0.0.1"} {
		t.Run(mode+", from "+from, func(t *testing.T) {
			dir, addr := shortDir(t), freePort(t)
			must(t, os.Mkdir(filepath.Join(dir, "block"), 0o755)) // a guest without disks
			plugin := startPlugin(t, simtest.PluginOptions{
				Mode: mode, Dir: dir, Sim: sim, Instance: simtest.Instance{ID: instanceID},
				Args: []string{"--http-endpoint=" + addr, "--sys-root=" + dir},
			})
			stop := flood(t, from, addr)
			// Those of the last second may wait.
			await.Eventually(t, "the plugin accepts the connections", func() bool { return waiting(t, addr) < floodRate })
			probe := &http.Client{Timeout: time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
			var longest time.Duration
			for range 20 {
				began := time.Now()
				answer, err := probe.Get("http://" + addr + "/livez")
				if err != nil {
					t.Errorf("the probe failed: %v", err)
					break
				}
				longest = max(longest, time.Since(began))
				must(t, answer.Body.Close())
				if answer.StatusCode != http.StatusOK {
					t.Errorf("the probe got %s", answer.Status)
				}
			}
			t.Logf("the longest probe took %s", longest)
			stop()
			must(t, plugin.Stop())
		})
	}
}

// flood opens connections. Until stop it replaces one after the other by a new one, at most floodRate per second.
func flood(t *testing.T, from, addr string) (stop func()) {
	t.Helper()
	const workers = 20
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}, Timeout: 10 * time.Second}
	open := make([]*net.TCPConn, floodClients)
	reopen := func(i int) {
		if open[i] != nil {
			_ = open[i].Close() // the plugin may have closed it
		}
		open[i] = rude(t, dialer, addr, rudeRequests[i%len(rudeRequests)])
	}
	var opening, replacing sync.WaitGroup
	for worker := range workers {
		opening.Go(func() {
			for i := worker; i < len(open) && !t.Failed(); i += workers {
				reopen(i)
			}
		})
	}
	opening.Wait()
	if t.Failed() {
		t.FailNow()
	}
	end := make(chan struct{})
	replacing.Go(func() {
		tick := time.NewTicker(time.Second / floodRate)
		defer tick.Stop()
		for i := 0; ; i = (i + 1) % len(open) {
			select {
			case <-end:
				return
			case <-tick.C:
				reopen(i)
			}
		}
	})
	stop = sync.OnceFunc(func() {
		close(end)
		replacing.Wait()
		for _, conn := range open {
			if conn != nil {
				_ = conn.Close() // the plugin may have closed it
			}
		}
	})
	t.Cleanup(stop)
	return stop
}

// rude opens a connection that sends text and has little room for an answer.
func rude(t *testing.T, dialer net.Dialer, addr, text string) *net.TCPConn {
	conn, err := dialer.Dial("tcp", addr)
	if err != nil {
		if !errors.Is(err, unix.ECONNRESET) { // the plugin was faster
			t.Errorf("no connection is accepted: %v", err)
		}
		return nil
	}
	tcp := conn.(*net.TCPConn)
	_ = tcp.SetLinger(0) // keeps no port after the end
	_ = tcp.SetReadBuffer(4096)
	_ = tcp.SetWriteDeadline(time.Now().Add(time.Second))
	_, _ = tcp.Write([]byte(text)) // the plugin may have closed it
	return tcp
}

// waiting returns the number of connections to a listening address that are not accepted yet.
func waiting(t *testing.T, addr string) (connections int) {
	t.Helper()
	table, err := os.ReadFile("/proc/net/tcp")
	must(t, err)
	port := netip.MustParseAddrPort(addr).Port()
	for line := range strings.Lines(string(table)) {
		const listening = "0A"
		fields := strings.Fields(line)
		if fields[3] == listening && strings.HasSuffix(fields[1], fmt.Sprintf(":%04X", port)) {
			_, queue, _ := strings.Cut(fields[4], ":")
			waiting, err := strconv.ParseInt(queue, 16, 32)
			must(t, err)
			return int(waiting)
		}
	}
	t.Fatalf("no process listens on %s", addr)
	return 0
}
