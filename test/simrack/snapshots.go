// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack

import (
	"cmp"
	"errors"
	"time"

	"github.com/google/uuid"
)

// The states of a snapshot that this rack uses (docs/reference/rack.md §6).
const (
	snapshotCreating = "creating"
	snapshotReady    = "ready"
)

// snapshot is the rack's record of a snapshot. After its insertion only [Rack.changeSnapshot] may change it.
type snapshot struct {
	ID          string    `json:"id"`
	Name        string    `json:"name"`
	Description string    `json:"description"`
	ProjectID   string    `json:"project_id"`
	DiskID      string    `json:"disk_id"`
	SizeBytes   int64     `json:"size"`
	BlockSize   int       `json:"block_size"`
	State       string    `json:"state"`
	Created     time.Time `json:"created"`

	project *project
}

func (s *snapshot) key() (name, id string) { return s.Name, s.ID }

func projectSnapshots(p *project) *collection[*snapshot] { return &p.snapshots }

func (r *Rack) lookupSnapshot(who caller, t target, want access) (*snapshot, error) {
	return lookup(
		r,
		kindSnapshot,
		t,
		r.snapshots,
		projectSnapshots,
		func(s *snapshot) *project { return s.project },
		who,
		want,
	)
}

// insertSnapshot adds a record to the indexes. A snapshot takes as much quota and space as its disk.
func (r *Rack) insertSnapshot(p *project, s *snapshot) {
	s.project = p
	r.snapshots[s.ID] = s
	p.snapshots.put(s)
	r.usedBytes += s.SizeBytes
	r.usedSpace += s.SizeBytes
}

func (r *Rack) removeSnapshot(s *snapshot) error {
	if err := r.store.write(deleteRecord(bucketSnapshots, s.ID)); err != nil {
		return err
	}
	delete(r.snapshots, s.ID)
	s.project.snapshots.remove(s)
	r.usedBytes -= s.SizeBytes
	r.usedSpace -= s.SizeBytes
	return nil
}

func (r *Rack) changeSnapshot(s *snapshot, alter func(*snapshot)) error {
	next := *s
	alter(&next)
	if err := r.store.write(putRecord(bucketSnapshots, s.ID, &next)); err != nil {
		return err
	}
	*s = next
	return nil
}

func parseSnapshotList(r *Rack, q *request) (action, error) {
	return parseList(r, q, projectSnapshots, (*snapshot).view)
}

func parseSnapshotView(r *Rack, q *request) (action, error) {
	return parseView(r, q, r.lookupSnapshot, (*snapshot).view)
}

// snapshotSpec is a request for a snapshot.
type snapshotSpec struct {
	project           selector
	name, description string
	disk              selector
}

func parseSnapshotCreate(r *Rack, q *request) (action, error) {
	project, err := q.needProject()
	if err != nil {
		return nil, err
	}
	body, err := readBody(q.http)
	if err != nil {
		return nil, err
	}
	spec := snapshotSpec{project: project}
	if spec.name, err = body.name("name"); err != nil {
		return nil, err
	}
	if spec.description, err = body.text("description"); err != nil {
		return nil, err
	}
	if spec.disk, err = body.selector("disk"); err != nil {
		return nil, err
	}
	return func(who caller) (answer, error) { return r.createSnapshot(who, spec) }, nil
}

// createSnapshot creates a snapshot. Meanwhile the snapshot shows creating, and a detached disk shows maintenance.
func (r *Rack) createSnapshot(who caller, spec snapshotSpec) (answer, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p, err := r.lookupProject(who, spec.project, accessModify)
	if err != nil {
		return answer{}, err
	}
	d, release, err := r.lockForSnapshot(who, p, spec)
	if err != nil {
		return answer{}, err
	}
	defer func() { release() }()
	if err := r.checkSnapshot(p, d, spec); err != nil {
		return answer{}, err
	}
	s := &snapshot{
		ID: uuid.NewString(), Name: spec.name, Description: spec.description, ProjectID: p.ID,
		DiskID: d.ID, SizeBytes: d.SizeBytes, BlockSize: d.BlockSize, State: snapshotCreating, Created: now(),
	}
	if err := r.store.write(putRecord(bucketSnapshots, s.ID, s)); err != nil {
		return answer{}, err
	}
	r.insertSnapshot(p, s)
	set := r.settings.Load()
	if i := r.instances[d.InstanceID]; set.Pantry && i != nil && !i.hasVMM() {
		release()
		err := r.waitInPantry(d, set)
		id := d.ID
		again, _ := r.lock(func() ([]string, error) { return []string{id}, nil })
		release = again
		if err == nil && r.disks[id] == nil { // it was detached and deleted meanwhile
			err = fail(500, codeInternal, messageInternal)
		}
		if err != nil {
			return answer{}, errors.Join(err, r.removeSnapshot(s))
		}
	}
	if err := r.takeSnapshot(d, s); err != nil {
		return answer{}, errors.Join(err, r.removeSnapshot(s))
	}
	if err := r.changeSnapshot(s, func(s *snapshot) { s.State = snapshotReady }); err != nil {
		return answer{}, err
	}
	return answer{201, s.view()}, nil
}

