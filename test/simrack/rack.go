// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
)

const (
	gib = int64(1) << 30
	// slots is how many disks the virtual machine has PCI addresses for (docs/reference/rack.md §4).
	slots = 12
	// unlimited is what utilization shows as capacity where no quota is set; a real silo always has one.
	unlimited = int64(1) << 60
	// unlimitedCPUs is the same for virtual CPUs.
	unlimitedCPUs = int64(1) << 20

	tokenPrefix       = "oxide-token-"
	defaultAPIVersion = "2026060800.0.0"
)

// Options say what a rack is like. The zero value is a rack with the project "demo", no instances, no limits, no delays and
// no guests, kept in memory.
type Options struct {
	// Token is the API token of a project collaborator. It must begin "oxide-token-"; empty means "oxide-token-demo".
	Token string
	// Project is the name of the project there is; empty means "demo".
	Project string
	// Instances are names of instances to have in the project. Those that a StateDir does not know already are made,
	// running, with a boot disk "<name>-boot" of 1 GiB in slot 0, whatever the quota.
	Instances []string
	// MaxDisks is how many disks an instance takes, boot disk included: 1 to 12, 0 means 12.
	MaxDisks int
	// QuotaBytes is the silo's storage quota, SpaceBytes the physical space of the rack, CPUQuota the number of virtual
	// CPUs that may run at once. 0 means unlimited.
	QuotaBytes int64
	SpaceBytes int64
	CPUQuota   int
	// Latency is added to every call of the API, StateTime is how long an instance takes to start, stop or reboot.
	Latency   time.Duration
	StateTime time.Duration
	// Hotplug lets disks come and go while an instance runs, which racks refuse today. With HotplugAsync as well, a disk
	// shows attaching or detaching for the latency first.
	Hotplug      bool
	HotplugAsync bool
	// APIVersionMax is the newest API version that is served; empty means 2026060800.0.0.
	APIVersionMax string
	// Guests are the machines inside the instances; nil means there are none.
	Guests Guests
	// GuestsOff says to whoever reads the settings why there are no guests.
	GuestsOff string
	// StateDir is a folder for the rack's records, made when missing; the same folder goes on where a process died. Empty
	// means memory only.
	StateDir string
	// Log is for what happens inside; nil means nowhere.
	Log *slog.Logger
}

// Rack is a simulated rack. Its handlers and methods are safe for concurrent use.
type Rack struct {
	log      *slog.Logger
	guests   Guests
	settings atomic.Pointer[settings]
	faults   faults
	calls    calls
	// guestsOff says why there are no guests, empty when there are.
	guestsOff string
	// project is the ID of the project of [Options]; the control endpoint looks there when it is told no other.
	project string

	closing    sync.Once
	closed     chan struct{}
	background sync.WaitGroup

	mu          sync.Mutex
	store       *store
	identity    identity
	tokens      map[string]*token
	projects    shelf[*project]
	disks       map[string]*disk
	instances   map[string]*instance
	snapshots   map[string]*snapshot
	groups      map[string]*group
	usedBytes   int64 // what counts against the quota
	usedSpace   int64 // what is really taken
	guestErrors []string
	// busy holds the IDs of the instances, disks and snapshots that somebody works on without holding mu; free tells of changes.
	busy map[string]bool
	free *sync.Cond
	// snapshotting holds the IDs of disks that a snapshot is being made of.
	snapshotting map[string]bool
}

// identity is what a rack is made with and keeps for ever.
type identity struct {
	RackID  string    `json:"rack_id"`
	SiloID  string    `json:"silo_id"`
	Created time.Time `json:"created"`
}

// project holds disks, instances, snapshots and anti-affinity groups.
type project struct {
	ID          string    `json:"id"`
	Name        string    `json:"name"`
	Description string    `json:"description"`
	Created     time.Time `json:"created"`

	disks     shelf[*disk]
	instances shelf[*instance]
	snapshots shelf[*snapshot]
	groups    shelf[*group]
}

func (p *project) key() (name, id string) { return p.Name, p.ID }

