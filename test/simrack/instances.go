// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/google/uuid"
)

// The states of an instance that this rack uses (docs/reference/rack.md §5).
const (
	runCreating  = "creating"
	runStarting  = "starting"
	runRunning   = "running"
	runStopping  = "stopping"
	runStopped   = "stopped"
	runRebooting = "rebooting"
	runMigrating = "migrating"
	runFailed    = "failed"
)

const (
	restartNever      = "never"
	restartBestEffort = "best_effort"
)

// instance is the rack's record of an instance. After its insertion only [Rack.changeInstance] may change it.
type instance struct {
	ID           string    `json:"id"`
	Name         string    `json:"name"`
	Description  string    `json:"description"`
	ProjectID    string    `json:"project_id"`
	Hostname     string    `json:"hostname"`
	NCPUs        int       `json:"ncpus"`
	MemoryBytes  int64     `json:"memory"`
	RunState     string    `json:"run_state"`
	BootDiskID   string    `json:"boot_disk_id,omitempty"`
	AutoRestart  string    `json:"auto_restart,omitempty"`
	Created      time.Time `json:"created"`
	Modified     time.Time `json:"modified"`
	StateUpdated time.Time `json:"state_updated"`
	// Number counts the instances that the rack has made. The address of an instance follows from it.
	Number int `json:"number"`

	project *project
	// disks are the disks with a slot here, unordered.
	disks []*disk
	// hasGuest means that the guest exists, powered that it is powered on. boots counts how often it was powered on.
	hasGuest, powered bool
	boots             int
	// plugs means that its virtual machine can be given disks as in the prototype of hot-plug: it has booted with that.
	plugs bool
	// transition counts the changes of RunState. Background work of an earlier transition must not finish in a later one.
	transition int
}

func (i *instance) key() (name, id string) { return i.Name, i.ID }

// hasVMM reports whether the instance has a virtual machine, or may have one.
func (i *instance) hasVMM() bool {
	switch i.RunState {
	case runStarting, runRunning, runStopping, runRebooting, runMigrating:
		return true
	}
	return false
}

func (i *instance) setState(state string) {
	i.RunState, i.StateUpdated = state, now()
	i.transition++
}

func (r *Rack) insertInstance(p *project, i *instance) {
	i.project = p
	r.lastNumber = max(r.lastNumber, i.Number)
	r.instances[i.ID] = i
	p.instances.put(i)
}

func (r *Rack) removeInstance(i *instance) error {
	if err := r.store.write(deleteRecord(bucketInstances, i.ID)); err != nil {
		return err
	}
	delete(r.instances, i.ID)
	i.project.instances.remove(i)
	return nil
}

func (r *Rack) changeInstance(i *instance, alter func(*instance)) error {
	next := *i
	alter(&next)
	if err := r.store.write(putRecord(bucketInstances, i.ID, &next)); err != nil {
		return err
	}
	*i = next
	return nil
}

func (r *Rack) setState(i *instance, state string) error {
	return r.changeInstance(i, func(i *instance) { i.setState(state) })
}

// running sums up the virtual CPUs and the memory that count against the quota. Only instances with a virtual machine
// count.
func (r *Rack) running() (cpus, memory int64) {
	for _, i := range r.instances {
		if i.hasVMM() {
			cpus += int64(i.NCPUs)
			memory += i.MemoryBytes
		}
	}
	return cpus, memory
}

// createGuest creates the guest's folder. The caller has locked the instance.
func (r *Rack) createGuest(i *instance) error {
	err := r.callGuests("create instance "+i.ID, func(g Guests) error { return g.CreateInstance(i.ID, i.Name) })
	i.hasGuest = err == nil && r.guests != nil
	return err
}

// deleteGuest removes the guest's folder. The caller has locked the instance.
func (r *Rack) deleteGuest(i *instance) error {
	if !i.hasGuest {
		return nil
	}
	err := r.callGuests("delete instance "+i.ID, func(g Guests) error { return g.DeleteInstance(i.ID) })
	i.hasGuest = err != nil
	return err
}

