// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

const gib = int64(1) << 30

// nodes are the instances that volumes are published on.
var nodes = []string{"node-a", "node-b", "node-c", "node-d"}

// world is a rack, a second rack, and two controllers, which are killed and started again.
type world struct {
	options
	dir      string
	programs simtest.Programs
	// guests means that the rack has guests, so that disks can be read and written. This needs root.
	guests bool
	logs   []*os.File
	// api and control are the rack's addresses. They stay the same when the rack is started again.
	api, control string

	// disks is read-locked while a guest's block device is in use. The rack is not killed meanwhile.
	disks sync.RWMutex
	sim   *simtest.Sim
	other otherRack
	// plugins are the controllers. sidecars reconnects to their sockets by itself, and ControllerClient uses it.
	plugins [replicas]*simtest.Plugin
	*sidecars
	csi.ControllerClient
	rack *oxide.Client
	// advertised are the controller's capabilities.
	advertised map[csi.ControllerServiceCapability_RPC_Type]bool

	// guestsOff are the instances whose guest is off, protected by disks. outages is when an instance was last seen in a
	// state other than running.
	guestsOff map[string]bool
	outages   sync.Map
	// killedAt is the time of the last kill of a plugin, in Unix nanoseconds.
	killedAt atomic.Int64

	random  *rand.Rand
	results *results
	// hits and killed are counters for the report.
	hits, killed map[string]int
}

// newWorld builds the programs into a new folder.
func newWorld(o options) (*world, error) {
	w := &world{
		options:   o,
		guests:    os.Geteuid() == 0,
		hits:      map[string]int{},
		killed:    map[string]int{},
		guestsOff: map[string]bool{},
	}
	// Worker n uses sequence n+1 of this seed, see newWorkers.
	w.random = rand.New(rand.NewPCG(o.seed, 0))
	var err error
	if w.dir, err = os.MkdirTemp("", "chaos"); err != nil {
		return nil, err
	}
	if w.programs, err = simtest.Build(w.dir, o.race); err != nil {
		return nil, errors.Join(err, os.RemoveAll(w.dir))
	}
	return w, nil
}

func (w *world) path(name string) string { return filepath.Join(w.dir, name) }

// begin starts rack and plugin, and then injects the faults.
func (w *world) begin(ctx context.Context, b *results) error {
	w.results = b
	for _, address := range []*string{&w.api, &w.control, &w.other.api, &w.other.control} {
		var err error
		if *address, err = freeAddress(w.random); err != nil {
			return err
		}
	}
	if err := errors.Join(w.startRack(ctx), w.startOtherRack()); err != nil {
		return err
	}
	var sockets [replicas]string
	for i := range w.plugins {
		if err := os.Mkdir(w.path(pluginDir(i)), 0o755); err != nil {
			return err
		}
		if err := w.startPlugin(i); err != nil {
			return err
		}
		sockets[i] = w.plugins[i].Socket
	}
	var err error
	if w.sidecars, err = connectSidecars(sockets, w.seed); err != nil {
		return err
	}
	w.ControllerClient = csi.NewControllerClient(w.sidecars)
	if w.rack, err = w.sim.Client(); err != nil {
		return err
	}
	resp, err := w.ControllerGetCapabilities(ctx, &csi.ControllerGetCapabilitiesRequest{}, grpc.WaitForReady(true))
	if err != nil {
		return err
	}
	w.advertised = map[csi.ControllerServiceCapability_RPC_Type]bool{}
	for _, capability := range resp.GetCapabilities() {
		w.advertised[capability.GetRpc().GetType()] = true
	}
	return errors.Join(w.injectFaults(ctx), w.injectFaultsInto(ctx, w.other.sim))
}

// freeAddress returns a loopback address that is not in use. Its port is outside the range that the kernel gives to
// clients: a client could take such a port while the rack is down.
func freeAddress(random *rand.Rand) (string, error) {
	for {
		address := fmt.Sprintf("127.0.0.1:%d", 15000+random.IntN(15000))
		listener, err := net.Listen("tcp", address)
		if err == nil {
			return address, listener.Close()
		}
		if random.IntN(1000) == 0 {
			return "", err
		}
	}
}

