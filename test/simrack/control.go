// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack

import (
	"cmp"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"time"

	"github.com/google/uuid"
)

// Control is the control endpoint: what tests and demos can do to the rack, but clients cannot. It has no
// authentication, so serve it on a loopback address only. It speaks HTTP with JSON. An unknown field is 400, and an
// error is {"error":"…"}.
//
//   - GET, PATCH /v0/settings: hotplug, hotplug_async, max_disks, latency_ms, latency_max_ms, state_ms, quota_bytes,
//     cpu_quota, space_bytes, api_version_max. They hold from the next call on, and 0 means no limit. With
//     latency_max_ms each call takes a random time between the two. GET also shows guests and guests_off.
//   - GET /v0/instances: each with its run state and since when, its guest's directory, its disks with slot and device.
//   - POST /v0/instances with name, project, run_state (running, stopped): makes an instance with a boot disk, even
//     beyond a quota, and a missing project. The reply comes when the guest exists.
//   - PATCH /v0/instances/{key} with run_state (failed, stopped, running, migrating): that state at once, unchecked.
//   - POST /v0/halt with instance: the guest powers itself off; 409 unless the instance runs. A guest that boots a
//     process is only asked, as by a power button.
//   - POST /v0/power-cut with instance: stopped at once; the guest flushes nothing.
//   - PATCH /v0/disks/{key} with state (faulted, maintenance, detached): that state at once, on no instance any more.
//   - PATCH /v0/shown/{key} with any fields, such as {"run_state":"hibernating"}: replies show these instead of the
//     real ones, as a newer rack would; {} ends it.
//   - POST /v0/tokens with role (viewer, limited-collaborator, fleet-viewer, none) or roles (by project) and via
//     (group, silo), or with same_user_as, a token; expires_in_s 0 means never. DELETE /v0/tokens/{token} ends a token.
//   - POST /v0/faults: see below. GET, DELETE /v0/faults and DELETE /v0/faults/{key} show them with their hits, or
//     delete them.
//   - GET, DELETE /v0/calls: counts by operation, and a log of the last 10,000 calls: seq, method, path, operation
//     (empty without a route), status (0 if no reply was sent), fault. A call is logged before its reply is sent.
//   - GET /v0/rate: calls in each second since DELETE /v0/calls, for at most a day.
//   - GET /v0/leftovers: disks, snapshots, loops, mounts, files, without boot disks; guest_errors of the simulator.
//
// A fault names an operation (an operationId of the API's schema, or *) and a kind:
//
//   - status: not executed; the reply has status, error_code and message, by default the 503 of a rack. done: the same,
//     but executed.
//   - lost: executed, and the connection is closed without a reply. reset: not executed, the connection is reset.
//   - delay: executed after delay_ms. silent: executed; from then on the connection swallows what both sides send.
//
// It lets skip calls pass and then hits count calls (1; 0 means without an end), each with a probability (1). One fault
// hits a call: the oldest that has hits left, after routing and before parsing. With HTTP/2 (oxide-sim serve --tls) a
// connection that ends loses the replies of all its calls.
func (r *Rack) Control() http.Handler {
	mux := http.NewServeMux()
	for pattern, do := range map[string]controlFunc{
		"GET /v0/settings":          r.getSettings,
		"PATCH /v0/settings":        r.patchSettings,
		"GET /v0/instances":         r.getInstances,
		"POST /v0/instances":        r.postInstance,
		"PATCH /v0/instances/{key}": r.patchInstance,
		"POST /v0/halt":             r.postHalt,
		"POST /v0/power-cut":        r.postPowerCut,
		"PATCH /v0/disks/{key}":     r.patchDisk,
		"PATCH /v0/shown/{key}":     r.patchShown,
		"POST /v0/tokens":           r.postToken,
		"DELETE /v0/tokens/{key}":   r.deleteToken,
		"POST /v0/faults":           r.postFault,
		"GET /v0/faults":            r.getFaults,
		"DELETE /v0/faults":         r.deleteFaults,
		"DELETE /v0/faults/{key}":   r.deleteFault,
		"GET /v0/calls":             r.getCalls,
		"DELETE /v0/calls":          r.deleteCalls,
		"GET /v0/rate":              r.getRate,
		"GET /v0/leftovers":         r.getLeftovers,
		"POST /v0/starter":          r.postStarter,
	} {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, req *http.Request) { r.serveControl(w, req, do) })
	}
	return controlMux{mux}
}

