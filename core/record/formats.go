// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package record

import (
	"encoding/base64"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
)

// The kinds of records. Prefixes and JSON names are permanent: a newer version must read the records of an older one.
// In a list by name, the deferrals come before the holds, and the intents before the replacements: of two records that
// a process writes one after the other, a list of several pages must not miss the first and show the second.
var (
	// Restarts are the planned restarts of a cluster, one for each slot and epoch.
	Restarts = Kind[Restart, *Restart]{prefix: Prefix + "restart-", ofCluster: true}
	// Deferrals are the deferred detaches of a cluster, by volume.
	Deferrals = Kind[Deferral, *Deferral]{prefix: Prefix + "defer-", ofCluster: true}
	// Holds each give one process the right to detach the disk of a volume.
	Holds = Kind[Hold, *Hold]{prefix: Prefix + "hold-", ofCluster: true}
	// Intents are the expansions under way, by the name of the volume's disks: a create of a volume knows nothing else.
	Intents = Kind[Intent, *Intent]{prefix: Prefix + "expand-"}
	// Replacements say which disks are replaced by larger ones, by replaced disk.
	Replacements = Kind[Replacement, *Replacement]{prefix: Prefix + "grown-"}
	// Adoptions say which cluster has adopted a volume, by volume.
	Adoptions = Kind[Adoption, *Adoption]{prefix: Prefix + "adopt-"}
)

// Restart is the record of a planned restart. Its JSON names are short, because it is the longest record.
type Restart struct {
	Version int    `json:"v"`
	Cluster string `json:"cluster"`
	// ID names the restart in all its epochs.
	ID       string `json:"id"`
	Instance string `json:"instance"`
	// Holder is the process that carries the restart out.
	Holder string `json:"by"`
	// Heartbeat changes with each renewal.
	Heartbeat int `json:"beat"`
	// MayStop says that the instance may be stopped for this restart from now on.
	MayStop bool `json:"mayStop,omitempty"`
	// Handover says that another process must take over: the holder runs on this instance, or has ended.
	Handover bool `json:"handover,omitempty"`
	// Stuck says that the node plugin of the running instance cannot be reached, that its guest does not halt, or that
	// the rack does not end the change of its run state.
	Stuck bool `json:"stuck,omitempty"`
	// Volumes are the volumes whose disks to attach, for a process that takes over, see [ShortIDs].
	Volumes []string `json:"disks,omitempty"`
	// Frees is a volume, as in Volumes, whose unpublished disk is on the instance while another instance waits for it. It
	// is set only with Handover, because the process that takes over may have no request for that volume.
	Frees string `json:"frees,omitempty"`

	// Slot and Epoch are in the name.
	Slot   int    `json:"-"`
	Epoch  int    `json:"-"`
	Stored Record `json:"-"`
}

func (r *Restart) base() (*int, *string, *Record) { return &r.Version, &r.Cluster, &r.Stored }
func (r *Restart) key() string                    { return fmt.Sprintf("%d-%d", r.Slot, r.Epoch) }
func (r *Restart) setKey(key string) bool {
	_, err := fmt.Sscanf(key, "%d-%d", &r.Slot, &r.Epoch)
	return err == nil && r.key() == key && r.Slot >= 0 && r.Epoch >= 0 && r.Instance != ""
}

// HandOver marks the record for a takeover. frees is the volume whose disk to free, or "". It takes the space of two
// volumes in the record.
func (r *Restart) HandOver(frees string) {
	r.Handover = true
	if short := ShortIDs([]string{frees}); len(short) > 0 {
		r.Frees, r.Volumes = short[0], r.Volumes[:min(len(r.Volumes), maxShortIDs-2)]
	}
}

// FreedVolume returns the volume whose disk the restart was handed over to free, or "".
func (r *Restart) FreedVolume() string {
	for _, volume := range LongIDs([]string{r.Frees}) {
		return volume
	}
	return ""
}

// maxShortIDs is how many volumes fit into the record of a restart. An instance has at most 12 disks, one of them its
// boot disk.
const maxShortIDs = 11

// ShortIDs returns the 16 bytes of each ID in base64, for at most 11 IDs.
func ShortIDs(ids []string) []string {
	var short []string
	for _, text := range ids {
		if id, err := uuid.Parse(text); err == nil && len(short) < maxShortIDs {
			short = append(short, base64.RawURLEncoding.EncodeToString(id[:]))
		}
	}
	return short
}

// LongIDs is the inverse of [ShortIDs].
func LongIDs(short []string) []string {
	var ids []string
	for _, text := range short {
		if raw, err := base64.RawURLEncoding.DecodeString(text); err == nil && len(raw) == len(uuid.UUID{}) {
			ids = append(ids, uuid.UUID(raw).String())
		}
	}
	return ids
}

// Deferral is the record of a deferred detach.
type Deferral struct {
	Version  int    `json:"v"`
	Cluster  string `json:"cluster"`
	VolumeID string `json:"disk"`
	Instance string `json:"instance"`
	// Untimed says that the end of the grace period does not detach the disk, only an event does.
	Untimed bool `json:"untimed,omitempty"`
	// Over says that the volume was published again, or that the disk was detached.
	Over bool `json:"over,omitempty"`
	// Earlier are the instances from which the volume was unpublished before this one, the last one first. They count as
	// long as the record exists.
	Earlier []string `json:"earlier,omitempty"`
	// NoDevice is since when the instance has been running, by the rack's clock, whose guest may lack the attached disk:
	// the rack failed to plug it in. It is zero for other disks. The next run of the instance shows the disk.
	NoDevice time.Time `json:"noDevice,omitzero"`
	// Changes counts the changes of the record, so that no text of a record comes a second time: how long a process has
	// known a record is measured by its text.
	Changes int `json:"n,omitempty"`

	Stored Record `json:"-"`
}

