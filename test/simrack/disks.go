// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack

import (
	"cmp"
	"encoding/json"
	"errors"
	"slices"
	"strconv"
	"time"

	"github.com/google/uuid"
)

// The states of a disk that this rack uses (docs/reference/rack.md §2).
const (
	diskCreating    = "creating"
	diskDetached    = "detached"
	diskAttaching   = "attaching"
	diskAttached    = "attached"
	diskDetaching   = "detaching"
	diskMaintenance = "maintenance"
	diskFaulted     = "faulted"
	diskImportReady = "import_ready"
)

const (
	typeDistributed = "distributed"
	typeLocal       = "local"

	localBlockSize = 4096
	// maxDistributedBytes is the largest distributed disk.
	maxDistributedBytes = 1023 * gib
)

// disk is the rack's record of a disk. After its insertion only [Rack.changeDisks] may change it.
type disk struct {
	ID          string    `json:"id"`
	Name        string    `json:"name"`
	Description string    `json:"description"`
	ProjectID   string    `json:"project_id"`
	SizeBytes   int64     `json:"size"`
	BlockSize   int       `json:"block_size"`
	Type        string    `json:"type"`
	State       string    `json:"state"`
	ReadOnly    bool      `json:"read_only"`
	Created     time.Time `json:"created"`
	// InstanceID and Slot are set in the states attaching, attached and detaching.
	InstanceID string `json:"instance_id,omitempty"`
	Slot       int    `json:"slot"`
	// SnapshotID is the source snapshot of the disk.
	SnapshotID string `json:"snapshot_id,omitempty"`
	// Placed means that the disk takes physical space. A local disk takes space from the first start of its instance.
	Placed bool `json:"placed"`

	project *project
}

func (d *disk) key() (name, id string) { return d.Name, d.ID }

func (d *disk) detach() { d.State, d.InstanceID, d.Slot = diskDetached, "", 0 }

func (d *disk) forGuest(bootDiskID string) GuestDisk {
	return GuestDisk{
		ID: d.ID, Name: d.Name, Slot: d.Slot, SizeBytes: d.SizeBytes, BlockSize: d.BlockSize, ReadOnly: d.ReadOnly,
		Boot: d.ID == bootDiskID,
	}
}

// diskSpec is a request for a disk.
type diskSpec struct {
	name, description string
	sizeBytes         int64
	diskType          string
	source            string
	blockSize         int
	// parent is the ID of the source snapshot or image. readOnly applies only to disks with such a source.
	parent   string
	readOnly bool
}

// The sources of a distributed disk.
const (
	sourceBlank     = "blank"
	sourceSnapshot  = "snapshot"
	sourceImage     = "image"
	sourceImporting = "importing_blocks"
)

var blockSizes = []string{"512", "2048", "4096"}

func parseDiskSpec(f fields) (spec diskSpec, err error) {
	if spec.name, err = f.name("name"); err != nil {
		return spec, err
	}
	if spec.description, err = f.text("description"); err != nil {
		return spec, err
	}
	backend, err := f.object("disk_backend")
	if err != nil {
		return spec, err
	}
	if err := spec.parseBackend(backend); err != nil {
		return spec, err
	}
	spec.sizeBytes, err = f.byteCount("size")
	return spec, err
}

func (spec *diskSpec) parseBackend(f fields) (err error) {
	if spec.diskType, err = f.oneOf("type", typeLocal, typeDistributed); err != nil {
		return err
	}
	if spec.diskType == typeLocal {
		spec.blockSize, spec.source = localBlockSize, sourceBlank
		return nil
	}
	source, err := f.object("disk_source")
	if err != nil {
		return err
	}
	spec.source, err = source.oneOf("type", sourceBlank, sourceSnapshot, sourceImage, sourceImporting)
	if err != nil {
		return err
	}
	switch spec.source {
	case sourceSnapshot:
		spec.parent, err = source.uuid("snapshot_id")
	case sourceImage:
		spec.parent, err = source.uuid("image_id")
	default:
		return spec.parseBlockSize(source)
	}
	if err != nil {
		return err
	}
	spec.readOnly, err = source.flag("read_only", false)
	return err
}

func (spec *diskSpec) parseBlockSize(f fields) error {
	raw, err := f.required("block_size")
	if err != nil {
		return err
	}
	if !slices.Contains(blockSizes, string(raw)) {
		return bodyError(f.at("block_size"), errors.New("invalid block size: expected one of 512, 2048, 4096"))
	}
	spec.blockSize, err = strconv.Atoi(string(raw))
	return err
}