// powerOn starts the guest unless it is on. The caller has locked the instance.
func (r *Rack) powerOn(i *instance) error {
	if i.powered {
		return nil
	}
	var shown []GuestDisk
	for _, d := range i.disks {
		if d.State == diskAttached || d.State == diskDetaching {
			shown = append(shown, d.forGuest(i.BootDiskID))
		}
	}
	slices.SortFunc(shown, func(a, b GuestDisk) int { return a.Slot - b.Slot })
	i.boots++
	i.plugs = r.settings.Load().Hotplug == hotplugAttachFirst
	id, boot := i.ID, i.boots // copies: the record may only be read with mu held
	ended := func(reset bool) { r.guestEnded(id, boot, reset) }
	err := r.callGuests("power on "+id, func(g Guests) error { return g.PowerOn(id, shown, ended) })
	i.powered = err == nil
	return err
}

// guestEnded is called when the processes of a guest have ended. If the rack did not take its power, the guest has
// powered itself off or has reset itself. The instance then stops or reboots (docs/reference/rack.md §5). An instance
// that is already changing its state continues to that state.
func (r *Rack) guestEnded(id string, boot int, reset bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var i *instance
	release, err := r.lock(func() ([]string, error) {
		if i = r.instances[id]; i == nil {
			return nil, errNothingToDo
		}
		return []string{id}, nil
	})
	if err != nil {
		return
	}
	defer release()
	// Check only now: until the instance was locked, an operation may have been powering the guest on.
	if i.boots != boot || !i.powered || r.isClosed() {
		return
	}
	if err := r.powerOff(i, false); err != nil || r.isClosed() {
		return // the failure is recorded for the control endpoint
	}
	if i.RunState != runRunning && i.RunState != runMigrating {
		return
	}
	during, final := runStopping, runStopped
	if reset {
		during, final = runRebooting, runRunning
	}
	if err := r.startTransition(i, during, final); err != nil {
		r.log.Error("cannot change the state of an instance", "instance", id, "state", during, "error", err)
	}
}

// powerOff stops the guest unless it is off. The caller has locked the instance.
func (r *Rack) powerOff(i *instance, orderly bool) error {
	if !i.powered {
		return nil
	}
	i.powered = false
	return r.callGuests("power off "+i.ID, func(g Guests) error { return g.PowerOff(i.ID, orderly) })
}

// finishLater ends the transition of an instance in the background.
func (r *Rack) finishLater(i *instance, state string) {
	id, transition := i.ID, i.transition // copies: the record may only be read with mu held
	r.runAfter(r.settings.Load().stateTime(), func() { r.finish(id, transition, state) })
}

// finish ends a start, stop or reboot. The guest is on before the instance shows running, and off before it shows
// stopped. If the guest cannot be started, the instance fails.
func (r *Rack) finish(id string, transition int, state string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var i *instance
	release, err := r.lock(func() ([]string, error) {
		if i = r.instances[id]; i == nil || i.transition != transition {
			return nil, errNothingToDo
		}
		return []string{id}, nil
	})
	if err != nil {
		return
	}
	defer release()
	err = nil
	if state == runStopped || i.RunState == runRebooting {
		err = r.powerOff(i, false)
	}
	if state == runRunning {
		if on := r.powerOn(i); on != nil {
			err, state = errors.Join(err, on), runFailed
		}
	}
	if err = errors.Join(err, r.setState(i, state)); err != nil {
		r.log.Error("cannot change the state of an instance", "instance", id, "state", state, "error", err)
	}
}

func projectInstances(p *project) *collection[*instance] { return &p.instances }

func (r *Rack) lookupInstance(who caller, t target, want access) (*instance, error) {
	return lookup(
		r,
		kindInstance,
		t,
		r.instances,
		projectInstances,
		func(i *instance) *project { return i.project },
		who,
		want,
	)
}

// lockInstance looks an instance up and locks it.
func (r *Rack) lockInstance(who caller, t target) (i *instance, release func(), err error) {
	release, err = r.lock(func() (ids []string, err error) {
		if i, err = r.lookupInstance(who, t, accessModify); err != nil {
			return nil, err
		}
		return []string{i.ID}, nil
	})
	return i, release, err
}

func parseInstanceList(r *Rack, q *request) (action, error) {
	return parseList(r, q, projectInstances, (*instance).view)
}

func parseInstanceView(r *Rack, q *request) (action, error) {
	return parseView(r, q, r.lookupInstance, (*instance).view)
}

