// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
)

const (
	gib = int64(1) << 30
	// slots is the number of disks for which the virtual machine has PCI addresses (docs/reference/rack.md §4).
	slots = 12
	// unlimited is the storage capacity that utilization shows without a quota. A real silo always has a quota.
	unlimited = int64(1) << 60
	// unlimitedCPUs is the same for virtual CPUs.
	unlimitedCPUs = int64(1) << 20

	tokenPrefix       = "oxide-token-"
	defaultAPIVersion = "2026060800.0.0"
)

// Options configure a rack. The zero value is a rack in memory with the project "demo": no instances, limits, delays or
// guests.
type Options struct {
	// Token is the API token of a project collaborator. It must begin "oxide-token-"; empty means "oxide-token-demo".
	Token string
	// Project is the name of the rack's project; empty means "demo".
	Project string
	// Instances are the names of instances that the project must have. An instance that StateDir does not hold yet is
	// created, running, with a boot disk "<name>-boot" of 1 GiB in slot 0. Quotas do not apply to it.
	Instances []string
	// MaxDisks is the number of disks that an instance takes, including the boot disk: 1 to 12; 0 means 12.
	MaxDisks int
	// QuotaBytes is the silo's storage quota, SpaceBytes the physical space of the rack, and CPUQuota the number of
	// virtual CPUs that may run at the same time. 0 means unlimited.
	QuotaBytes int64
	SpaceBytes int64
	CPUQuota   int
	// Latency is added to every API call. With a LatencyMax each call takes a random time from Latency to LatencyMax; 0
	// means that all take Latency. StateTime is the time that an instance takes to start, stop or reboot.
	Latency    time.Duration
	LatencyMax time.Duration
	StateTime  time.Duration
	// Hotplug allows attach and detach while an instance runs, which real racks reject today. With HotplugAsync too, the
	// disk first shows attaching or detaching for the duration of Latency.
	Hotplug      bool
	HotplugAsync bool
	// AttachFirst is hot-plug as it was prototyped in 2026, instead of Hotplug: a disk shows attached before the guest has
	// it. [World] says more.
	AttachFirst bool
	World
	// APIVersionMax is the newest API version that the rack serves; empty means 2026060800.0.0.
	APIVersionMax string
	// Guests simulate the machines inside the instances; nil means no guests.
	Guests Guests
	// GuestsOff is the reason for having no guests, shown in the settings of the control endpoint.
	GuestsOff string
	// StateDir is a folder for the rack's records. It is created if missing. A rack that is started on the folder of a
	// dead process continues with the records there. Empty means memory only.
	StateDir string
	// Log receives internal events; nil discards them.
	Log *slog.Logger
}

// Rack is a simulated rack. Its handlers and methods are safe for concurrent use.
type Rack struct {
	log      *slog.Logger
	guests   Guests
	settings atomic.Pointer[settings]
	faults   faults
	calls    calls
	shown    shown
	// guestsOff is the reason for having no guests; empty with guests.
	guestsOff string
	// project is the ID of the project of [Options], the default project of the control endpoint.
	project string

	closing    sync.Once
	closed     chan struct{}
	background sync.WaitGroup

	mu          sync.Mutex
	store       *store
	identity    identity
	tokens      map[string]*token
	projects    collection[*project]
	disks       map[string]*disk
	instances   map[string]*instance
	snapshots   map[string]*snapshot
	groups      map[string]*group
	usedBytes   int64 // counted against the quota
	usedSpace   int64 // physical space in use
	lastNumber  int   // of the newest instance
	guestErrors []string
	// locked holds the IDs of the instances, disks and snapshots that an operation works on without holding mu. unlocked
	// is signalled on every change.
	locked   map[string]bool
	unlocked *sync.Cond
	// starters maps the ID of an instance to the interval of somebody who starts it.
	starters map[string]time.Duration
	// snapshotting holds the IDs of disks with a snapshot in progress.
	snapshotting map[string]bool
}