// pending is the sum of the disks that the same request creates before this disk.
type pending struct {
	bytes, space int64
	names        map[string]bool
}

// diskCheck rejects a disk that cannot be created after the pending ones. It returns the disk completed by what its
// source determines.
type diskCheck func(p *project, spec diskSpec, before pending) (diskSpec, error)

// checkDisk rejects a disk that cannot be created. It makes the checks of docs/reference/rack.md §2 in their order,
// except the first, the project, which has been made.
func (r *Rack) checkDisk(p *project, spec diskSpec, before pending) (diskSpec, error) {
	spec, err := r.checkSource(p, spec)
	if err != nil {
		return spec, err
	}
	if err := spec.checkSize(); err != nil {
		return spec, err
	}
	set := r.settings.Load()
	if spec.sizeBytes > cmp.Or(set.QuotaBytes, unlimited)-r.usedBytes-before.bytes {
		return spec, fail(507, codeCapacity, messageStorageQuota)
	}
	if err := checkDescription(spec.description); err != nil {
		return spec, err
	}
	if _, taken := p.disks.named(spec.name); taken || before.names[spec.name] {
		return spec, alreadyExists("disk", spec.name)
	}
	if spec.diskType == typeDistributed && set.SpaceBytes > 0 &&
		spec.sizeBytes > set.SpaceBytes-r.usedSpace-before.space {
		return spec, fail(507, codeCapacity, messageNoSpace)
	}
	return spec, nil
}

// checkSource looks up the source of a disk, and copies the block size of a snapshot. The rack has no images, so every
// image is missing.
func (r *Rack) checkSource(p *project, spec diskSpec) (diskSpec, error) {
	if spec.source != sourceSnapshot && spec.source != sourceImage {
		return spec, nil
	}
	s := r.snapshots[spec.parent]
	switch {
	case spec.source == sourceImage || s == nil:
		return spec, selector{id: spec.parent}.notFound(spec.source)
	case s.ProjectID != p.ID:
		return spec, invalidRequest("snapshot does not belong to this project")
	case spec.readOnly && spec.sizeBytes != s.SizeBytes:
		return spec, invalidRequest(
			"read-only disk size %d must be equal to source snapshot size %d",
			spec.sizeBytes,
			s.SizeBytes,
		)
	case spec.sizeBytes < s.SizeBytes:
		return spec, invalidRequest(
			"disk size %d must be greater than or equal to snapshot size %d",
			spec.sizeBytes,
			s.SizeBytes,
		)
	case s.State != snapshotReady:
		return spec, fail(503, codeUnavailable, messageUnavailable)
	}
	spec.blockSize = s.BlockSize
	return spec, nil
}

func (spec diskSpec) checkSize() error {
	switch {
	case spec.sizeBytes%int64(spec.blockSize) != 0:
		return invalidValue("size and block_size",
			"total size must be a multiple of block size "+strconv.Itoa(spec.blockSize))
	case spec.sizeBytes < gib:
		return invalidValue("size", "total size must be at least 1 GiB")
	case spec.sizeBytes%gib != 0:
		return invalidValue("size", "total size must be a multiple of 1 GiB")
	case spec.diskType == typeDistributed && spec.sizeBytes > maxDistributedBytes:
		return invalidValue("size", "total size must be less than 1023 GiB")
	}
	return nil
}

func (spec diskSpec) disk(p *project) *disk {
	d := &disk{
		ID: uuid.NewString(), Name: spec.name, Description: spec.description, ProjectID: p.ID,
		SizeBytes: spec.sizeBytes, BlockSize: spec.blockSize, Type: spec.diskType, State: diskDetached,
		Placed: spec.diskType == typeDistributed, Created: now(), ReadOnly: spec.readOnly, project: p,
	}
	if spec.source == sourceSnapshot {
		d.SnapshotID = spec.parent
	}
	if spec.source == sourceImporting {
		d.State = diskImportReady
	}
	return d
}

// insertDisk adds a record to the indexes.
func (r *Rack) insertDisk(p *project, d *disk) {
	d.project = p
	r.disks[d.ID] = d
	p.disks.put(d)
	r.usedBytes += d.SizeBytes
	if d.Placed {
		r.usedSpace += d.SizeBytes
	}
	if i := r.instances[d.InstanceID]; i != nil {
		i.disks = append(i.disks, d)
	}
}