func parseInstanceDiskList(r *Rack, q *request) (action, error) {
	sel, err := parseSelector(q.segment)
	if err != nil {
		return nil, badRequest("bad parameter in URL path: %v", err)
	}
	sc, err := q.parseScan(sortsByNameOrID, false)
	if err != nil {
		return nil, err
	}
	return func(who caller) (answer, error) {
		r.mu.Lock()
		defer r.mu.Unlock()
		i, err := r.lookupInstance(who, target{sel: sel, project: sc.project}, accessRead)
		if err != nil {
			return answer{}, err
		}
		var attached collection[*disk]
		for _, d := range i.disks {
			if d.State != diskCreating {
				attached.put(d)
			}
		}
		return answer{200, makePage(attached.next(sc), sc, (*disk).view)}, nil
	}, nil
}

// parseChange reads a request to start, stop or reboot.
func parseChange(r *Rack, q *request, do func(*instance) error) (action, error) {
	t, err := q.target()
	if err != nil {
		return nil, err
	}
	return func(who caller) (answer, error) {
		r.mu.Lock()
		defer r.mu.Unlock()
		i, release, err := r.lockInstance(who, t)
		if err != nil {
			return answer{}, err
		}
		defer release()
		if err := do(i); err != nil {
			return answer{}, err
		}
		return answer{202, i.view()}, nil
	}, nil
}

func parseInstanceStart(r *Rack, q *request) (action, error)  { return parseChange(r, q, r.start) }
func parseInstanceStop(r *Rack, q *request) (action, error)   { return parseChange(r, q, r.stop) }
func parseInstanceReboot(r *Rack, q *request) (action, error) { return parseChange(r, q, r.reboot) }

// start implements the start column of the table in docs/reference/rack.md §5.
func (r *Rack) start(i *instance) error {
	switch i.RunState {
	case runStopped, runFailed:
	case runCreating:
		return fail(409, codeConflict, "instance is in state %s but it must be stopped to be started", i.RunState)
	case runStopping:
		return fail(409, codeConflict, "instance must finish stopping before it can be started")
	default:
		return nil
	}
	set := r.settings.Load()
	if set.StartRefusal != "" {
		return r.refuseStart(i, set)
	}
	if cpus, _ := r.running(); set.CPUQuota > 0 && cpus+int64(i.NCPUs) > set.CPUQuota {
		return fail(507, codeCapacity, messageCPUQuota)
	}
	if err := r.placeLocalDisks(i, set); err != nil {
		return err
	}
	return r.startTransition(i, runStarting, runRunning)
}

// placeLocalDisks reserves physical space for local disks that have none. They get it at the first start of their
// instance.
func (r *Rack) placeLocalDisks(i *instance, set *settings) error {
	var unplaced []*disk
	needed := int64(0)
	for _, d := range i.disks {
		if !d.Placed {
			unplaced = append(unplaced, d)
			needed += d.SizeBytes
		}
	}
	if len(unplaced) == 0 {
		return nil
	}
	if set.SpaceBytes > 0 && needed > set.SpaceBytes-r.usedSpace {
		return fail(507, codeCapacity, messageNoPlaceToBoot)
	}
	return r.changeDisks(unplaced, func(d *disk) { d.Placed = true })
}

// startTransition shows the intermediate state, and continues to the final state in the background.
func (r *Rack) startTransition(i *instance, during, final string) error {
	if err := r.setState(i, during); err != nil {
		return err
	}
	r.finishLater(i, final)
	return nil
}

// stop implements the stop column of the table in docs/reference/rack.md §5. Where a sled decides, this rack stops the
// instance.
func (r *Rack) stop(i *instance) error {
	switch i.RunState {
	case runCreating:
		return invalidRequest("cannot change instance state while it is still being created")
	case runStopping, runStopped:
		return nil
	case runFailed:
		return r.setState(i, runStopped)
	}
	return r.startTransition(i, runStopping, runStopped)
}

// reboot implements the reboot column of the table in docs/reference/rack.md §5. Where a sled decides, this rack
// changes nothing.
func (r *Rack) reboot(i *instance) error {
	switch i.RunState {
	case runCreating:
		return invalidRequest("cannot change instance state while it is still being created")
	case runStopped:
		return invalidRequest("cannot reboot an instance in state stopped with no VMM")
	case runStopping, runFailed:
		return invalidRequest("instance state cannot be changed from %s", i.RunState)
	case runRunning:
		return r.startTransition(i, runRebooting, runRunning)
	}
	return nil
}

