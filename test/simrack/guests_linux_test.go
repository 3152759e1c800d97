// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/guest"
)

// recordingGuests wraps real guests. Before each call it records what the API shows of the object. So it also proves
// that the rack answers during calls of the guests.
type recordingGuests struct {
	*guest.Guests
	world *world

	mu   sync.Mutex
	seen []string
	fail string // the call that fails
	// working holds the instances and disks of current calls; overlaps holds those that were in two calls at the same
	// time.
	working  map[string]bool
	overlaps []string
	// creating receives a channel for each store that is about to be created. Closing that channel lets the creation
	// continue.
	creating chan chan struct{}
}

// enter records that a call concerns these IDs, until done is called.
func (g *recordingGuests) enter(ids ...string) (done func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, id := range ids {
		if g.working[id] {
			g.overlaps = append(g.overlaps, id)
		}
		g.working[id] = true
	}
	return func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		for _, id := range ids {
			delete(g.working, id)
		}
	}
}

var errBroken = errors.New("broken for a test")

// record records a call, with the state that the API shows of the object at that path.
func (g *recordingGuests) record(call, path string) error {
	shown := "nothing"
	if g.world != nil {
		r := g.world.do("GET", path, "")
		shown = r.RunState + r.state()
		if r.status == 404 {
			shown = "nothing"
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.seen = append(g.seen, call+": "+shown)
	if call == g.fail {
		return errBroken
	}
	return nil
}

// recorded returns the records since its previous call.
func (g *recordingGuests) recorded() []string {
	g.mu.Lock()
	defer g.mu.Unlock()
	seen := g.seen
	g.seen = nil
	return seen
}

func (g *recordingGuests) CreateDisk(id string, size int64) error {
	defer g.enter(id)()
	if g.creating != nil {
		goOn := make(chan struct{})
		g.creating <- goOn
		<-goOn
	}
	return errors.Join(g.record("create disk", "/disks/"+id), g.Guests.CreateDisk(id, size))
}

func (g *recordingGuests) RestoreDisk(id string, size int64, from string) error {
	defer g.enter(id, from)()
	return errors.Join(g.record("restore disk", "/disks/"+id), g.Guests.RestoreDisk(id, size, from))
}

func (g *recordingGuests) CreateSnapshot(id, of string) error {
	defer g.enter(id, of)()
	if g.creating != nil {
		goOn := make(chan struct{})
		g.creating <- goOn
		<-goOn
	}
	if err := g.record("create snapshot", "/disks/"+of); err != nil {
		return err
	}
	return g.Guests.CreateSnapshot(id, of)
}

func (g *recordingGuests) DeleteSnapshot(id string) error {
	defer g.enter(id)()
	return errors.Join(g.record("delete snapshot", "/snapshots/"+id), g.Guests.DeleteSnapshot(id))
}

func (g *recordingGuests) DeleteDisk(id string) error {
	defer g.enter(id)()
	return errors.Join(g.record("delete disk", "/disks/"+id), g.Guests.DeleteDisk(id))
}

func (g *recordingGuests) CreateInstance(id, name string) error {
	defer g.enter(id)()
	return errors.Join(g.record("create instance", "/instances/"+id), g.Guests.CreateInstance(id, name))
}

func (g *recordingGuests) PowerOn(id string, disks []simrack.GuestDisk, ended func(bool)) error {
	ids := []string{id}
	for _, d := range disks {
		ids = append(ids, d.ID)
	}
	defer g.enter(ids...)()
	if err := g.record("power on", "/instances/"+id); err != nil {
		return err
	}
	return g.Guests.PowerOn(id, disks, ended)
}

func (g *recordingGuests) PowerOff(id string, orderly bool) error {
	defer g.enter(id)()
	call := "cut power"
	if orderly {
		call = "halt"
	}
	return errors.Join(g.record(call, "/instances/"+id), g.Guests.PowerOff(id, orderly))
}

func (g *recordingGuests) Plug(id string, disk simrack.GuestDisk) error {
	defer g.enter(id, disk.ID)()
	if err := g.record("plug", "/disks/"+disk.ID); err != nil {
		return err
	}
	return g.Guests.Plug(id, disk)
}

func (g *recordingGuests) Unplug(id, diskID string) error {
	defer g.enter(id, diskID)()
	return errors.Join(g.record("unplug", "/disks/"+diskID), g.Guests.Unplug(id, diskID))
}

// newGuestWorld is a world with guests, without instances.
func newGuestWorld(t *testing.T, o simrack.Options) (*world, *recordingGuests) {
	t.Helper()
	return newMachineWorld(t, o, "")
}

// newMachineWorld is a world with guests that boot a program; empty means guests without processes.
func newMachineWorld(t *testing.T, o simrack.Options, boot string) (*world, *recordingGuests) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: guests have loop devices and device nodes")
	}
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	guests, err := guest.New(guest.Options{
		Root: filepath.Join(t.TempDir(), "guests"), StateDir: t.TempDir(), Boot: boot, HaltTime: time.Second, Log: log,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // after the rack was closed
		if err := guests.Close(); err != nil {
			t.Error(err)
		}
	})
	g := &recordingGuests{Guests: guests, working: map[string]bool{}}
	o.Guests = g
	w := newWorld(t, o)
	g.world = w
	t.Cleanup(func() { g.world = nil }) // its server is about to be closed
	return w, g
}