// removeDisk removes a record.
func (r *Rack) removeDisk(d *disk) error {
	if err := r.store.write(deleteRecord(bucketDisks, d.ID)); err != nil {
		return err
	}
	delete(r.disks, d.ID)
	d.project.disks.remove(d)
	r.usedBytes -= d.SizeBytes
	if later := r.settings.Load().SpaceReturnsMS; d.Placed && later > 0 {
		size := d.SizeBytes
		r.runAfter(milliseconds(later), func() {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.usedSpace -= size
		})
	} else if d.Placed {
		r.usedSpace -= d.SizeBytes
	}
	if i := r.instances[d.InstanceID]; i != nil {
		i.removeDisk(d)
	}
	return nil
}

func (r *Rack) changeDisk(d *disk, alter func(*disk)) error { return r.changeDisks([]*disk{d}, alter) }

// changeDisks changes all the records or none, and writes further changes with them. alter must not touch name or size.
func (r *Rack) changeDisks(disks []*disk, alter func(*disk), with ...change) error {
	next := make([]disk, len(disks))
	for n, d := range disks {
		next[n] = *d
		alter(&next[n])
		with = append(with, putRecord(bucketDisks, d.ID, &next[n]))
	}
	if err := r.store.write(with...); err != nil {
		return err
	}
	for n, d := range disks {
		if d.InstanceID != next[n].InstanceID {
			if i := r.instances[d.InstanceID]; i != nil {
				i.removeDisk(d)
			}
			if i := r.instances[next[n].InstanceID]; i != nil {
				i.disks = append(i.disks, d)
			}
		}
		if !d.Placed && next[n].Placed {
			r.usedSpace += d.SizeBytes
		}
		*d = next[n]
	}
	return nil
}

// makeDisk inserts a disk that was checked. With guests it then creates the backing store, and the disk shows creating.
// The caller has locked the disk.
func (r *Rack) makeDisk(d *disk) error {
	rest, takes := d.State, milliseconds(r.settings.Load().CreatingMS)
	if r.guests != nil || takes > 0 {
		d.State = diskCreating
	}
	if err := r.store.write(putRecord(bucketDisks, d.ID, d)); err != nil {
		return err
	}
	r.insertDisk(d.project, d)
	if r.guests == nil && takes == 0 {
		return nil
	}
	r.pause(takes)
	err := r.callGuests("create disk "+d.ID, func(g Guests) error {
		if d.SnapshotID != "" {
			return g.RestoreDisk(d.ID, d.SizeBytes, d.SnapshotID)
		}
		return g.CreateDisk(d.ID, d.SizeBytes)
	})
	if err != nil {
		return errors.Join(err, r.removeDisk(d))
	}
	return r.changeDisk(d, func(d *disk) { d.State = rest })
}

// lookup finds an object of one kind as a request addresses it, for a caller that needs an access right. The checks are
// in the rack's order: the form of the address, the project, the object, the right to it.
func lookup[T record](
	r *Rack,
	kind kind,
	t target,
	byID map[string]T,
	in func(*project) *collection[T],
	of func(T) *project,
	who caller,
	want access,
) (T, error) {
	var none, object T
	if t.sel.id != "" {
		if t.project != nil {
			return none, invalidRequest("%s", kind.idAndProject)
		}
		object = byID[t.sel.id]
	} else {
		if t.project == nil {
			return none, invalidRequest("%s", kind.nameAlone)
		}
		p, err := r.findProject(*t.project)
		if err != nil {
			return none, err
		}
		object, _ = in(p).named(t.sel.name)
	}
	if object == none {
		return none, t.sel.notFound(kind.name)
	}
	return object, who.authorize(of(object), want, t.sel.notFound(kind.name))
}

func projectDisks(p *project) *collection[*disk] { return &p.disks }

func (r *Rack) lookupDisk(who caller, t target, want access) (*disk, error) {
	return lookup(r, kindDisk, t, r.disks, projectDisks, func(d *disk) *project { return d.project }, who, want)
}

func parseDiskList(r *Rack, q *request) (action, error) {
	return parseList(r, q, projectDisks, (*disk).view)
}