// settings are the options that the control endpoint can change at any time.
type settings struct {
	Hotplug       bool
	HotplugAsync  bool
	MaxDisks      int
	LatencyMS     float64
	StateMS       float64
	QuotaBytes    int64
	CPUQuota      int64
	SpaceBytes    int64
	apiVersionMax apiVersion
}

func milliseconds(ms float64) time.Duration { return time.Duration(ms * float64(time.Millisecond)) }

func (s *settings) latency() time.Duration   { return milliseconds(s.LatencyMS) }
func (s *settings) stateTime() time.Duration { return milliseconds(s.StateMS) }

// New makes a rack, or goes on with the one in the state folder: then its guests are powered on again where instances were
// running. It fails on options that cannot be, on a state folder that another process has open, and when guests fail.
func New(o Options) (*Rack, error) {
	set, err := o.settings()
	if err != nil {
		return nil, err
	}
	r := &Rack{
		log: o.Log, guests: o.Guests,
		closed: make(chan struct{}),
		tokens: map[string]*token{}, disks: map[string]*disk{}, instances: map[string]*instance{},
		snapshots: map[string]*snapshot{}, groups: map[string]*group{},
		busy: map[string]bool{}, snapshotting: map[string]bool{},
	}
	if r.log == nil {
		r.log = slog.New(slog.DiscardHandler)
	}
	r.free = sync.NewCond(&r.mu)
	r.settings.Store(set)
	if r.guests == nil {
		r.guestsOff = cmp.Or(o.GuestsOff, "no folder for guests was given")
	}
	if err := r.begin(o); err != nil {
		return nil, errors.Join(err, r.Close())
	}
	return r, nil
}

func (o *Options) settings() (*settings, error) {
	o.Token = cmp.Or(o.Token, tokenPrefix+"demo")
	o.Project = cmp.Or(o.Project, "demo")
	o.APIVersionMax = cmp.Or(o.APIVersionMax, defaultAPIVersion)
	if !strings.HasPrefix(o.Token, tokenPrefix) {
		return nil, fmt.Errorf("token must begin with %q", tokenPrefix)
	}
	for _, name := range append([]string{o.Project}, o.Instances...) {
		if err := checkName(name); err != nil {
			return nil, fmt.Errorf("name %q: %w", name, err)
		}
	}
	version, err := parseVersion(o.APIVersionMax)
	if err != nil {
		return nil, fmt.Errorf("newest API version %q: %w", o.APIVersionMax, err)
	}
	s := &settings{
		Hotplug: o.Hotplug, HotplugAsync: o.HotplugAsync, MaxDisks: o.MaxDisks,
		LatencyMS:  float64(o.Latency) / float64(time.Millisecond),
		StateMS:    float64(o.StateTime) / float64(time.Millisecond),
		QuotaBytes: o.QuotaBytes, CPUQuota: int64(o.CPUQuota), SpaceBytes: o.SpaceBytes,
		apiVersionMax: version,
	}
	return s, s.check()
}

// check refuses settings that cannot be, and puts the default where zero stands for it.
func (s *settings) check() error {
	if s.MaxDisks == 0 {
		s.MaxDisks = slots
	}
	if s.MaxDisks < 1 || s.MaxDisks > slots {
		return fmt.Errorf("max_disks is %d: a virtual machine has slots for 1 to %d disks", s.MaxDisks, slots)
	}
	if s.LatencyMS < 0 || s.StateMS < 0 || s.QuotaBytes < 0 || s.CPUQuota < 0 || s.SpaceBytes < 0 {
		return errors.New("latency_ms, state_ms, quota_bytes, cpu_quota and space_bytes cannot be negative")
	}
	return nil
}

// begin loads the records and makes what is missing.
func (r *Rack) begin(o Options) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	var err error
	if r.store, err = openStore(o.StateDir); err != nil {
		return err
	}
	if err := r.load(); err != nil {
		return err
	}
	if err := r.addToken(o.Token, roleCollaborator); err != nil {
		return err
	}
	p, err := r.ensureProject(o.Project)
	if err != nil {
		return err
	}
	r.project = p.ID
	if err := r.resume(); err != nil {
		return err
	}
	for _, name := range o.Instances {
		if _, has := p.instances.named(name); has {
			continue
		}
		if _, err := r.addMachine(p, name, runRunning); err != nil {
			return fmt.Errorf("instance %q: %w", name, err)
		}
	}
	return nil
}