func parseInstanceDelete(r *Rack, q *request) (action, error) {
	t, err := q.target()
	if err != nil {
		return nil, err
	}
	return func(who caller) (answer, error) { return answer{status: 204}, r.deleteInstance(who, t) }, nil
}

// deleteInstance deletes an instance. All its disks remain, detached, including the boot disk.
func (r *Rack) deleteInstance(who caller, t target) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	i, release, err := r.lockInstance(who, t)
	if err != nil {
		return err
	}
	defer release()
	switch {
	case i.RunState == runCreating:
		return invalidRequest(`instance cannot be deleted in state "creating"`)
	case i.hasVMM():
		return invalidRequest("cannot delete instance: instance is running or has not yet fully stopped")
	}
	if err := r.deleteGuest(i); err != nil {
		return err
	}
	if err := r.changeDisks(slices.Clone(i.disks), (*disk).detach, deleteRecord(bucketInstances, i.ID)); err != nil {
		return err
	}
	delete(r.instances, i.ID)
	i.project.instances.remove(i)
	return nil
}

// parseInstanceUpdate reads a request that replaces the mutable fields of an instance. Every field is required.
func parseInstanceUpdate(r *Rack, q *request) (action, error) {
	t, err := q.target()
	if err != nil {
		return nil, err
	}
	body, err := readBody(q.http)
	if err != nil {
		return nil, err
	}
	boot, err := body.required("boot_disk")
	if err != nil {
		return nil, err
	}
	u := instanceUpdate{}
	if !isNull(boot) {
		sel, err := body.selector("boot_disk")
		if err != nil {
			return nil, err
		}
		u.boot = &sel
	}
	for _, key := range []string{"auto_restart_policy", "cpu_platform", "enable_jumbo_frames"} {
		if _, err := body.required(key); err != nil {
			return nil, err
		}
	}
	if u.autoRestart, err = parseAutoRestart(body); err != nil {
		return nil, err
	}
	if u.ncpus, u.memory, err = parseResources(body); err != nil {
		return nil, err
	}
	return func(who caller) (answer, error) { return r.updateInstance(who, t, u) }, nil
}

type instanceUpdate struct {
	boot        *selector
	autoRestart string
	ncpus       int
	memory      int64
}

func (r *Rack) updateInstance(who caller, t target, u instanceUpdate) (answer, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	i, release, err := r.lockInstance(who, t)
	if err != nil {
		return answer{}, err
	}
	defer release()
	bootID := ""
	if u.boot != nil {
		at := target{sel: *u.boot}
		if u.boot.name != "" {
			at.project = &selector{id: i.ProjectID}
		}
		d, err := r.lookupDisk(who, at, accessModify)
		if err != nil {
			return answer{}, err
		}
		if bootID = d.ID; d.InstanceID != i.ID {
			return answer{}, fail(409, codeConflict, "boot disk must be attached")
		}
	}
	if bootID != i.BootDiskID && i.hasVMM() {
		return answer{}, fail(409, codeConflict, "instance must be stopped to set boot disk")
	}
	err = r.changeInstance(i, func(i *instance) {
		i.BootDiskID, i.AutoRestart, i.NCPUs, i.MemoryBytes, i.Modified = bootID, u.autoRestart, u.ncpus, u.memory, now()
	})
	return answer{200, i.view()}, err
}

// instanceSpec is a request for an instance.
type instanceSpec struct {
	name, hostname, description string
	autoRestart                 string
	ncpus                       int
	memory                      int64
	start                       bool
	// disks to create or attach; a boot disk comes first.
	disks []diskEntry
	boots bool
}

func parseAutoRestart(f fields) (string, error) {
	if isNull(f.values["auto_restart_policy"]) {
		return "", nil
	}
	return f.oneOf("auto_restart_policy", restartNever, restartBestEffort)
}

func parseResources(f fields) (ncpus int, memory int64, err error) {
	n, err := f.unsigned("ncpus", "u16", math.MaxUint16)
	if err != nil {
		return 0, 0, err
	}
	memory, err = f.byteCount("memory")
	return int(n), memory, err
}