// controlFunc handles one request and returns status and body of the answer.
type controlFunc func(req *http.Request) (int, any, error)

// controlMux answers unmatched requests in the same JSON form as all others.
type controlMux struct{ mux *http.ServeMux }

func (c controlMux) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	if _, pattern := c.mux.Handler(req); pattern == "" {
		writeControl(w, 404, controlErrorBody{fmt.Sprintf("no such request: %s %s", req.Method, req.URL.Path)})
		return
	}
	c.mux.ServeHTTP(w, req)
}

type controlErrorBody struct {
	Error string `json:"error"`
}

// Errors of the control endpoint with another status than 400, which malformed requests get.
var (
	errNotFound   = errors.New("not found")
	errWrongState = errors.New("not in this state")
)

func (r *Rack) serveControl(w http.ResponseWriter, req *http.Request, do controlFunc) {
	status, body, err := do(req)
	var refusal *apiError
	switch {
	case err == nil:
	case errors.As(err, &refusal):
		status = refusal.status
	case errors.Is(err, errNotFound):
		status = 404
	case errors.Is(err, errWrongState):
		status = 409
	case status == 0:
		status = 400
	}
	if err != nil {
		body = controlErrorBody{err.Error()}
	}
	writeControl(w, status, body)
}

func writeControl(w http.ResponseWriter, status int, body any) {
	if body == nil {
		w.WriteHeader(status)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	// An error means that the client has gone.
	_, _ = w.Write(append(encode(body, ""), '\n'))
}

// readControl reads a body into a struct, and rejects unknown fields.
func readControl(req *http.Request, into any) error {
	d := json.NewDecoder(io.LimitReader(req.Body, maxBodyBytes))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		return fmt.Errorf("read the request's body: %w", err)
	}
	return nil
}

// settingsView adds to the settings what cannot be changed.
type settingsView struct {
	settings
	Guests    bool   `json:"guests"`
	GuestsOff string `json:"guests_off"`
}

func (r *Rack) getSettings(*http.Request) (int, any, error) {
	return 200, settingsView{settings: *r.settings.Load(), Guests: r.guests != nil, GuestsOff: r.guestsOff}, nil
}

// patchSettings changes the settings of the request and leaves the others.
func (r *Rack) patchSettings(req *http.Request) (int, any, error) {
	r.mu.Lock() // so that concurrent patches do not overwrite each other
	defer r.mu.Unlock()
	s := *r.settings.Load()
	if err := readControl(req, &s); err != nil {
		return 0, nil, err
	}
	if err := s.check(); err != nil {
		return 0, nil, err
	}
	r.settings.Store(&s)
	return r.getSettings(req)
}

type controlInstanceView struct {
	ID       string `json:"id"`
	Name     string `json:"name"`
	Project  string `json:"project"`
	RunState string `json:"run_state"`
	// RunStateUpdated is the time of the run state.
	RunStateUpdated time.Time         `json:"run_state_updated"`
	Guest           string            `json:"guest"`
	Disks           []controlDiskView `json:"disks"`
}

type controlDiskView struct {
	ID   string `json:"id"`
	Name string `json:"name"`
	Slot int    `json:"slot"`
	// Device is the name of the block device in the guest; empty if the guest shows none.
	Device string `json:"device"`
}

// controlView is the rack's part of the JSON of an instance; [Rack.addGuest] adds the guest's part.
func (i *instance) controlView() controlInstanceView {
	v := controlInstanceView{
		ID:              i.ID,
		Name:            i.Name,
		Project:         i.project.Name,
		RunState:        i.RunState,
		RunStateUpdated: i.StateUpdated,
		Disks:           []controlDiskView{},
	}
	for _, d := range i.disks {
		v.Disks = append(v.Disks, controlDiskView{ID: d.ID, Name: d.Name, Slot: d.Slot})
	}
	slices.SortFunc(v.Disks, func(a, b controlDiskView) int { return a.Slot - b.Slot })
	return v
}

// addGuest fills in the guest's part. It is called without mu, because it blocks while the guest is being started.
func (r *Rack) addGuest(v controlInstanceView) controlInstanceView {
	v.Guest = r.guestDir(v.ID)
	if r.guests != nil {
		for n := range v.Disks {
			v.Disks[n].Device = r.guests.Device(v.ID, v.Disks[n].ID)
		}
	}
	return v
}