func TestWhenGuestsAreCalled(t *testing.T) {
	w, g := newGuestWorld(t, simrack.Options{Hotplug: true})
	steps := []struct {
		what string
		do   func()
		want []string
	}{
		{"make a disk", func() { w.disk("d") }, []string{"create disk: creating"}},
		{"create an instance", func() {
			create := `{"type":"create",` + body("boot")[1:]
			r := w.must("POST", "/instances?project=proj", instanceBody("i", `"boot_disk":`+create))
			w.waitRun(r.ID, "running")
		}, []string{"create disk: creating", "create instance: creating", "power on: starting"}},
		{"attach", func() { w.move("attach", "d") }, []string{"plug: detached"}},
		{"attach again", func() { w.move("attach", "d") }, nil},
		{"reboot", func() { w.must("POST", "/instances/i/reboot?project=proj", ""); w.waitName("i", "running") },
			[]string{"cut power: rebooting", "power on: rebooting"}},
		{"detach", func() { w.move("detach", "d") }, []string{"unplug: attached"}},
		{"detach again", func() { w.move("detach", "d") }, nil},
		{"stop", func() { w.must("POST", "/instances/i/stop?project=proj", ""); w.waitName("i", "stopped") },
			[]string{"cut power: stopping"}},
		{"attach to a stopped instance", func() { w.move("attach", "d") }, nil},
		{"start", func() { w.must("POST", "/instances/i/start?project=proj", ""); w.waitName("i", "running") },
			[]string{"power on: starting"}},
		{"halt", func() { w.operate("POST", "/halt", `{"instance":"i"}`, 200, nil); w.waitName("i", "stopped") },
			[]string{"halt: running"}},
		{"run at once", func() { w.setRun("i", "running") }, []string{"power on: stopped"}},
		{"fault a disk", func() { w.setDisk("d", "faulted") }, []string{"unplug: attached"}},
		{"delete a disk", func() { w.must("DELETE", "/disks/d?project=proj", "") }, []string{"delete disk: faulted"}},
		{
			"cut the power",
			func() { w.operate("POST", "/power-cut", `{"instance":"i"}`, 200, nil) },
			[]string{"cut power: running"},
		},
		{
			"fail",
			func() { w.setRun("i", "running"); w.setRun("i", "failed") },
			[]string{"power on: stopped", "cut power: running"},
		},
	}
	for _, step := range steps {
		step.do()
		if diff := cmp.Diff(step.want, g.recorded()); diff != "" {
			t.Errorf("%s: %s", step.what, diff)
		}
	}
	if got := w.leftovers(); got != `{"disks":0,"snapshots":0,"loops":0,"mounts":0,"files":0}` {
		t.Errorf("leftovers: %s", got)
	}
}