func parseInstanceSpec(f fields) (spec instanceSpec, err error) {
	if spec.name, err = f.name("name"); err != nil {
		return spec, err
	}
	if spec.description, err = f.text("description"); err != nil {
		return spec, err
	}
	if spec.hostname, err = f.text("hostname"); err != nil {
		return spec, err
	}
	if spec.ncpus, spec.memory, err = parseResources(f); err != nil {
		return spec, err
	}
	if spec.autoRestart, err = parseAutoRestart(f); err != nil {
		return spec, err
	}
	if spec.start, err = f.flag("start", true); err != nil {
		return spec, err
	}
	if raw := f.values["boot_disk"]; !isNull(raw) {
		boot, err := parseDiskEntry(raw, "boot_disk")
		if err != nil {
			return spec, err
		}
		spec.disks, spec.boots = append(spec.disks, boot), true
	}
	return spec, spec.parseDisks(f)
}

func (spec *instanceSpec) parseDisks(f fields) error {
	raw, has := f.values["disks"]
	if !has {
		return nil
	}
	var entries []json.RawMessage
	if raw[0] != '[' || json.Unmarshal(raw, &entries) != nil {
		return bodyError("disks", fmt.Errorf("invalid type: %s, expected a sequence", describeJSON(raw)))
	}
	for n, entry := range entries {
		parsed, err := parseDiskEntry(entry, fmt.Sprintf("disks[%d]", n))
		if err != nil {
			return err
		}
		spec.disks = append(spec.disks, parsed)
	}
	return nil
}

func parseInstanceCreate(r *Rack, q *request) (action, error) {
	project, err := q.needProject()
	if err != nil {
		return nil, err
	}
	body, err := readBody(q.http)
	if err != nil {
		return nil, err
	}
	spec, err := parseInstanceSpec(body)
	if err != nil {
		return nil, err
	}
	return func(who caller) (answer, error) { return r.createInstance(who, project, spec) }, nil
}

// createInstance creates an instance. If its start is rejected, the instance exists nevertheless, and is stopped.
func (r *Rack) createInstance(who caller, project selector, spec instanceSpec) (answer, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p, err := r.lookupProject(who, project, accessModify)
	if err != nil {
		return answer{}, err
	}
	i, release, err := r.makeInstance(p, spec, r.checkDisk)
	if err != nil {
		return answer{}, err
	}
	defer release()
	if !spec.start {
		return answer{201, i.view()}, nil
	}
	if err := r.start(i); err != nil {
		r.log.Info("new instance does not start", "instance", i.ID, "why", err)
	}
	view := i.view()
	view.RunState = runStarting
	return answer{201, view}, nil
}

// addInstance creates an instance with a boot disk, running or stopped at once, ignoring quotas. [Options] and the
// control endpoint use it.
func (r *Rack) addInstance(p *project, name, state string) (*instance, error) {
	boot := diskSpec{
		name: name + "-boot", description: "boot disk of " + name, sizeBytes: gib,
		diskType: typeDistributed, source: sourceBlank, blockSize: 512,
	}
	spec := instanceSpec{
		name: name, hostname: name, description: "simulated", autoRestart: restartNever, ncpus: 1, memory: gib,
		disks: []diskEntry{{create: &boot}}, boots: true,
	}
	i, release, err := r.makeInstance(p, spec, func(p *project, spec diskSpec, _ pending) (diskSpec, error) {
		if _, taken := p.disks.named(spec.name); taken {
			return spec, alreadyExists("disk", spec.name)
		}
		return spec, checkName(spec.name)
	})
	if err != nil {
		return nil, err
	}
	defer release()
	if state == runRunning {
		if err := r.powerOn(i); err != nil {
			return nil, err
		}
	}
	return i, r.setState(i, state)
}

