// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package diagnose

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sync/errgroup"

	"github.com/oxidecomputer/oxide-csi-plugin/core/controller"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// MinOrphanAge is the age below which nothing is deleted: an orchestrator may still be creating its object.
const MinOrphanAge = 24 * time.Hour

// Kind says what an orphan is.
type Kind string

// The kinds of orphans.
const (
	KindDisk      Kind = "disk"
	KindSnapshot  Kind = "snapshot"
	KindTemporary Kind = "temporary snapshot"
	// KindExpansion is the snapshot of an expansion. Its ID is that of the volume, which is deleted with it.
	KindExpansion Kind = "expansion snapshot"
	KindRecord    Kind = "record"
)

// Orphan is something of this cluster on a rack that the orchestrator does not know.
type Orphan struct {
	Kind Kind   `json:"kind"`
	ID   string `json:"id"`
	Rack string `json:"rack"`
	// RackName is the name on the rack. Name is the orchestrator's name, and Claim the volume's claim, if they are known.
	RackName string `json:"rackName"`
	Name     string `json:"name,omitempty"`
	Claim    string `json:"claim,omitempty"`
	// SizeBytes counts against the silo's quota. It is 0 for a record.
	SizeBytes int64     `json:"sizeBytes"`
	Created   time.Time `json:"created"`
	// Keep says why it is not deleted. It is empty if it can be deleted.
	Keep string `json:"keep,omitempty"`
}

// Missing is a volume or a snapshot of the orchestrator that no rack has.
type Missing struct {
	Object string `json:"object"`
	ID     string `json:"id"`
	Claim  string `json:"claim,omitempty"`
}

// Orphans is the difference between the racks and the orchestrator.
type Orphans struct {
	Orphans []Orphan  `json:"orphans"`
	Missing []Missing `json:"missing"`
}

// QuotaBytes is what the orphans cost of the quota.
func (o Orphans) QuotaBytes() (total int64) {
	for _, orphan := range o.Orphans {
		total += orphan.SizeBytes
	}
	return total
}

// contents is what a rack has.
type contents struct {
	rack  *rack.Client
	disks []rack.Disk
	// halfDeleted are disks that the rack failed to delete. No volume uses them: it is deleted, or has another disk.
	halfDeleted []rack.Disk
	snapshots   []rack.Snapshot
	records     []record.Record
}

// readContents lists everything once. An error means that the lists would not be complete.
func readContents(ctx context.Context, racks []*rack.Client) ([]contents, error) {
	all := make([]contents, len(racks))
	group, ctx := errgroup.WithContext(ctx)
	for i, client := range racks {
		all[i].rack = client
		group.Go(func() error {
			for item, err := range client.Disks(ctx, rack.Cursor{}, 0) {
				if err != nil {
					return err
				}
				if item.Value.HalfDeleted() {
					all[i].halfDeleted = append(all[i].halfDeleted, item.Value)
					continue
				}
				all[i].disks = append(all[i].disks, item.Value)
			}
			return nil
		})
		group.Go(func() error {
			for item, err := range client.Snapshots(ctx, rack.Cursor{}, 0) {
				if err != nil {
					return err
				}
				all[i].snapshots = append(all[i].snapshots, item.Value)
			}
			return nil
		})
		group.Go(func() (err error) {
			all[i].records, err = client.Records(ctx)
			return err
		})
	}
	return all, group.Wait()
}

// FindOrphans compares the racks with the orchestrator. It reads each list once. An error means that a rack or the
// orchestrator could not be read completely; then nothing is known to be an orphan.
//
// The racks are read first: the orchestrator's object exists before the disk does, or the disk is younger than
// [MinOrphanAge].
func FindOrphans(
	ctx context.Context, racks []*rack.Client, cluster string, orchestrator orchestrator.Inventorist, now time.Time,
) (Orphans, error) {
	for _, client := range racks {
		if _, err := client.Check(ctx); err != nil {
			return Orphans{}, err
		}
	}
	all, err := readContents(ctx, racks)
	if err != nil {
		return Orphans{}, err
	}
	inventory, err := orchestrator.Inventory(ctx)
	if err != nil {
		return Orphans{}, err
	}
	return compare(all, cluster, inventory, now), nil
}

// known are the IDs and names that the orchestrator knows.
type known struct{ ids, names map[string]bool }

func knownOf(objects []orchestrator.KnownObject, name func(csiName string) string) known {
	k := known{ids: map[string]bool{}, names: map[string]bool{}}
	for _, object := range objects {
		if id, ok := diskname.ParseID(object.ID); ok {
			k.ids[id] = true
		} else if object.CSIName != "" {
			k.names[name(object.CSIName)] = true
		}
	}
	return k
}

func (k known) has(id, name string) bool { return k.ids[id] || k.names[name] }