// identity is created once per rack and never changes.
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

	disks     collection[*disk]
	instances collection[*instance]
	snapshots collection[*snapshot]
	groups    collection[*group]
}

func (p *project) key() (name, id string) { return p.Name, p.ID }

// settings are the options that the control endpoint can change at any time.
type settings struct {
	World
	Unplug        bool        `json:"unplug"`
	Hotplug       hotplugMode `json:"hotplug"`
	HotplugAsync  bool        `json:"hotplug_async"`
	MaxDisks      int         `json:"max_disks"`
	LatencyMS     float64     `json:"latency_ms"`
	LatencyMaxMS  float64     `json:"latency_max_ms"`
	StateMS       float64     `json:"state_ms"`
	QuotaBytes    int64       `json:"quota_bytes"`
	CPUQuota      int64       `json:"cpu_quota"`
	SpaceBytes    int64       `json:"space_bytes"`
	APIVersionMax string      `json:"api_version_max"`

	apiVersionMax apiVersion
}

func milliseconds(ms float64) time.Duration { return time.Duration(ms * float64(time.Millisecond)) }

func (s *settings) latency() time.Duration   { return milliseconds(s.LatencyMS) }
func (s *settings) stateTime() time.Duration { return milliseconds(s.StateMS) }

// callTime is the latency of one call.
func (s *settings) callTime() time.Duration {
	return s.latency() + milliseconds(rand.Float64()*max(0, s.LatencyMaxMS-s.LatencyMS))
}

// New creates a rack, or continues with the records in the state folder. It then powers on the guests of instances that
// were running. It fails on invalid options, on a state folder that another process has open, and on failures of the
// guests.
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
		locked: map[string]bool{}, snapshotting: map[string]bool{}, starters: map[string]time.Duration{},
	}
	if r.log == nil {
		r.log = slog.New(slog.DiscardHandler)
	}
	r.unlocked = sync.NewCond(&r.mu)
	r.settings.Store(set)
	if r.guests == nil {
		r.guestsOff = cmp.Or(o.GuestsOff, "no folder for guests was given")
	}
	if err := r.initialize(o); err != nil {
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
	s := &settings{
		World:  o.World,
		Unplug: !o.NoUnplug, HotplugAsync: o.HotplugAsync, MaxDisks: o.MaxDisks,
		LatencyMS:    float64(o.Latency) / float64(time.Millisecond),
		LatencyMaxMS: float64(o.LatencyMax) / float64(time.Millisecond),
		StateMS:      float64(o.StateTime) / float64(time.Millisecond),
		QuotaBytes:   o.QuotaBytes, CPUQuota: int64(o.CPUQuota), SpaceBytes: o.SpaceBytes,
		APIVersionMax: o.APIVersionMax,
	}
	switch {
	case o.AttachFirst:
		s.Hotplug = hotplugAttachFirst
	case o.Hotplug:
		s.Hotplug = hotplugOn
	}
	return s, s.check()
}

// check rejects invalid settings, and replaces a zero by the default.
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
	if s.LatencyMaxMS != 0 && s.LatencyMaxMS < s.LatencyMS {
		return fmt.Errorf("latency_max_ms is %v, less than latency_ms, which is %v", s.LatencyMaxMS, s.LatencyMS)
	}
	var err error
	if s.apiVersionMax, err = parseVersion(s.APIVersionMax); err != nil {
		return fmt.Errorf("api_version_max %q: %w", s.APIVersionMax, err)
	}
	return s.World.check()
}

// initialize loads the records and creates what is missing.
func (r *Rack) initialize(o Options) error {
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
		if _, err := r.addInstance(p, name, runRunning); err != nil {
			return fmt.Errorf("instance %q: %w", name, err)
		}
	}
	return nil
}