// move attaches a disk to instance i, or detaches it, by name.
func (w *world) move(what, disk string) {
	w.t.Helper()
	w.must("POST", "/instances/i/disks/"+what+"?project=proj", `{"disk":"`+disk+`"}`)
}

func (w *world) waitName(instance, state string) {
	w.t.Helper()
	w.waitRun(w.machines()[instance].ID, state)
}

func (w *world) leftovers() string {
	w.t.Helper()
	var raw json.RawMessage
	w.operate("GET", "/leftovers", "", 200, &raw)
	return string(raw)
}

func TestAsyncHotplugPlugsAtTheEnd(t *testing.T) {
	w, g := newGuestWorld(t, simrack.Options{Hotplug: true, HotplugAsync: true})
	w.operate("POST", "/instances", `{"name":"i","run_state":"running"}`, 201, nil)
	d := w.disk("d")
	g.recorded()
	w.move("attach", "d")
	w.waitDisk(d, "attached")
	w.move("detach", "d")
	w.waitDisk(d, "detached")
	if diff := cmp.Diff([]string{"plug: attaching", "unplug: detaching"}, g.recorded()); diff != "" {
		t.Error(diff)
	}
}

func TestGuestsShowInTheControlEndpoint(t *testing.T) {
	w, _ := newGuestWorld(t, simrack.Options{Instances: []string{"n"}, Hotplug: true})
	d := w.disk("d")
	w.attach(w.machines()["n"].ID, d).check(t, wants{status: 202})
	m := w.machines()["n"]
	if m.Guest == "" || m.Guest != w.rack.Instances()[0].Dir || len(m.Disks) != 2 || m.Disks[1].Device != "nvme1n1" {
		t.Errorf("got %+v", m)
	}
	var s struct {
		Guests    bool
		GuestsOff *string `json:"guests_off"`
	}
	w.operate("GET", "/settings", "", 200, &s)
	if !s.Guests || s.GuestsOff == nil || *s.GuestsOff != "" {
		t.Errorf("settings: %+v", s)
	}
	if got := w.leftovers(); got != `{"disks":1,"snapshots":0,"loops":1,"mounts":0,"files":1}` {
		t.Errorf("leftovers: %s", got)
	}
}

// TestFailingGuests lets one call each fail. The rack answers 500 if it can, never reports a success that did not
// happen, and keeps the error for the control endpoint.
func TestFailingGuests(t *testing.T) {
	internal := wants{500, "Internal", "Internal Server Error"}
	tests := []struct {
		call string
		do   func(t *testing.T, w *world)
	}{
		{"create disk", func(t *testing.T, w *world) {
			w.do("POST", "/disks?project=proj", body("e")).check(t, internal)
			w.do("GET", "/disks/e?project=proj", "").check(t, wants{404, "ObjectNotFound", `not found: disk with name "e"`})
		}},
		{"delete disk", func(t *testing.T, w *world) {
			w.do("DELETE", "/disks/d?project=proj", "").check(t, internal)
			w.do("GET", "/disks/d?project=proj", "").check(t, wants{status: 200})
		}},
		{"plug", func(t *testing.T, w *world) {
			id := w.machines()["i"].ID
			w.attach(id, "d").check(t, internal)
			if got := w.must("GET", "/disks/d?project=proj", ""); got.state() != "detached" {
				t.Errorf("the disk is %s", got.raw)
			}
		}},
		{"create instance", func(t *testing.T, w *world) {
			create := `{"type":"create",` + body("e")[1:]
			w.do("POST", "/instances?project=proj", instanceBody("j", `"disks":[`+create+`]`)).check(t, internal)
			w.do("GET", "/disks/e?project=proj", "").check(t, wants{404, "ObjectNotFound", `not found: disk with name "e"`})
			if _, has := w.machines()["j"]; has {
				t.Error("the instance is there")
			}
		}},
		{"power on", func(t *testing.T, w *world) {
			w.setRun("i", "stopped")
			w.must("POST", "/instances/i/start?project=proj", "")
			w.waitName("i", "failed")
		}},
	}
	for _, test := range tests {
		t.Run(test.call, func(t *testing.T) {
			w, g := newGuestWorld(t, simrack.Options{Hotplug: true})
			w.operate("POST", "/instances", `{"name":"i","run_state":"running"}`, 201, nil)
			w.disk("d")
			g.fail = test.call
			test.do(t, w)
			g.fail = ""
			var left struct {
				GuestErrors []string `json:"guest_errors"`
			}
			if err := json.Unmarshal([]byte(w.leftovers()), &left); err != nil {
				t.Fatal(err)
			}
			broken := func(s string) bool { return strings.Contains(s, errBroken.Error()) }
			if !slices.ContainsFunc(left.GuestErrors, broken) {
				t.Errorf("guest errors: %q", left.GuestErrors)
			}
		})
	}
}