// keepIfDoubtful keeps an orphan that may belong to a volume that is being created, or to another cluster.
func (o *Orphan) keepIfDoubtful(now time.Time, knownDisks int) {
	if age := now.Sub(o.Created); o.Keep == "" && (o.Created.IsZero() || age < MinOrphanAge) {
		o.Keep = "it is younger than a day"
	}
	// A wrong kubeconfig or address would make every disk of the cluster an orphan.
	if knownDisks == 0 && (o.Kind == KindDisk || o.Kind == KindSnapshot || o.Kind == KindExpansion) {
		o.Keep = "the orchestrator knows no disk of this rack at all: it may be another cluster's"
	}
}

func compare(all []contents, cluster string, inventory orchestrator.Inventory, now time.Time) Orphans {
	volumes := knownOf(inventory.Volumes, func(name string) string { return diskname.ForVolume(cluster, name) })
	snapshots := knownOf(inventory.Snapshots, func(name string) string { return diskname.ForSnapshot(cluster, name) })
	var found Orphans
	onRacks, knownDisks := map[string]bool{}, 0
	for _, c := range all {
		owners := controller.Adoptions(c.records)
		for _, disk := range c.disks {
			onRacks[disk.VolumeID] = true
			switch {
			case volumes.has(disk.VolumeID, disk.Name):
				knownDisks++
			case ownedBy(disk.Description, owners[disk.VolumeID]) == cluster:
				found.Orphans = append(found.Orphans, diskOrphan(c.rack, disk, cluster))
			}
		}
		for _, snapshot := range c.snapshots {
			onRacks[snapshot.ID] = true
			ours := ownedBy(snapshot.Description, owners[snapshot.VolumeID]) == cluster
			switch {
			case snapshot.Expansion():
				if o, orphan := expansionOrphan(c.rack, snapshot, volumes); ours && orphan && !onRacks[o.ID] {
					found.Orphans = append(found.Orphans, o)
				}
				onRacks[snapshot.VolumeID] = true // the volume's disk may be missing until its expansion is finished
			case ours && !snapshots.has(snapshot.ID, snapshot.Name) && (snapshot.Temporary() || !inventory.SnapshotsUnknown):
				found.Orphans = append(found.Orphans, snapshotOrphan(c.rack, snapshot, cluster))
			}
		}
		found.Orphans = append(found.Orphans, recordOrphans(c, cluster)...)
	}
	for i := range found.Orphans {
		found.Orphans[i].keepIfDoubtful(now, knownDisks)
	}
	slices.SortFunc(found.Orphans, func(a, b Orphan) int {
		return cmp.Or(
			strings.Compare(string(a.Kind), string(b.Kind)),
			a.Created.Compare(b.Created),
			strings.Compare(a.ID, b.ID),
		)
	})
	found.Missing = slices.Concat(missing(inventory.Volumes, onRacks), missing(inventory.Snapshots, onRacks))
	return found
}

// ownedBy is the cluster that owns a disk or snapshot: the one that adopted the disk, or else the one that made it.
func ownedBy(description, adoptedBy string) string {
	described, _ := rack.ParseDescription(description)
	return cmp.Or(adoptedBy, described.Cluster)
}

func missing(objects []orchestrator.KnownObject, onRacks map[string]bool) (gone []Missing) {
	for _, object := range objects {
		id, ok := diskname.ParseID(object.ID)
		if object.ID != "" && (!ok || !onRacks[id]) {
			gone = append(gone, Missing{Object: object.Object, ID: object.ID, Claim: object.Claim})
		}
	}
	return gone
}

func diskOrphan(client *rack.Client, disk rack.Disk, cluster string) Orphan {
	name, claim := rack.FullNames(diskname.Volume, disk.Description)
	described, _ := rack.ParseDescription(disk.Description)
	o := Orphan{
		Kind: KindDisk, ID: disk.VolumeID, Rack: client.Name(), RackName: disk.Name, Name: name, Claim: claim,
		SizeBytes: disk.SizeBytes, Created: disk.Created,
	}
	switch {
	case disk.Unknown != "":
		o.Keep = fmt.Sprintf("it has the %s, which this version of the plugin does not know", disk.Unknown)
	case disk.InstanceID != "":
		o.Keep = "it is attached to instance " + disk.InstanceID
	case disk.State != rack.Detached:
		o.Keep = fmt.Sprintf("it is in state %q", disk.State)
	case described.Cluster == cluster && (name == "" || diskname.ForVolume(cluster, name) != disk.Name):
		o.Keep = "it is not certainly this plugin's: its name does not follow from its description"
	}
	return o
}

func snapshotOrphan(client *rack.Client, snapshot rack.Snapshot, cluster string) Orphan {
	kind, nameKind, nameOf := KindSnapshot, diskname.Snapshot, diskname.ForSnapshot
	if snapshot.Temporary() {
		kind, nameKind, nameOf = KindTemporary, diskname.Clone, diskname.ForClone
	}
	name, _ := rack.FullNames(nameKind, snapshot.Description)
	o := Orphan{
		Kind: kind, ID: snapshot.ID, Rack: client.Name(), RackName: snapshot.Name, Name: name,
		SizeBytes: snapshot.SizeBytes, Created: snapshot.Created,
	}
	described, _ := rack.ParseDescription(snapshot.Description)
	switch {
	case snapshot.State != rack.SnapshotReady:
		o.Keep = fmt.Sprintf("it is in state %q", snapshot.State)
	case name == "" || nameOf(described.Cluster, name) != snapshot.Name:
		o.Keep = "it is not certainly this plugin's: its name does not follow from its description"
	}
	return o
}