func (r *Rack) getInstances(*http.Request) (int, any, error) {
	list := r.listControlInstances()
	for n := range list {
		list[n] = r.addGuest(list[n])
	}
	return 200, list, nil
}

func (r *Rack) listControlInstances() []controlInstanceView {
	r.mu.Lock()
	defer r.mu.Unlock()
	list := []controlInstanceView{}
	for p := range r.projects.sortedByName() {
		for i := range p.instances.sortedByName() {
			list = append(list, i.controlView())
		}
	}
	return list
}

// postInstance creates an instance with a boot disk. It also creates a missing project.
func (r *Rack) postInstance(req *http.Request) (int, any, error) {
	var body struct {
		Name     string `json:"name"`
		Project  string `json:"project"`
		RunState string `json:"run_state"`
	}
	if err := readControl(req, &body); err != nil {
		return 0, nil, err
	}
	if body.RunState == "" {
		body.RunState = runRunning
	}
	if body.RunState != runRunning && body.RunState != runStopped {
		return 0, nil, fmt.Errorf("run_state %q: running or stopped", body.RunState)
	}
	if err := checkName(body.Name); err != nil {
		return 0, nil, fmt.Errorf("name %q: %w", body.Name, err)
	}
	if body.Project != "" {
		if err := checkName(body.Project); err != nil {
			return 0, nil, fmt.Errorf("project %q: %w", body.Project, err)
		}
	}
	v, err := r.newControlInstance(body.Project, body.Name, body.RunState)
	if err != nil {
		return 500, nil, err
	}
	return 201, r.addGuest(v), nil
}

// newControlInstance creates an instance in a project given by name; empty means the project of [Options].
func (r *Rack) newControlInstance(projectName, name, state string) (controlInstanceView, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p, err := r.findProject(selector{id: r.project})
	if projectName != "" {
		p, err = r.ensureProject(projectName)
	}
	if err != nil {
		return controlInstanceView{}, err
	}
	i, err := r.addInstance(p, name, state)
	if err != nil {
		return controlInstanceView{}, err
	}
	return i.controlView(), nil
}

// lockInstanceByKey finds an instance by ID, or by name in the project of [Options], and locks it.
func (r *Rack) lockInstanceByKey(key string) (i *instance, release func(), err error) {
	release, err = r.lock(func() ([]string, error) {
		sel, err := parseSelector(key)
		if err != nil {
			return nil, fmt.Errorf("instance %q: neither a name nor an ID", key)
		}
		t := target{sel: sel}
		if sel.name != "" {
			t.project = &selector{id: r.project}
		}
		if i, err = r.lookupInstance(operator, t, accessModify); err != nil {
			return nil, fmt.Errorf("instance %q: %w", key, errNotFound)
		}
		return []string{i.ID}, nil
	})
	return i, release, err
}

// operator is the caller for operations of the control endpoint.
var operator = caller{role: roleOperator}

// handleChange locks an instance, changes it, and answers with its new state.
func (r *Rack) handleChange(key string, do func(*instance) error) (int, any, error) {
	v, status, err := r.changeInstanceByKey(key, do)
	if err != nil {
		return status, nil, err
	}
	return 200, r.addGuest(v), nil
}

func (r *Rack) changeInstanceByKey(
	key string,
	do func(*instance) error,
) (v controlInstanceView, status int, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	i, release, err := r.lockInstanceByKey(key)
	if err != nil {
		return v, 0, err
	}
	defer release()
	if err := do(i); err != nil {
		return v, 500, err
	}
	return i.controlView(), 200, nil
}

// patchInstance puts an instance into a state, whether or not that transition is possible on a rack. The guest follows.
func (r *Rack) patchInstance(req *http.Request) (int, any, error) {
	var body struct {
		RunState string `json:"run_state"`
	}
	if err := readControl(req, &body); err != nil {
		return 0, nil, err
	}
	return r.handleChange(req.PathValue("key"), func(i *instance) error {
		var err error
		switch body.RunState {
		case runRunning:
			err = r.powerOn(i)
		case runFailed, runStopped:
			err = r.powerOff(i, false)
		case runMigrating:
		default:
			return fail(400, codeNone, "run_state %q: failed, stopped, running or migrating", body.RunState)
		}
		if err != nil {
			return err
		}
		return r.setState(i, body.RunState)
	})
}