// Files for the logs of the programs.
const (
	rackLog   = "oxide-sim.log"
	pluginLog = "oxide-csi.log"
)

// log opens the file for a program's log. All processes of the program append to it.
func (w *world) log(name string) (*os.File, error) {
	file, err := os.OpenFile(w.path(name), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err == nil {
		w.logs = append(w.logs, file)
	}
	return file, err
}

// latency is the minimum duration of each call of the rack.
const latency = 3 * time.Millisecond

// quotaPerWorker is the storage quota for each worker. It is sometimes too small on purpose.
const quotaPerWorker = 9 * gib

func (w *world) startRack(ctx context.Context) error {
	log, err := w.log(rackLog)
	if err != nil {
		return err
	}
	disks := "--hotplug"
	switch {
	case w.restarts:
		disks = "--state-time=300ms"
	case w.random.IntN(2) == 0:
		disks = "--hotplug=async"
	}
	quota := int64(w.workers)*quotaPerWorker + int64(len(nodes))*gib
	args := []string{
		"--listen=" + w.api,
		"--control=" + w.control,
		"--tls=" + w.path("tls"),
		"--state=" + w.path("rack"),
		"--instances=" + strings.Join(nodes, ","),
		disks,
		"--latency=" + latency.String(),
		fmt.Sprintf("--quota=%d", quota),
	}
	if w.guests {
		args = append(args, "--guest-root="+w.path("guests"))
	}
	w.sim, err = simtest.StartSimWith(w.programs.Sim, simtest.SimOptions{Args: args, Stderr: log, OwnProcessGroup: true})
	return err
}

// pluginDir is the name of a controller's folder.
func pluginDir(i int) string { return fmt.Sprint("csi", i) }

// startPlugin starts a controller.
func (w *world) startPlugin(i int) error {
	log, err := w.log(pluginLog)
	if err != nil {
		return err
	}
	w.plugins[i], err = simtest.StartPlugin(
		w.programs.Plugin,
		simtest.PluginOptions{
			Mode:            "controller",
			Dir:             w.path(pluginDir(i)),
			Sim:             w.sim,
			OtherRacks:      map[string]*simtest.Sim{otherRackName: w.other.sim},
			Stderr:          log,
			OwnProcessGroup: true,
			Args:            []string{"--max-disks=12"},
		},
	)
	return err
}

// lateness is how long after a plugin's kill or after a hand-over the rack may still execute the requests of before:
// the longest injected delay, and some time for a busy machine.
const (
	longDelay = 700 * time.Millisecond
	lateness  = longDelay + 1300*time.Millisecond
)

// faultsToInject returns the faults of the rack's calls, each with its probability.
func (w *world) faultsToInject() []simtest.Fault {
	kind := func(share float64, fault simtest.Fault) simtest.Fault {
		fault.Probability = share * w.faults
		if fault.Operation == "" {
			fault.Operation = "*"
		}
		always := 0
		fault.Count = &always
		return fault
	}
	conflict := simtest.Fault{
		Kind:      simtest.FaultStatus,
		Status:    409,
		ErrorCode: "Conflict",
		Message:   "instance changed state before it could be started",
	}
	full := simtest.Fault{
		Kind:      simtest.FaultStatus,
		Status:    507,
		ErrorCode: "InsufficientCapacity",
		Message:   "Insufficient capacity: Not enough storage",
	}
	list := []simtest.Fault{
		kind(
			0.6,
			simtest.Fault{
				Kind:      simtest.FaultStatus,
				Status:    503,
				ErrorCode: "ServiceNotAvailable",
				Message:   "Service Unavailable",
			},
		),
		kind(
			0.3,
			simtest.Fault{Kind: simtest.FaultStatus, Status: 500, ErrorCode: "Internal", Message: "Internal Server Error"},
		),
		kind(
			0.1,
			simtest.Fault{Kind: simtest.FaultStatus, Status: 502, ErrorCode: "Internal", Message: "Internal Server Error"},
		),
		kind(1, simtest.Fault{Kind: simtest.FaultDone, Operation: "instance_disk_attach"}),
		kind(1, simtest.Fault{Kind: simtest.FaultDone, Operation: "instance_disk_detach"}),
		kind(0.1, simtest.Fault{Kind: simtest.FaultStatus, Status: 401}),
		kind(0.1, simtest.Fault{Kind: simtest.FaultStatus, Status: 403}),
		kind(1, simtest.Fault{Kind: simtest.FaultLost}),
		kind(1, simtest.Fault{Kind: simtest.FaultReset}),
		// Rare, because all calls stand still until the plugin notices it.
		kind(0.01, simtest.Fault{Kind: simtest.FaultSilent}),
		kind(0.5, simtest.Fault{Kind: simtest.FaultDelay, DelayMillis: 60}),
		kind(0.5, simtest.Fault{Kind: simtest.FaultDelay, DelayMillis: int(longDelay / time.Millisecond)}),
		kind(0.5, faultOn(conflict, "instance_disk_attach")),
		kind(0.5, faultOn(conflict, "instance_disk_detach")),
		kind(0.5, faultOn(full, "disk_create")),
	}
	if w.advertised[csi.ControllerServiceCapability_RPC_CREATE_DELETE_SNAPSHOT] {
		conflict.Message = "volume repair lock"
		list = append(list, kind(0.5, faultOn(conflict, "snapshot_create")), kind(0.5, faultOn(full, "snapshot_create")))
	}
	return list
}

// faultOn limits a fault to one of the rack's operations.
func faultOn(fault simtest.Fault, operation string) simtest.Fault {
	fault.Operation = operation
	return fault
}

func (w *world) injectFaults(ctx context.Context) error { return w.injectFaultsInto(ctx, w.sim) }

func (w *world) injectFaultsInto(ctx context.Context, sim *simtest.Sim) error {
	if w.faults == 0 {
		return nil
	}
	for _, fault := range w.faultsToInject() {
		if _, err := sim.Inject(ctx, fault); err != nil {
			return err
		}
	}
	return nil
}

// countHits adds the faults that the rack has injected since its start to the report. It also reports errors of the
// simulator.
func (w *world) countHits(ctx context.Context) error {
	list, err := w.sim.Faults(ctx)
	if err != nil {
		return err
	}
	for _, fault := range list {
		name := fault.Kind
		switch fault.Kind {
		case simtest.FaultStatus:
			name = fmt.Sprint(fault.Status)
		case simtest.FaultDelay:
			name = fmt.Sprintf("delay of %d ms", fault.DelayMillis)
		}
		w.hits[name] += fault.Hits
	}
	left, err := w.sim.Leftovers(ctx)
	if err != nil {
		return err
	}
	for _, text := range left.GuestErrors {
		w.results.violation("the simulator itself failed: %s", text)
	}
	return nil
}

// disrupt kills plugins and racks at random and starts them again. At the end it switches off all faults.
func (w *world) disrupt(ctx context.Context, end time.Time) error {
	for {
		wait := time.Until(end)
		if w.kills > 0 {
			wait = min(wait, time.Duration(w.random.ExpFloat64()*float64(w.kills)))
		}
		if err := pause(ctx, wait); err != nil {
			return nil // run reports the interruption
		}
		if !time.Now().Before(end) {
			return w.stopFaults(ctx)
		}
		kills := []func(context.Context) error{w.killPlugin, w.killPlugin, w.killRack, w.failInstance, w.killOtherRack}
		kill := kills[w.random.IntN(len(kills))]
		if err := kill(ctx); err != nil {
			return err
		}
	}
}

// failInstance puts an instance into a state in which the rack does not change its disks, and later starts it again.
func (w *world) failInstance(ctx context.Context) error {
	instance := w.sim.Instance(nodes[w.random.IntN(len(nodes))])
	state := []string{"stopped", "failed", "migrating"}[w.random.IntN(3)]
	w.killed["instance "+state]++
	if err := w.setRunState(ctx, instance, state); err != nil {
		return err
	}
	if err := pause(ctx, time.Duration(w.random.IntN(2000))*time.Millisecond); err != nil {
		return err
	}
	return w.setRunState(ctx, instance, "running")
}

func (w *world) setRunState(ctx context.Context, instance simtest.Instance, state string) error {
	w.disks.Lock()
	defer w.disks.Unlock()
	w.outages.Store(instance.ID, time.Now().Add(time.Minute))
	if err := w.sim.SetRunState(ctx, instance.ID, state); err != nil {
		return err
	}
	w.guestsOff[instance.ID] = state == "stopped" || state == "failed"
	if state == "running" {
		w.outages.Store(instance.ID, time.Now())
	}
	return nil
}

// refusalMemory is how long the plugin may answer that an instance does not run. The plugin caches the answer for 5 s,
// and may first have to ask a slow rack.
const refusalMemory = 5*time.Second + 10*longDelay

// wasDown reports whether an instance may have refused a change of its disks since this time.
func (w *world) wasDown(instance *simtest.Instance, since time.Time) bool {
	last, known := w.outages.Load(instance.ID)
	return known && since.Before(last.(time.Time).Add(refusalMemory))
}

func (w *world) killPlugin(ctx context.Context) error {
	w.killed["plugin"]++
	i := w.random.IntN(replicas)
	w.killedAt.Store(time.Now().UnixNano()) // a worker may notice the kill before Kill returns
	err := w.plugins[i].Kill()
	w.killedAt.Store(time.Now().UnixNano())
	if err != nil {
		return err
	}
	if err := w.downtime(ctx); err != nil {
		return err
	}
	return w.startPlugin(i)
}

func (w *world) lastKill() time.Time { return time.Unix(0, w.killedAt.Load()) }

// lastBreak is the time of the last kill, or of the last hand-over of one of these sidecars. A request of before may be
// executed after one that was sent later.
func (w *world) lastBreak(sidecars []string) time.Time {
	last := w.lastKill()
	for _, name := range sidecars {
		last = later(last, time.Unix(0, w.leases[name].lostAt.Load()))
	}
	return last
}

func (w *world) killRack(ctx context.Context) error {
	w.killed["rack"]++
	w.disks.Lock()
	defer w.disks.Unlock()
	if err := w.countHits(ctx); err != nil {
		return err
	}
	if err := w.sim.Kill(); err != nil {
		return err
	}
	if err := w.downtime(ctx); err != nil {
		return err
	}
	if err := w.startRack(ctx); err != nil {
		return err
	}
	return w.injectFaults(ctx)
}

// downtime waits for a random downtime.
func (w *world) downtime(ctx context.Context) error {
	return pause(ctx, time.Duration(w.random.IntN(300))*time.Millisecond)
}

// racks returns the racks that were started. Planned restarts have one.
func (w *world) racks() []*simtest.Sim {
	return slices.DeleteFunc([]*simtest.Sim{w.sim, w.other.sim}, func(sim *simtest.Sim) bool { return sim == nil })
}

func (w *world) stopFaults(ctx context.Context) error {
	if err := w.countHits(ctx); err != nil {
		return err
	}
	var errs []error
	for _, sim := range w.racks() {
		errs = append(errs, sim.ClearFaults(ctx))
	}
	return errors.Join(errs...)
}

// setQuota changes the rack's storage quota. 0 means no quota.
func (w *world) setQuota(ctx context.Context, bytes int64) error {
	return w.sim.Set(ctx, simtest.Settings{QuotaBytes: &bytes})
}

// end stops all programs. The rack must leave nothing behind.
func (w *world) end(keep bool) error {
	var errs []error
	if w.sidecars != nil {
		errs = append(errs, w.sidecars.close())
	}
	for _, plugin := range w.plugins {
		if plugin != nil {
			errs = append(errs, plugin.Stop())
		}
	}
	for _, sim := range w.racks() {
		errs = append(errs, sim.Stop())
	}
	for _, file := range w.logs {
		errs = append(errs, file.Close())
	}
	if err := errors.Join(errs...); err != nil || keep {
		fmt.Printf("the logs are in %s\n", w.dir)
		return err
	}
	return os.RemoveAll(w.dir)
}

// pause waits for d, or returns the context's error.
func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}