func (d *Deferral) base() (*int, *string, *Record) { return &d.Version, &d.Cluster, &d.Stored }
func (d *Deferral) key() string                    { return d.VolumeID }
func (d *Deferral) setKey(key string) bool         { return setID(&d.VolumeID, key) }

// Unchanged reports whether a record has the same text as when it was read before.
func (d Deferral) Unchanged(before Deferral) bool {
	return d.Stored.ID == before.Stored.ID && d.Stored.Text == before.Stored.Text
}

// maxEarlier is how many earlier instances a record has room for.
const maxEarlier = 6

// ReplacedBy returns the deferred detach of the same volume from another instance, which remembers this one. It is over
// if the volume was unpublished from that instance before.
func (d Deferral) ReplacedBy(wanted Deferral) Deferral {
	wanted.Over = wanted.Over || slices.Contains(d.Earlier, wanted.Instance)
	for _, instance := range slices.Concat([]string{d.Instance}, d.Earlier) {
		known := instance == wanted.Instance || slices.Contains(wanted.Earlier, instance)
		if !known && len(wanted.Earlier) < maxEarlier {
			wanted.Earlier = append(wanted.Earlier, instance)
		}
	}
	return wanted
}

// Hold is the record of a process that detaches a disk, or deletes a deferred detach that is over.
type Hold struct {
	Version  int    `json:"v"`
	Cluster  string `json:"cluster"`
	VolumeID string `json:"disk"`
	// Holder is another one for each attempt to detach.
	Holder string `json:"by"`

	Stored Record `json:"-"`
}

func (h *Hold) base() (*int, *string, *Record) { return &h.Version, &h.Cluster, &h.Stored }
func (h *Hold) key() string                    { return h.VolumeID }
func (h *Hold) setKey(key string) bool         { return setID(&h.VolumeID, key) }

// Intent is the record of an expansion under way.
type Intent struct {
	Version int    `json:"v"`
	Cluster string `json:"cluster"`
	Volume  string `json:"vol"`
	// Disk is the disk that is replaced.
	Disk diskname.DiskID `json:"disk"`
	// DiskName is the name of this disk and of the one that replaces it.
	DiskName  string `json:"name"`
	Attempt   string `json:"try"`
	SizeBytes int64  `json:"bytes"`

	Stored Record `json:"-"`
}

func (i *Intent) base() (*int, *string, *Record) { return &i.Version, &i.Cluster, &i.Stored }
func (i *Intent) key() string                    { return diskname.ForWork(i.DiskName) }
func (i *Intent) setKey(key string) bool         { return i.key() == key && i.Volume != "" }

// Replacement is the record of a disk that is replaced by a larger one. That of a volume's first disk stays as long as
// the volume, because it leads from the volume's ID to the name of its disk.
type Replacement struct {
	Version int    `json:"v"`
	Cluster string `json:"cluster"`
	// Volume is the ID of the volume. Disk is the replaced disk. They are equal for the volume's first disk.
	Volume string          `json:"vol"`
	Disk   diskname.DiskID `json:"disk"`
	// DiskName is the name of the replaced disk and of all disks that follow it.
	DiskName string `json:"name"`
	// Attempt identifies the expansion. It is a UUID, and part of the name of the expansion's snapshot.
	Attempt string `json:"try"`
	// SizeBytes is the size of the new disk.
	SizeBytes int64 `json:"bytes"`
	// Committed is the decision: the disk is replaced, or the expansion is taken back.
	Committed bool `json:"commit"`

	Stored Record `json:"-"`
}

func (r *Replacement) base() (*int, *string, *Record) { return &r.Version, &r.Cluster, &r.Stored }
func (r *Replacement) key() string                    { return string(r.Disk) }
func (r *Replacement) setKey(key string) bool         { return setID(&r.Disk, key) && r.Volume != "" }

// Adoption is the record of an adopted volume.
type Adoption struct {
	Version int `json:"v"`
	// Cluster is the cluster that owns the volume. From is the cluster that owned it before.
	Cluster  string `json:"cluster"`
	From     string `json:"from"`
	VolumeID string `json:"disk"`

	Stored Record `json:"-"`
}

func (a *Adoption) base() (*int, *string, *Record) { return &a.Version, &a.Cluster, &a.Stored }
func (a *Adoption) key() string                    { return a.VolumeID }
func (a *Adoption) setKey(key string) bool         { return setID(&a.VolumeID, key) }

// setID reports whether the name and the text of a record have the same ID.
func setID[ID ~string](id *ID, key string) bool { return string(*id) == key && key != "" }

// Restarting returns a function that reports whether a restart of an instance is under way. records are all records of
// a rack.
func Restarting(records []Record, cluster string) func(instanceID string) bool {
	instances := map[string]bool{}
	restarts, newer := Restarts.In(records, cluster)
	for _, r := range restarts {
		instances[r.Instance] = true
	}
	for _, n := range newer {
		instances[n.Fields.Instance] = true
	}
	return func(instanceID string) bool { return instances[instanceID] }
}