// postStarter makes somebody start the instance whenever it is stopped. With every_ms 0 he leaves.
func (r *Rack) postStarter(req *http.Request) (int, any, error) {
	var body struct {
		Instance string  `json:"instance"`
		EveryMS  float64 `json:"every_ms"`
	}
	if err := readControl(req, &body); err != nil {
		return 0, nil, err
	}
	if body.EveryMS < 0 {
		return 0, nil, errors.New("every_ms cannot be negative")
	}
	return r.handleChange(body.Instance, func(i *instance) error {
		delete(r.starters, i.ID)
		if every := milliseconds(body.EveryMS); every > 0 {
			r.starters[i.ID] = every
			r.starter(i.ID, every)
		}
		return nil
	})
}

func readInstanceKey(req *http.Request) (string, error) {
	var body struct {
		Instance string `json:"instance"`
	}
	err := readControl(req, &body)
	return body.Instance, err
}

// postHalt has the guest power itself off: the guest shuts down in order, then the rack notices (docs/reference/rack.md
// §5). A guest with processes is only asked to; its processes decide.
func (r *Rack) postHalt(req *http.Request) (int, any, error) {
	key, err := readInstanceKey(req)
	if err != nil {
		return 0, nil, err
	}
	return r.handleChange(key, func(i *instance) error {
		if i.RunState != runRunning && i.RunState != runMigrating {
			return fmt.Errorf("instance %q is %s, so its guest cannot halt: %w", key, i.RunState, errWrongState)
		}
		asked := false
		err := r.callGuests("halt "+i.ID, func(g Guests) (err error) {
			asked, err = g.Halt(i.ID)
			return err
		})
		if asked || err != nil {
			return err
		}
		if err := r.powerOff(i, true); err != nil {
			return err
		}
		return r.startTransition(i, runStopping, runStopped)
	})
}

// postPowerCut stops an instance at once. Its guest flushes nothing.
func (r *Rack) postPowerCut(req *http.Request) (int, any, error) {
	key, err := readInstanceKey(req)
	if err != nil {
		return 0, nil, err
	}
	return r.handleChange(key, func(i *instance) error {
		return errors.Join(r.powerOff(i, false), r.setState(i, runStopped))
	})
}