// TestGuestsGetOneCallAtATime lets clients make all kinds of requests concurrently. No instance and no disk is in two
// calls at the same time, and no call fails.
func TestGuestsGetOneCallAtATime(t *testing.T) {
	for _, async := range []bool{false, true} {
		t.Run(fmt.Sprintf("async=%v", async), func(t *testing.T) {
			w, g := newGuestWorld(t, simrack.Options{Hotplug: true, HotplugAsync: async, MaxDisks: 3})
			ids := []string{w.instance("i-0"), w.instance("i-1")}
			var workers sync.WaitGroup
			for c := range 6 {
				workers.Go(func() {
					rng := rand.New(rand.NewPCG(2, uint64(c)))
					for range 40 {
						w.anything(rng, ids)
					}
				})
			}
			workers.Wait()
			w.settle(ids)
			w.checkInvariants(1000*gib, 3)
			if len(g.overlaps) > 0 || len(g.working) > 0 {
				t.Errorf("in two calls at the same time: %v; still in one: %v", g.overlaps, g.working)
			}
			if left := w.leftovers(); strings.Contains(left, "guest_errors") {
				t.Error(left)
			}
		})
	}
}

// TestRestartUndoesUnfinishedCreates copies the records while the store of a disk is being created, for a single disk
// and for the disk of an instance. A rack that continues with the copy has neither disk nor instance.
func TestRestartUndoesUnfinishedCreates(t *testing.T) {
	dir := t.TempDir()
	w, g := newGuestWorld(t, simrack.Options{StateDir: dir})
	w.disk("kept")
	g.creating = make(chan chan struct{})
	create := `{"type":"create",` + body("new")[1:]
	for path, request := range map[string]string{
		"/disks?project=proj":     body("new"),
		"/instances?project=proj": instanceBody("i", `"start":false,"disks":[`+create+`]`),
	} {
		t.Run(path, func(t *testing.T) {
			answered := make(chan reply)
			go func() { answered <- w.do("POST", path, request) }()
			goOn := <-g.creating
			if got := w.must("GET", "/disks/new?project=proj", ""); got.state() != "creating" {
				t.Errorf("meanwhile it is %s", got.raw)
			}
			crashed := t.TempDir()
			if err := os.CopyFS(crashed, os.DirFS(dir)); err != nil {
				t.Fatal(err)
			}
			close(goOn)
			if r := <-answered; r.status != 201 {
				t.Errorf("answered %s", r.raw)
			}
			after := newWorld(t, simrack.Options{StateDir: crashed})
			disks, instances := after.must("GET", "/disks?project=proj", ""), after.must("GET", "/instances?project=proj", "")
			if diff := cmp.Diff([]string{"kept"}, disks.names()); diff != "" || len(instances.Items) > 0 {
				t.Errorf("disks: %s; instances: %v", diff, instances.names())
			}
			if got := after.must("GET", "/utilization", "").Provisioned.Storage; got != gib {
				t.Errorf("%d bytes are counted", got)
			}
			// Make room for the next case.
			w.do("DELETE", "/instances/i?project=proj", "")
			w.must("DELETE", "/disks/new?project=proj", "")
		})
	}
}