// ensureProject returns the project with the name. It creates a missing project.
func (r *Rack) ensureProject(name string) (*project, error) {
	if p, has := r.projects.named(name); has {
		return p, nil
	}
	p := &project{ID: uuid.NewString(), Name: name, Created: now()}
	if err := r.store.write(putRecord(bucketProjects, p.ID, p)); err != nil {
		return nil, err
	}
	r.projects.put(p)
	return p, nil
}

// Close stops the rack after its background work has ended. It powers off the guests in order and removes them. Without
// a state folder it also deletes the contents of the disks. The rack's handlers must no longer be in use. The error
// says what the guests could not release.
func (r *Rack) Close() error {
	r.closing.Do(func() {
		r.mu.Lock() // with all records locked, no other operation can begin
		defer r.mu.Unlock()
		close(r.closed)
	})
	r.background.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	var errs []error
	for _, i := range r.instances {
		if i.powered { // all at the same time: powering off takes long
			errs = append(errs, r.callGuests("halt "+i.ID, func(g Guests) error { _, err := g.Halt(i.ID); return err }))
		}
	}
	for _, i := range r.instances {
		errs = append(errs, r.powerOff(i, true), r.deleteGuest(i))
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

// InstanceInfo is what a node plugin needs to run as if inside an instance.
type InstanceInfo struct {
	ID   string
	Name string
	// Dir is the guest's folder; empty without guests.
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
		for i := range p.instances.sortedByName() {
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

// lock calls find until no other operation holds any of the IDs that find returns, and then locks them. No other
// operation can lock any of them before release is called. The caller holds mu, and lock gives up mu while it waits.
// Therefore find looks everything up again on each call.
func (r *Rack) lock(find func() ([]string, error)) (release func(), err error) {
	for {
		ids, err := find()
		if err != nil {
			return nil, err
		}
		if !slices.ContainsFunc(ids, func(id string) bool { return r.locked[id] }) {
			for _, id := range ids {
				r.locked[id] = true
			}
			return func() { r.unlock(ids) }, nil
		}
		r.unlocked.Wait()
	}
}

func (r *Rack) unlock(ids []string) {
	for _, id := range ids {
		delete(r.locked, id)
	}
	r.unlocked.Broadcast()
}

// callGuests calls the guests without holding mu. The caller has locked the records that the call concerns. An error is
// a failure of the simulator; it is recorded for the control endpoint.
func (r *Rack) callGuests(what string, call func(Guests) error) error {
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

// runAfter calls do in the background after a delay, unless the rack is closed before.
func (r *Rack) runAfter(after time.Duration, do func()) {
	r.background.Go(func() {
		if r.sleep(after) {
			do()
		}
	})
}

// findProject looks a project up without checking any permission.
func (r *Rack) findProject(sel selector) (*project, error) {
	if sel.id != "" {
		if p, has := r.projects.withID(sel.id); has {
			return p, nil
		}
	} else if p, has := r.projects.named(sel.name); has {
		return p, nil
	}
	return nil, sel.notFound("project")
}

// lookupProject looks a project up for a caller that needs an access right in it.
func (r *Rack) lookupProject(who caller, sel selector, want access) (*project, error) {
	p, err := r.findProject(sel)
	if err != nil {
		return nil, err
	}
	return p, who.authorize(p, want, sel.notFound("project"))
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
		// Listing projects takes a role on the silo. The simulated rack accepts read access to all projects instead.
		if who.authorize(nil, accessRead, errForbidden) != nil {
			return answer{}, errForbidden
		}
		return answer{200, makePage(r.projects.next(sc), sc, (*project).view)}, nil
	}, nil
}

// parseProjectCreate always answers 403: creating a project takes a role on the silo, which no token of the simulated
// rack has.
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
		var racks collection[*identity]
		racks.put(&r.identity)
		return answer{200, makePage(racks.next(sc), sc, (*identity).view)}, nil
	}, nil
}

func (i *identity) key() (name, id string) { return "", i.RackID }

func (i *identity) view() rackView {
	return rackView{ID: i.RackID, TimeCreated: i.Created, TimeModified: i.Created}
}
