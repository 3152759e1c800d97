// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack_test

import (
	"bufio"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

// serveState is an environment variable. It makes this test binary serve a rack with the state folder that it names.
const serveState = "SIMRACK_TEST_STATE"

// resetMachine is an environment variable. It makes this test binary reset the machine, if it is the first process of a
// guest.
const resetMachine = "SIMRACK_TEST_RESET"

func TestMain(m *testing.M) {
	if dir := os.Getenv(serveState); dir != "" {
		serveForever(dir)
	}
	if os.Getenv(resetMachine) != "" && os.Getpid() == 1 {
		resetThis()
	}
	os.Exit(m.Run())
}

// serveForever serves a rack until the process is killed. It prints the addresses of API and control endpoint.
func serveForever(dir string) {
	rack, err := simrack.New(simrack.Options{
		Project: "proj", StateDir: dir, Instances: []string{"n"}, Hotplug: true, HotplugAsync: true,
		StateTime: 50 * time.Millisecond,
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println(httptest.NewServer(rack.API()).URL, httptest.NewServer(rack.Control()).URL)
	select {}
}

// startProcess serves a rack in another process.
func startProcess(t *testing.T, dir string) (w *world, kill func()) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), serveState+"="+dir)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	kill = sync.OnceFunc(func() {
		if err := cmd.Process.Kill(); err != nil {
			t.Error(err)
		}
		// A killed process always ends with an error.
		_ = cmd.Wait()
	})
	t.Cleanup(kill)
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	api, control, _ := strings.Cut(strings.TrimSpace(line), " ")
	return &world{t: t, token: mainToken, client: http.DefaultClient, apiURL: api, controlURL: control}, kill
}

// TestRackContinuesAfterAKill kills the process during many creates. Afterwards every disk that was confirmed exists,
// and all else is unchanged.
func TestRackContinuesAfterAKill(t *testing.T) {
	dir := t.TempDir()
	w, kill := startProcess(t, dir)
	viewer := w.newToken("viewer")
	stopped, kept := w.instance("stopped"), w.disk("kept")
	w.attach(stopped, w.disk("first")).check(t, wants{status: 202})
	w.attach(stopped, kept).check(t, wants{status: 202})
	w.detach(stopped, "first").check(t, wants{status: 202})
	gone := w.disk("gone")
	w.must("DELETE", "/disks/"+gone, "")
	before := w.must(
		"GET",
		"/projects/proj",
		"",
	).raw + w.must(
		"GET",
		"/instances/"+stopped,
		"",
	).raw + w.must(
		"GET",
		"/me",
		"",
	).raw
	n := w.machines()["n"]

	answered := w.createUntil(kill)
	if answered["w0-0"] == "" {
		t.Fatal("no disk was created before the kill")
	}

	w, _ = startProcess(t, dir)
	for name, id := range answered {
		if r := w.must("GET", "/disks/"+name+"?project=proj", ""); r.ID != id || r.state() != "detached" {
			t.Errorf("disk %s (%s) came back as %s", name, id, r.raw)
		}
	}
	w.do("GET", "/disks/"+gone, "").check(t, wants{404, "ObjectNotFound", `not found: disk with id "` + gone + `"`})
	after := w.must(
		"GET",
		"/projects/proj",
		"",
	).raw + w.must(
		"GET",
		"/instances/"+stopped,
		"",
	).raw + w.must(
		"GET",
		"/me",
		"",
	).raw
	if diff := cmp.Diff(before, after); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(map[string]int{"kept": 1}, w.slots("stopped")); diff != "" {
		t.Error(diff)
	}
	if again := w.machines()["n"]; again.ID != n.ID || again.RunState != "running" || len(again.Disks) != 1 {
		t.Errorf("instance n came back as %+v", again)
	}
	disks := int64(len(w.must("GET", "/disks?project=proj&limit=10000", "").Items))
	if got := w.must("GET", "/utilization", "").Provisioned.Storage; got != disks*gib {
		t.Errorf("%d bytes are counted for %d disks", got, disks)
	}
	w.as(viewer).do("POST", "/disks?project=proj", body("x")).check(t, wants{403, "Forbidden", "Forbidden"})
}