// expansionOrphan is the snapshot of an expansion of a volume that the orchestrator does not know.
func expansionOrphan(
	client *rack.Client, snapshot rack.Snapshot, volumes known,
) (o Orphan, orphan bool) {
	described, _ := rack.ParseDescription(snapshot.Description)
	name, claim := rack.FullNames(diskname.Volume, snapshot.Description)
	if volumes.has(snapshot.VolumeID, diskname.ForVolume(described.Cluster, name)) {
		return Orphan{}, false
	}
	o = Orphan{
		Kind: KindExpansion, ID: snapshot.VolumeID, Rack: client.Name(), RackName: snapshot.Name, Name: name, Claim: claim,
		SizeBytes: snapshot.SizeBytes, Created: snapshot.Created,
	}
	switch {
	case snapshot.CheckKnown() != nil:
		o.Keep = fmt.Sprintf("it is in state %q", snapshot.State)
	case name == "":
		o.Keep = "it is not certain which volume it belongs to: its description has no name"
	}
	return o, true
}

// recordOrphans are records of adoptions and of deferred detaches whose disk is gone. The records of restarts belong to
// the controllers, which end what another controller began.
func recordOrphans(c contents, cluster string) (orphans []Orphan) {
	exists := map[string]bool{}
	for _, disk := range c.disks {
		exists[disk.VolumeID] = true
	}
	for _, snapshot := range c.snapshots {
		if snapshot.Expansion() {
			exists[snapshot.VolumeID] = true
		}
	}
	add := func(r record.Record, volumeID string) {
		if !exists[volumeID] {
			orphans = append(orphans, Orphan{
				Kind: KindRecord, ID: r.ID, Rack: c.rack.Name(), RackName: r.Name, Created: r.Created,
			})
		}
	}
	adoptions, _ := record.Adoptions.In(c.records, "")
	for _, a := range adoptions {
		if a.Cluster == cluster {
			add(a.Stored, a.VolumeID)
		}
	}
	deferrals, _ := record.Deferrals.In(c.records, cluster)
	for _, d := range deferrals {
		add(d.Stored, d.VolumeID)
	}
	return orphans
}

// Cleaner deletes orphans.
type Cleaner struct {
	Racks        []*rack.Client
	Cluster      string
	Orchestrator orchestrator.Inventorist
	// Service deletes volumes and snapshots, with all checks that it makes for an orchestrator.
	Service *controller.Service
	// Now is the time by which an orphan's age counts.
	Now func() time.Time
}

// Delete deletes the orphans with these IDs. It looks for them again first, because the orchestrator's objects may have
// changed meanwhile, and deletes nothing if one of them is no orphan any more or must be kept. It returns those that it
// deleted.
func (c Cleaner) Delete(ctx context.Context, ids []string) (deleted []Orphan, err error) {
	found, err := FindOrphans(ctx, c.Racks, c.Cluster, c.Orchestrator, c.Now())
	if err != nil {
		return nil, err
	}
	var chosen []Orphan
	for _, id := range ids {
		i := slices.IndexFunc(found.Orphans, func(o Orphan) bool { return o.ID == id })
		switch {
		case i < 0:
			return nil, fmt.Errorf("%s is no orphan: nothing was deleted; list the orphans again", id)
		case found.Orphans[i].Keep != "":
			return nil, fmt.Errorf(
				"%s %s is kept, because %s: nothing was deleted",
				found.Orphans[i].Kind,
				id,
				found.Orphans[i].Keep,
			)
		}
		chosen = append(chosen, found.Orphans[i])
	}
	for _, orphan := range chosen {
		if err := c.deleteOne(ctx, orphan); err != nil {
			return deleted, fmt.Errorf("delete %s %s: %w", orphan.Kind, orphan.ID, err)
		}
		deleted = append(deleted, orphan)
	}
	return deleted, nil
}

func (c Cleaner) deleteOne(ctx context.Context, orphan Orphan) (err error) {
	client := c.Racks[slices.IndexFunc(c.Racks, func(r *rack.Client) bool { return r.Name() == orphan.Rack })]
	switch orphan.Kind {
	case KindDisk, KindExpansion:
		_, err = c.Service.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: orphan.ID})
		return err
	case KindSnapshot:
		_, err = c.Service.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: orphan.ID})
		return err
	case KindTemporary:
		err = client.DeleteSnapshot(ctx, orphan.ID)
	case KindRecord:
		err = client.DeleteRecord(ctx, orphan.ID)
	}
	if errors.Is(err, rack.ErrNotFound) {
		return client.ConfirmProject(ctx)
	}
	return err
}
