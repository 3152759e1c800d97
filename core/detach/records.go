// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package detach

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
)

// Prefixes of the records' names. They are permanent: a newer version must find the records of an older one. In a list
// by name the deferred detaches come before the records of detaching processes, as a publish has to read them.
const (
	deferredPrefix  = "csi-detach-"
	detachingPrefix = "csi-detaching-"
)

// Deferred is the record of a deferred detach. Its JSON names are permanent.
type Deferred struct {
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
	// Changes counts the changes of the record, so that no text of a record comes a second time: how long a process has
	// known a record is measured by its text.
	Changes int `json:"n,omitempty"`

	recordID, text string
}

// Unchanged reports whether a record has the same text as when it was read before.
func (d Deferred) Unchanged(before Deferred) bool {
	return d.recordID == before.recordID && d.text == before.text
}

// maxEarlier is how many earlier instances a record has room for.
const maxEarlier = 6

// replacedBy returns the deferred detach of the same volume from another instance, which remembers this one. It is over
// if the volume was unpublished from that instance before.
func (d Deferred) replacedBy(wanted Deferred) Deferred {
	wanted.Over = slices.Contains(d.Earlier, wanted.Instance)
	for _, instance := range slices.Concat([]string{d.Instance}, d.Earlier) {
		known := instance == wanted.Instance || slices.Contains(wanted.Earlier, instance)
		if !known && len(wanted.Earlier) < maxEarlier {
			wanted.Earlier = append(wanted.Earlier, instance)
		}
	}
	return wanted
}

// detaching is the record of a process that is detaching a disk. Its JSON names are permanent.
type detaching struct {
	Version  int    `json:"v"`
	Cluster  string `json:"cluster"`
	VolumeID string `json:"disk"`
	// Holder is another one for each attempt to detach.
	Holder string `json:"by"`

	recordID string
}

// Set are the deferred detaches and detaching processes of one cluster in a list of a rack's records.
type Set struct {
	// The maps are keyed by volume ID. records also has the deferred detaches that are over.
	records   map[string]Deferred
	detaching map[string]detaching
}

// Parse reads a list of records. It leaves out other records, those of other clusters, and unreadable ones.
func Parse(records []rack.Record, cluster string) Set {
	set := Set{records: map[string]Deferred{}, detaching: map[string]detaching{}}
	for _, record := range records {
		switch {
		case strings.HasPrefix(record.Name, deferredPrefix):
			d := Deferred{recordID: record.ID, text: record.Text}
			if json.Unmarshal([]byte(record.Text), &d) == nil && d.Cluster == cluster &&
				record.Name == deferredPrefix+d.VolumeID {
				set.records[d.VolumeID] = d
			}
		case strings.HasPrefix(record.Name, detachingPrefix):
			c := detaching{recordID: record.ID}
			if json.Unmarshal([]byte(record.Text), &c) == nil && c.Cluster == cluster &&
				record.Name == detachingPrefix+c.VolumeID {
				set.detaching[c.VolumeID] = c
			}
		}
	}
	return set
}

// Of returns the deferred detach of a volume's disk from that instance, unless it is over.
func (s Set) Of(volumeID, instanceID string) (Deferred, bool) {
	d, ok := s.records[volumeID]
	return d, ok && !d.Over && d.Instance == instanceID
}

// From returns the deferred detaches from an instance that are not over, in a fixed order.
func (s Set) From(instanceID string) (all []Deferred) {
	for _, volumeID := range s.Volumes() {
		if d, ok := s.Of(volumeID, instanceID); ok {
			all = append(all, d)
		}
	}
	return all
}

// Active returns the deferred detach of a volume's disk from any instance, unless it is over.
func (s Set) Active(volumeID string) (Deferred, bool) {
	d, ok := s.records[volumeID]
	return d, ok && !d.Over
}

// Recorded returns the deferred detach of a volume's disk, also one that is over.
func (s Set) Recorded(volumeID string) (Deferred, bool) {
	d, ok := s.records[volumeID]
	return d, ok
}

// Instances returns the instance for each volume whose disk's detach is deferred.
func (s Set) Instances() map[string]string {
	instances := map[string]string{}
	for volumeID, d := range s.records {
		if !d.Over {
			instances[volumeID] = d.Instance
		}
	}
	return instances
}

// Volumes returns the IDs of all volumes that have a record, also one that is over, in a fixed order.
func (s Set) Volumes() []string { return slices.Sorted(maps.Keys(s.records)) }

// Detaching reports whether a process is detaching the volume's disk.
func (s Set) Detaching(volumeID string) bool {
	_, ok := s.detaching[volumeID]
	return ok
}

// Named reports whether a list of records has a deferred detach of the volume's disk or a process that is detaching
// it, of any cluster.
func Named(records []rack.Record, volumeID string) bool {
	return slices.ContainsFunc(records, func(r rack.Record) bool {
		return r.Name == deferredPrefix+volumeID || r.Name == detachingPrefix+volumeID
	})
}

// Erase deletes the deferred detach of a volume's disk, for a process that defers none and publishes the volume.
// Otherwise another process would detach the disk later.
func Erase(ctx context.Context, client *rack.Client, volumeID string) error {
	if err := client.DeleteRecordNamed(ctx, deferredPrefix+volumeID); !errors.Is(err, rack.ErrNotFound) {
		return err
	}
	return nil
}

// EraseOwner deletes all that a cluster has recorded of a volume's detach. The cluster must be gone: no process of it
// may be detaching the disk.
func EraseOwner(ctx context.Context, client *rack.Client, volumeID string) error {
	err := client.DeleteRecordNamed(ctx, detachingPrefix+volumeID)
	if err != nil && !errors.Is(err, rack.ErrNotFound) {
		return err
	}
	return Erase(ctx, client, volumeID)
}

// RecordedVolume returns the ID of the volume whose deferred detach this record holds for the cluster, or "". It does
// not return the volume of the record that a process keeps while it detaches a disk.
func RecordedVolume(record rack.Record, cluster string) (volumeID string) {
	for volumeID := range Parse([]rack.Record{record}, cluster).records {
		return volumeID
	}
	return ""
}