// createUntil creates disks with several workers, ends the rack meanwhile, and returns the IDs of the confirmed disks
// by name.
func (w *world) createUntil(end func()) map[string]string {
	var mu sync.Mutex
	answered := map[string]string{}
	var workers sync.WaitGroup
	for worker := range 4 {
		workers.Go(func() {
			for n := 0; ; n++ {
				name := fmt.Sprintf("w%d-%d", worker, n)
				res, raw, err := w.request("POST", "/v1/disks?project=proj", body(name))
				if err != nil || res.StatusCode != 201 {
					return
				}
				mu.Lock()
				answered[name] = raw[len(`{"id":"`):][:36]
				mu.Unlock()
			}
		})
	}
	w.waitFor("making disks", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(answered) > 200
	})
	end()
	workers.Wait()
	return answered
}

// TestRestartEndsWhatWasUnderWay kills the process while an instance starts and disks are being attached and detached.
func TestRestartEndsWhatWasUnderWay(t *testing.T) {
	dir := t.TempDir()
	w, kill := startProcess(t, dir)
	i, running := w.instance("i"), w.machines()["n"].ID
	in, out := w.disk("in"), w.disk("out")
	w.attach(running, out).check(t, wants{status: 202})
	w.waitDisk(out, "attached")
	w.set(`{"latency_ms":300,"state_ms":3600000}`)
	w.attach(running, in).check(t, wants{status: 202})
	w.detach(running, out).check(t, wants{status: 202})
	w.set(`{"latency_ms":0}`)
	w.must("POST", "/instances/"+i+"/start", "")
	kill()

	w, _ = startProcess(t, dir)
	w.waitRun(i, "running")
	w.waitDisk(in, "attached")
	w.waitDisk(out, "detached")
}

func TestStateFolderBelongsToOneRack(t *testing.T) {
	dir := t.TempDir()
	w := newWorld(t, simrack.Options{StateDir: dir})
	if _, err := simrack.New(simrack.Options{StateDir: dir}); err == nil || !strings.Contains(err.Error(), "in use") {
		t.Errorf("a second rack: %v", err)
	}
	w.disk("still-served")
}

func TestInvalidStateFolder(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, []byte("no folder"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := simrack.New(simrack.Options{StateDir: file}); err == nil {
		t.Error("a file was accepted as state folder")
	}
}

func TestNewRejectsInvalidOptions(t *testing.T) {
	for name, o := range map[string]simrack.Options{
		"token":     {Token: "secret"},
		"project":   {Project: "No"},
		"instance":  {Instances: []string{"a_b"}},
		"long name": {Instances: []string{strings.Repeat("a", 60)}}, // the name of its boot disk would be too long
		"disks":     {MaxDisks: 13},
		"quota":     {QuotaBytes: -1},
		"latency":   {Latency: -time.Second},
		"version":   {APIVersionMax: "newest"},
		"same name": {Instances: []string{"a", "a-boot", "a"}}, // valid: the same name twice is one instance
	} {
		rack, err := simrack.New(o)
		if name == "same name" {
			if err != nil || len(rack.Instances()) != 2 {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		if err == nil {
			t.Errorf("%s: %+v was accepted", name, o)
		}
	}
}

// TestSecondRunWithOtherOptions adds an instance and another token to an existing rack.
func TestSecondRunWithOtherOptions(t *testing.T) {
	dir := t.TempDir()
	first, err := simrack.New(simrack.Options{StateDir: dir, Instances: []string{"a"}})
	if err != nil {
		t.Fatal(err)
	}
	a := first.Instances()[0].ID
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	w := newWorld(
		t,
		simrack.Options{StateDir: dir, Project: "demo", Token: "oxide-token-other", Instances: []string{"a", "b"}},
	)
	list := w.rack.Instances()
	if len(list) != 2 || list[0].ID != a {
		t.Errorf("got %+v", list)
	}
	for _, token := range []string{mainToken, "oxide-token-other"} {
		if r := w.as(token).do("GET", "/me", ""); r.status != http.StatusOK {
			t.Errorf("token %s: %d", token, r.status)
		}
	}
}