// ensureProject returns the project of that name, making it when there is none.
func (r *Rack) ensureProject(name string) (*project, error) {
	if p, has := r.projects.named(name); has {
		return p, nil
	}
	p := &project{ID: uuid.NewString(), Name: name, Created: now()}
	if err := r.store.write(put(inProjects, p.ID, p)); err != nil {
		return nil, err
	}
	r.projects.put(p)
	return p, nil
}

// Close stops the rack once what runs in the background has come to rest. Guests are powered off in order and removed; the
// bytes of the disks are too, unless there is a state folder. The rack's handlers must not be in use any more. It reports
// what the guests could not let go of.
func (r *Rack) Close() error {
	r.closing.Do(func() {
		r.mu.Lock() // nobody who has it begins anything afterwards
		defer r.mu.Unlock()
		close(r.closed)
	})
	r.background.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	var errs []error
	for _, i := range r.instances {
		if i.powered { // all of them at once, not each when the one before is off
			errs = append(errs, r.onGuests("halt "+i.ID, func(g Guests) error { _, err := g.Halt(i.ID); return err }))
		}
	}
	for _, i := range r.instances {
		errs = append(errs, r.powerOff(i, true), r.dropGuest(i))
	}
	if r.guests != nil && r.store == nil {
		for id := range r.disks {
			errs = append(errs, r.guests.DeleteDisk(id))
		}
		for id := range r.snapshots {
			errs = append(errs, r.guests.DeleteSnapshot(id))
		}
	}
	return errors.Join(append(errs, r.store.close())...)
}

// InstanceInfo is what somebody needs to act as the machine inside an instance.
type InstanceInfo struct {
	ID   string
	Name string
	// Dir is the guest's folder, empty when guests are off.
	Dir string
}

// Instances lists the instances of the project of [Options], by name.
func (r *Rack) Instances() []InstanceInfo {
	list := r.listInstances()
	for n := range list {
		list[n].Dir = r.guestDir(list[n].ID)
	}
	return list
}

func (r *Rack) listInstances() (list []InstanceInfo) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p, has := r.projects.withID(r.project); has {
		for i := range p.instances.inOrderOfNames() {
			list = append(list, InstanceInfo{ID: i.ID, Name: i.Name})
		}
	}
	return list
}

func (r *Rack) isClosed() bool {
	select {
	case <-r.closed:
		return true
	default:
		return false
	}
}

func (r *Rack) guestDir(instanceID string) string {
	if r.guests == nil {
		return ""
	}
	return r.guests.Dir(instanceID)
}

func now() time.Time { return time.Now().UTC().Truncate(time.Microsecond) }

// hold runs find until nobody works on what it found, and claims that: until release is called, nobody else holds any of
// it. The caller has mu, which hold gives up while it waits; hence find looks everything up anew each time.
func (r *Rack) hold(find func() ([]string, error)) (release func(), err error) {
	for {
		ids, err := find()
		if err != nil {
			return nil, err
		}
		if !slices.ContainsFunc(ids, func(id string) bool { return r.busy[id] }) {
			for _, id := range ids {
				r.busy[id] = true
			}
			return func() { r.letGo(ids) }, nil
		}
		r.free.Wait()
	}
}

func (r *Rack) letGo(ids []string) {
	for _, id := range ids {
		delete(r.busy, id)
	}
	r.free.Broadcast()
}

// onGuests calls the guests, without mu: the caller holds what the call concerns. An error is the simulator's fault and is
// kept for the control endpoint.
func (r *Rack) onGuests(what string, call func(Guests) error) error {
	if r.guests == nil {
		return nil
	}
	err := func() error {
		r.mu.Unlock()
		defer r.mu.Lock()
		return call(r.guests)
	}()
	if err == nil {
		return nil
	}
	err = fmt.Errorf("%s: %w", what, err)
	r.guestErrors = append(r.guestErrors, err.Error())
	r.log.Error("guests failed", "error", err)
	return err
}