// patchDisk puts a disk into a state that no request leads to. A disk of a running guest is removed from the guest.
func (r *Rack) patchDisk(req *http.Request) (int, any, error) {
	var body struct {
		State string `json:"state"`
	}
	if err := readControl(req, &body); err != nil {
		return 0, nil, err
	}
	if !slices.Contains([]string{diskFaulted, diskMaintenance, diskDetached}, body.State) {
		return 0, nil, fmt.Errorf("state %q: faulted, maintenance or detached", body.State)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	var d *disk
	release, err := r.lock(func() (ids []string, err error) {
		if d, err = r.findDisk(req.PathValue("key")); err != nil {
			return nil, err
		}
		ids = []string{d.ID}
		if d.InstanceID != "" {
			ids = append(ids, d.InstanceID)
		}
		return ids, nil
	})
	if err != nil {
		return 0, nil, err
	}
	defer release()
	if i := r.instances[d.InstanceID]; i != nil && d.State != diskAttaching {
		if err := r.unplug(i, d); err != nil {
			return 500, nil, err
		}
	}
	if err := r.changeDisk(d, func(d *disk) { d.detach(); d.State = body.State }); err != nil {
		return 500, nil, err
	}
	return 200, d.view(), nil
}

// findDisk finds a disk by ID, or by name in the project of [Options].
func (r *Rack) findDisk(key string) (*disk, error) {
	sel, err := parseSelector(key)
	if err != nil {
		return nil, fmt.Errorf("disk %q: neither a name nor an ID", key)
	}
	t := target{sel: sel}
	if sel.name != "" {
		t.project = &selector{id: r.project}
	}
	d, err := r.lookupDisk(operator, t, accessModify)
	if err != nil {
		return nil, fmt.Errorf("disk %q: %w", key, errNotFound)
	}
	return d, nil
}

func (r *Rack) postToken(req *http.Request) (int, any, error) {
	var body struct {
		Role string `json:"role"`
		// Roles are the roles in single projects, by name. Role, here none by default, is the one in the others.
		Roles map[string]string `json:"roles"`
		// SameUserAs is a token of the user who gets one more token.
		SameUserAs string `json:"same_user_as"`
		// Via is where the role is assigned: "", [viaGroup] or [viaSilo].
		Via        string `json:"via"`
		ExpiresInS int64  `json:"expires_in_s"`
	}
	if err := readControl(req, &body); err != nil {
		return 0, nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	made := &token{
		Token:  tokenPrefix + rand.Text(),
		Role:   body.Role,
		Roles:  body.Roles,
		Via:    body.Via,
		UserID: uuid.NewString(),
	}
	roles := []string{roleViewer, roleLimitedCollaborator, roleFleetViewer, roleNone}
	if len(body.Roles) > 0 {
		made.Role = cmp.Or(body.Role, roleNone)
	}
	for name, role := range body.Roles {
		if _, has := r.projects.named(name); !has || !slices.Contains(roles, role) {
			return 0, nil, fmt.Errorf("roles: %q in project %q: a project of this rack, and one of %v", role, name, roles)
		}
	}
	other := r.tokens[body.SameUserAs]
	switch {
	case other != nil && made.Role == "":
		made.Role, made.Roles, made.Via, made.UserID = other.Role, other.Roles, other.Via, other.UserID
	case body.SameUserAs != "":
		return 0, nil, errors.New("same_user_as: a token of this rack, and no role")
	case !slices.Contains(roles, made.Role):
		return 0, nil, fmt.Errorf("role %q: one of %v", made.Role, roles)
	case !slices.Contains([]string{"", viaGroup, viaSilo}, body.Via):
		return 0, nil, fmt.Errorf("via %q: one of %s, %s, or left out", body.Via, viaGroup, viaSilo)
	}
	if body.ExpiresInS > 0 {
		expires := now().Add(time.Duration(body.ExpiresInS) * time.Second)
		made.Expires = &expires
	}
	if err := r.insertToken(made); err != nil {
		return 500, nil, err
	}
	return 201, map[string]string{"token": made.Token}, nil
}

func (r *Rack) deleteToken(req *http.Request) (int, any, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	key := req.PathValue("key")
	if _, has := r.tokens[key]; !has {
		return 0, nil, fmt.Errorf("token: %w", errNotFound)
	}
	if err := r.store.write(deleteRecord(bucketTokens, key)); err != nil {
		return 500, nil, err
	}
	delete(r.tokens, key)
	return 204, nil, nil
}

func (r *Rack) postFault(req *http.Request) (int, any, error) {
	var body faultRequest
	if err := readControl(req, &body); err != nil {
		return 0, nil, err
	}
	f, err := body.fault()
	if err != nil {
		return 0, nil, err
	}
	return 201, struct {
		ID   string `json:"id"`
		Hits int    `json:"hits"`
	}{ID: r.faults.add(f)}, nil
}

func (r *Rack) getFaults(*http.Request) (int, any, error) { return 200, r.faults.view(), nil }

func (r *Rack) deleteFaults(*http.Request) (int, any, error) {
	r.faults.clear()
	return 204, nil, nil
}

func (r *Rack) deleteFault(req *http.Request) (int, any, error) {
	if key := req.PathValue("key"); !r.faults.remove(key) {
		return 0, nil, fmt.Errorf("fault %q: %w", key, errNotFound)
	}
	return 204, nil, nil
}

func (r *Rack) getCalls(*http.Request) (int, any, error) { return 200, r.calls.view(), nil }

func (r *Rack) getRate(*http.Request) (int, any, error) { return 200, r.calls.rate(), nil }

func (r *Rack) deleteCalls(*http.Request) (int, any, error) {
	r.calls.reset()
	return 204, nil, nil
}

// leftoversView counts everything except instances and their boot disks. Guest errors are failures of the simulator; a
// working simulator has none.
type leftoversView struct {
	Disks       int      `json:"disks"`
	Snapshots   int      `json:"snapshots"`
	Loops       int      `json:"loops"`
	Mounts      int      `json:"mounts"`
	Files       int      `json:"files"`
	GuestErrors []string `json:"guest_errors,omitempty"`
}

func (r *Rack) getLeftovers(*http.Request) (int, any, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	boots := map[string]bool{}
	for _, i := range r.instances {
		boots[i.BootDiskID] = true
	}
	var v leftoversView
	err := r.callGuests("count leftovers", func(g Guests) error {
		left, err := g.Leftovers(boots)
		v.Loops, v.Mounts, v.Files = left.Loops, left.Mounts, left.Files
		return err
	})
	if err != nil {
		return 500, nil, err
	}
	for id := range r.disks {
		if !boots[id] {
			v.Disks++
		}
	}
	v.Snapshots = len(r.snapshots)
	v.GuestErrors = slices.Clone(r.guestErrors)
	return 200, v, nil
}