// makeInstance creates a stopped instance with its disks, and returns with the instance locked. While its guest is
// created the instance shows creating. After a failure nothing of it remains.
func (r *Rack) makeInstance(p *project, spec instanceSpec, checkDisk diskCheck) (*instance, func(), error) {
	var plan []*disk
	i := spec.instance(p)
	r.lastNumber++
	i.Number = r.lastNumber
	release, err := r.lock(func() (ids []string, err error) {
		if plan, err = r.planDisks(p, spec, checkDisk); err != nil {
			return nil, err
		}
		ids = []string{i.ID}
		for _, d := range plan {
			ids = append(ids, d.ID)
			if source := d.SnapshotID; source != "" && !slices.Contains(ids, source) {
				ids = append(ids, source)
			}
		}
		return ids, nil
	})
	if err != nil {
		return nil, nil, err
	}
	if spec.boots {
		i.BootDiskID = plan[0].ID
	}
	if err := r.build(i, plan); err != nil {
		release()
		return nil, nil, err
	}
	return i, release, nil
}

func (spec instanceSpec) instance(p *project) *instance {
	t := now()
	return &instance{
		ID: uuid.NewString(), Name: spec.name, Description: spec.description, ProjectID: p.ID, Hostname: spec.hostname,
		NCPUs: spec.ncpus, MemoryBytes: spec.memory, RunState: runCreating, AutoRestart: spec.autoRestart,
		Created: t, Modified: t, StateUpdated: t, project: p,
	}
}

// planDisks checks the disks in the request for an instance. It returns them in the order of their slots: new records
// for disks to create, existing records for disks to attach.
func (r *Rack) planDisks(p *project, spec instanceSpec, checkDisk diskCheck) ([]*disk, error) {
	if most := r.settings.Load().MaxDisks; len(spec.disks) > most {
		return nil, invalidRequest("cannot attach more than %d disks to instance", most)
	}
	if _, taken := p.instances.named(spec.name); taken {
		return nil, alreadyExists("instance", spec.name)
	}
	if err := checkDescription(spec.description); err != nil {
		return nil, err
	}
	var plan []*disk
	before := pending{names: map[string]bool{}}
	for _, entry := range spec.disks {
		if entry.create != nil {
			spec, err := checkDisk(p, *entry.create, before)
			if err != nil {
				return nil, err
			}
			d := spec.disk(p)
			before.names[d.Name] = true
			before.bytes += d.SizeBytes
			if d.Placed {
				before.space += d.SizeBytes
			}
			plan = append(plan, d)
			continue
		}
		d, has := p.disks.named(entry.attach)
		switch {
		case !has:
			return nil, selector{name: entry.attach}.notFound("disk")
		case d.State == diskAttached:
			return nil, invalidRequest(`cannot attach disk "%s": disk is attached to another instance`, d.Name)
		case d.State != diskDetached && d.State != diskCreating:
			return nil, invalidRequest(`cannot attach disk "%s": invalid state %s`, d.Name, d.State)
		case slices.Contains(plan, d):
			continue // a disk may be named twice
		}
		plan = append(plan, d)
	}
	return plan, nil
}

// build creates the records and the guest of an instance. The caller has locked the instance and its disks.
func (r *Rack) build(i *instance, plan []*disk) (err error) {
	if err := r.store.write(putRecord(bucketInstances, i.ID, i)); err != nil {
		return err
	}
	r.insertInstance(i.project, i)
	var made []*disk
	defer func() {
		if err != nil {
			err = errors.Join(err, r.undoBuild(i, made))
		}
	}()
	for _, d := range plan {
		if r.disks[d.ID] != nil {
			continue
		}
		d.State = diskCreating // until the whole instance exists
		if err := r.makeDisk(d); err != nil {
			return err
		}
		made = append(made, d)
	}
	if err := r.createGuest(i); err != nil {
		return err
	}
	slot := 0
	next := *i
	next.setState(runStopped)
	err = r.changeDisks(plan, func(d *disk) {
		d.State, d.InstanceID, d.Slot = diskAttached, i.ID, slot
		slot++
	}, putRecord(bucketInstances, i.ID, &next))
	if err != nil {
		return err
	}
	next.disks = i.disks // changeDisks has added them to i
	*i = next
	return nil
}

// undoBuild reverts build.
func (r *Rack) undoBuild(i *instance, made []*disk) error {
	errs := []error{r.deleteGuest(i)}
	for _, d := range made {
		errs = append(errs,
			r.callGuests("delete disk "+d.ID, func(g Guests) error { return g.DeleteDisk(d.ID) }), r.removeDisk(d))
	}
	return errors.Join(append(errs, r.removeInstance(i))...)
}