// TestRequestWaitsForTheCreateOfItsDisk asks for a disk while its store is being created.
func TestRequestWaitsForTheCreateOfItsDisk(t *testing.T) {
	for operation, ask := range map[string]func(w *world) reply{
		"instance_disk_attach": func(w *world) reply {
			return w.do("POST", "/instances/i/disks/attach?project=proj", `{"disk":"d"}`)
		},
		"instance_create": func(w *world) reply {
			return w.do("POST", "/instances?project=proj",
				instanceBody("j", `"start":false,"disks":[{"type":"attach","name":"d"}]`))
		},
	} {
		t.Run(operation, func(t *testing.T) {
			w, g := newGuestWorld(t, simrack.Options{})
			w.instance("i")
			g.creating = make(chan chan struct{})
			made, got := make(chan reply), make(chan reply)
			go func() { made <- w.do("POST", "/disks?project=proj", body("d")) }()
			goOn := <-g.creating
			arrives := w.fault(`{"operation":"` + operation + `","kind":"delay"}`) // only to count the calls; the delay is 0
			go func() { got <- ask(w) }()
			w.waitFor("asked for", func() bool { return w.hits(arrives) == 1 })
			close(goOn)
			if r := <-made; r.status != 201 {
				t.Errorf("the create answered %s", r.raw)
			}
			if r := <-got; r.status > 299 {
				t.Errorf("answered %s", r.raw)
			}
			if r := w.must("GET", "/disks/d?project=proj", ""); r.state() != "attached" {
				t.Errorf("the disk is %s", r.raw)
			}
		})
	}
}

// TestGuestsReturnWithTheRecords closes a rack and continues with its records: the guests of running instances run,
// with the same disks and contents.
func TestGuestsReturnWithTheRecords(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: guests have loop devices and device nodes")
	}
	root, store, state := filepath.Join(t.TempDir(), "guests"), t.TempDir(), t.TempDir()
	run := func(do func(w *world)) {
		guests, err := guest.New(guest.Options{Root: root, StateDir: store, Log: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		t.Run("run", func(t *testing.T) {
			do(
				newWorld(
					t,
					simrack.Options{Instances: []string{"n"}, StateDir: state, Guests: guests, StateTime: time.Millisecond},
				),
			)
		})
		if err := guests.Close(); err != nil {
			t.Error(err)
		}
	}
	var before machine
	run(func(w *world) {
		w.setRun("n", "stopped")
		w.attach(w.machines()["n"].ID, w.disk("d")).check(w.t, wants{status: 202})
		w.must("POST", "/instances/n/start?project=proj", "")
		w.waitName("n", "running")
		before = w.machines()["n"]
		writeDevice(w.t, before, 1, "written before")
		w.operate("POST", "/instances", `{"name":"off","run_state":"stopped"}`, 201, nil)
	})
	run(func(w *world) {
		after := w.machines()["n"]
		if diff := cmp.Diff(before, after); diff != "" {
			w.t.Error(diff)
		}
		if got := readDevice(w.t, after, 1, len("written before")); got != "written before" {
			w.t.Errorf("the disk holds %q", got)
		}
		if off := w.machines()["off"]; off.RunState != "stopped" || off.Disks[0].Device != "" {
			w.t.Errorf("the other instance: %+v", off)
		}
		// A guest that was off can be started.
		w.must("POST", "/instances/off/start?project=proj", "")
		w.waitName("off", "running")
		w.setRun("n", "stopped")
		w.detach(after.ID, "d").check(w.t, wants{status: 202})
		w.must("DELETE", "/disks/d?project=proj", "")
	})
}

func device(m machine, slot int) string { return filepath.Join(m.Guest, "dev", m.Disks[slot].Device) }

func writeDevice(t testing.TB, m machine, slot int, text string) {
	t.Helper()
	f, err := os.OpenFile(device(m, slot), os.O_WRONLY|os.O_SYNC, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.WriteString(text)
	if err := errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
}

func readDevice(t testing.TB, m machine, slot, n int) string {
	t.Helper()
	f, err := os.Open(device(m, slot))
	if err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, n)
	_, err = io.ReadFull(f, buf)
	if err := errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
	return string(buf)
}