// parseList reads a request for the objects of one kind in a project.
func parseList[T record, V any](r *Rack, q *request, in func(*project) *collection[T], view func(T) V) (action, error) {
	sc, err := q.parseScan(sortsByNameOrID, true)
	if err != nil {
		return nil, err
	}
	return func(who caller) (answer, error) {
		r.mu.Lock()
		defer r.mu.Unlock()
		p, err := r.lookupProject(who, *sc.project, accessRead)
		if err != nil {
			return answer{}, err
		}
		return answer{200, makePage(in(p).next(sc), sc, view)}, nil
	}, nil
}

// parseView reads a request for one object.
func parseView[T record, V any](
	r *Rack,
	q *request,
	look func(caller, target, access) (T, error),
	view func(T) V,
) (action, error) {
	t, err := q.target()
	if err != nil {
		return nil, err
	}
	return func(who caller) (answer, error) {
		r.mu.Lock()
		defer r.mu.Unlock()
		object, err := look(who, t, accessRead)
		if err != nil {
			return answer{}, err
		}
		return answer{200, view(object)}, nil
	}, nil
}

func parseDiskCreate(r *Rack, q *request) (action, error) {
	project, err := q.needProject()
	if err != nil {
		return nil, err
	}
	body, err := readBody(q.http)
	if err != nil {
		return nil, err
	}
	spec, err := parseDiskSpec(body)
	if err != nil {
		return nil, err
	}
	return func(who caller) (answer, error) { return r.createDisk(who, project, spec) }, nil
}

// createDisk creates a disk. The answer says creating although the record already has its final state, as on a rack.
func (r *Rack) createDisk(who caller, project selector, spec diskSpec) (answer, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p, err := r.lookupProject(who, project, accessModify)
	if err != nil {
		return answer{}, err
	}
	var d *disk
	release, err := r.lock(func() ([]string, error) {
		checked, err := r.checkDisk(p, spec, pending{})
		if err != nil {
			return nil, err
		}
		d = checked.disk(p)
		if d.SnapshotID != "" {
			return []string{d.ID, d.SnapshotID}, nil // so that the snapshot is not deleted before the disk exists
		}
		return []string{d.ID}, nil
	})
	if err != nil {
		return answer{}, err
	}
	defer release()
	if err := r.makeDisk(d); err != nil {
		return answer{}, err
	}
	view := d.view()
	if !d.ReadOnly {
		view.State = diskStateView{State: diskCreating}
	}
	return answer{201, view}, nil
}

func parseDiskView(r *Rack, q *request) (action, error) {
	return parseView(r, q, r.lookupDisk, (*disk).view)
}

func parseDiskDelete(r *Rack, q *request) (action, error) {
	t, err := q.target()
	if err != nil {
		return nil, err
	}
	return func(who caller) (answer, error) { return answer{status: 204}, r.deleteDisk(who, t) }, nil
}

// waitsFor returns what a request that changes the disk has to lock. A request that the disk's state forbids until the
// end of its snapshot does not wait for that: the rack refuses it.
func (d *disk) waitsFor() (ids []string) {
	if d.State == diskMaintenance {
		return nil
	}
	return []string{d.ID}
}

// deleteDisk deletes a disk (docs/reference/rack.md §3). It deletes the contents before the record: if the rack dies in
// between, a repeated request deletes both.
func (r *Rack) deleteDisk(who caller, t target) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	var d *disk
	release, err := r.lock(func() (ids []string, err error) {
		if d, err = r.lookupDisk(who, t, accessModify); err != nil {
			return nil, err
		}
		return d.waitsFor(), nil
	})
	if err != nil {
		return err
	}
	defer release()
	if d.State != diskDetached && d.State != diskFaulted {
		return invalidRequest(`disk cannot be deleted in state "%s"`, d.State)
	}
	if err := r.callGuests("delete disk "+d.ID, func(g Guests) error { return g.DeleteDisk(d.ID) }); err != nil {
		return err
	}
	return r.removeDisk(d)
}

// diskEntry is one disk in the request for an instance: a disk to create, or the name of an existing disk to attach.
type diskEntry struct {
	create *diskSpec
	attach string
}

func parseDiskEntry(raw json.RawMessage, path string) (entry diskEntry, err error) {
	f, err := parseObject(raw, path)
	if err != nil {
		return entry, err
	}
	kind, err := f.oneOf("type", "create", "attach")
	if err != nil {
		return entry, err
	}
	if kind == "attach" {
		entry.attach, err = f.name("name")
		return entry, err
	}
	spec, err := parseDiskSpec(f)
	entry.create = &spec
	return entry, err
}