// lockForSnapshot looks the disk up and locks it. A second snapshot of the same disk at the same time is rejected; it
// does not wait.
func (r *Rack) lockForSnapshot(who caller, p *project, spec snapshotSpec) (d *disk, release func(), err error) {
	t := target{sel: spec.disk}
	if spec.disk.name != "" {
		t.project = &spec.project
	}
	release, err = r.lock(func() ([]string, error) {
		if d, err = r.lookupDisk(who, t, accessRead); err != nil {
			return nil, err
		}
		switch {
		case d.ProjectID != p.ID:
			return nil, invalidRequest("can't create a snapshot of a disk in a different project")
		case d.Type == typeLocal:
			return nil, invalidRequest("can't create a snapshot of a local storage disk")
		case d.ReadOnly:
			return nil, invalidRequest("can't create a snapshot of a read-only disk")
		case r.snapshotting[d.ID]:
			return nil, fail(409, codeConflict, "volume repair lock")
		}
		return []string{d.ID}, nil
	})
	return d, release, err
}

// checkSnapshot makes the checks of docs/reference/rack.md §6 that follow the checks of the disk, in their order.
func (r *Rack) checkSnapshot(p *project, d *disk, spec snapshotSpec) error {
	set := r.settings.Load()
	if set.SpaceBytes > 0 && d.SizeBytes > set.SpaceBytes-r.usedSpace {
		return fail(507, codeCapacity, messageNoSpace)
	}
	if err := checkDescription(spec.description); err != nil {
		return err
	}
	if _, taken := p.snapshots.named(spec.name); taken {
		return alreadyExists("snapshot", spec.name)
	}
	if d.SizeBytes > cmp.Or(set.QuotaBytes, unlimited)-r.usedBytes {
		return fail(507, codeCapacity, messageStorageQuota)
	}
	if d.State != diskDetached && d.State != diskAttached {
		return fail(503, codeUnavailable, messageUnavailable)
	}
	return nil
}

// takeSnapshot has the guests copy the contents of a disk. The caller has locked the disk.
func (r *Rack) takeSnapshot(d *disk, s *snapshot) (err error) {
	takes := milliseconds(r.settings.Load().SnapshotMS)
	if r.guests == nil && takes == 0 {
		return nil
	}
	r.snapshotting[d.ID] = true
	defer delete(r.snapshotting, d.ID)
	if d.State == diskDetached {
		if err := r.changeDisk(d, func(d *disk) { d.State = diskMaintenance }); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, r.changeDisk(d, func(d *disk) { d.State = diskDetached })) }()
	}
	r.pause(takes)
	busy := false
	err = r.callGuests("snapshot disk "+d.ID, func(g Guests) error {
		err := g.CreateSnapshot(s.ID, d.ID)
		if busy = errors.Is(err, ErrDiskBusy); busy {
			return nil
		}
		return err
	})
	if busy {
		return fail(503, codeUnavailable, messageUnavailable)
	}
	return err
}

func parseSnapshotDelete(r *Rack, q *request) (action, error) {
	t, err := q.target()
	if err != nil {
		return nil, err
	}
	return func(who caller) (answer, error) { return answer{status: 204}, r.deleteSnapshot(who, t) }, nil
}

// deleteSnapshot deletes a snapshot. It waits for the creation of disks from the snapshot. As with disks, the contents
// are deleted first.
func (r *Rack) deleteSnapshot(who caller, t target) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	var s *snapshot
	release, err := r.lock(func() (ids []string, err error) {
		if s, err = r.lookupSnapshot(who, t, accessModify); err != nil {
			return nil, err
		}
		if s.State == snapshotCreating {
			return nil, invalidRequest("snapshot cannot be deleted in state Creating")
		}
		return []string{s.ID}, nil
	})
	if err != nil {
		return err
	}
	defer release()
	if err := r.callGuests("delete snapshot "+s.ID, func(g Guests) error { return g.DeleteSnapshot(s.ID) }); err != nil {
		return err
	}
	return r.removeSnapshot(s)
}

// resumeSnapshot removes a snapshot that was being created when the process died.
func (r *Rack) resumeSnapshot(s *snapshot) error {
	if s.State != snapshotCreating {
		return nil
	}
	if d := r.disks[s.DiskID]; d != nil && d.State == diskMaintenance {
		if err := r.changeDisk(d, func(d *disk) { d.State = diskDetached }); err != nil {
			return err
		}
	}
	if err := r.callGuests("delete snapshot "+s.ID, func(g Guests) error { return g.DeleteSnapshot(s.ID) }); err != nil {
		return err
	}
	return r.removeSnapshot(s)
}