// later does something in the background after a time, unless the rack is closed before.
func (r *Rack) later(after time.Duration, do func()) {
	r.background.Go(func() {
		if r.pause(after) {
			do()
		}
	})
}

// findProject looks a project up without asking who wants to know.
func (r *Rack) findProject(sel selector) (*project, error) {
	if sel.id != "" {
		if p, has := r.projects.withID(sel.id); has {
			return p, nil
		}
	} else if p, has := r.projects.named(sel.name); has {
		return p, nil
	}
	return nil, sel.missing("project")
}

// lookupProject looks a project up for somebody who wants to do something in it.
func (r *Rack) lookupProject(who caller, sel selector, want access) (*project, error) {
	p, err := r.findProject(sel)
	if err != nil {
		return nil, err
	}
	return p, who.may(want, sel.missing("project"))
}

func parsePing(*Rack, *request) (action, error) {
	return func(caller) (answer, error) { return answer{200, pingView{Status: "ok"}}, nil }, nil
}

func parseMe(r *Rack, _ *request) (action, error) {
	return func(who caller) (answer, error) {
		r.mu.Lock()
		defer r.mu.Unlock()
		return answer{200, userView{
			ID: who.userID, DisplayName: who.role, SiloID: r.identity.SiloID, SiloName: "sim", FleetViewer: who.fleet,
			TimeCreated: r.identity.Created, TimeModified: r.identity.Created,
		}}, nil
	}, nil
}

func parseProjectList(r *Rack, q *request) (action, error) {
	sc, err := q.parseScan(sortsByNameOrID, false)
	if err != nil {
		return nil, err
	}
	sc.project = nil
	return func(who caller) (answer, error) {
		r.mu.Lock()
		defer r.mu.Unlock()
		// Listing the projects takes a role on the silo; who may read all of them stands for that here.
		if who.may(accessRead, errForbidden) != nil {
			return answer{}, errForbidden
		}
		return answer{200, makePage(r.projects.next(sc), sc, (*project).view)}, nil
	}, nil
}

// parseProjectCreate refuses: making projects takes a role on the silo that no token of the simulated rack has.
func parseProjectCreate(_ *Rack, q *request) (action, error) {
	body, err := readBody(q.http)
	if err != nil {
		return nil, err
	}
	if _, err := body.name("name"); err != nil {
		return nil, err
	}
	if _, err := body.text("description"); err != nil {
		return nil, err
	}
	return func(caller) (answer, error) { return answer{}, errForbidden }, nil
}

func parseProjectView(r *Rack, q *request) (action, error) {
	sel, err := parseSelector(q.segment)
	if err != nil {
		return nil, badRequest("bad parameter in URL path: %v", err)
	}
	return func(who caller) (answer, error) {
		r.mu.Lock()
		defer r.mu.Unlock()
		p, err := r.lookupProject(who, sel, accessRead)
		if err != nil {
			return answer{}, err
		}
		return answer{200, p.view()}, nil
	}, nil
}

func parseUtilization(r *Rack, _ *request) (action, error) {
	return func(caller) (answer, error) {
		r.mu.Lock()
		defer r.mu.Unlock()
		set := r.settings.Load()
		cpus, memory := r.running()
		return answer{200, utilizationView{
			Provisioned: resourcesView{CPUs: cpus, Memory: memory, Storage: r.usedBytes},
			Capacity: resourcesView{
				CPUs: cmp.Or(set.CPUQuota, unlimitedCPUs), Memory: unlimited, Storage: cmp.Or(set.QuotaBytes, unlimited),
			},
		}}, nil
	}, nil
}

func parseRackList(r *Rack, q *request) (action, error) {
	sc, err := q.parseScan(sortsByID, false)
	if err != nil {
		return nil, err
	}
	sc.project = nil
	return func(who caller) (answer, error) {
		if !who.fleet {
			return answer{}, errForbidden
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		var racks shelf[*identity]
		racks.put(&r.identity)
		return answer{200, makePage(racks.next(sc), sc, (*identity).view)}, nil
	}, nil
}

func (i *identity) key() (name, id string) { return "", i.RackID }

func (i *identity) view() rackView {
	return rackView{ID: i.RackID, TimeCreated: i.Created, TimeModified: i.Created}
}
