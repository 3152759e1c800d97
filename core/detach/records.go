// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package detach

import (
	"context"
	"maps"
	"slices"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
)

// Set are the deferred detaches and detaching processes of one cluster in a list of a rack's records.
type Set struct {
	// The maps are keyed by volume ID. records also has the deferred detaches that are over.
	records   map[string]record.Deferral
	detaching map[string]record.Hold
	// newer are the volumes with a record of a newer format.
	newer map[string]error
}

// Parse reads a list of records. It leaves out other records and those of other clusters.
func Parse(records []record.Record, cluster string) Set {
	set := Set{records: map[string]record.Deferral{}, detaching: map[string]record.Hold{}, newer: map[string]error{}}
	deferrals, newerDeferrals := record.Deferrals.In(records, cluster)
	for _, d := range deferrals {
		set.records[d.VolumeID] = d
	}
	holds, newerHolds := record.Holds.In(records, cluster)
	for _, h := range holds {
		set.detaching[h.VolumeID] = h
	}
	for _, n := range newerDeferrals {
		set.newer[n.Fields.VolumeID] = n.Err
	}
	for _, n := range newerHolds {
		set.newer[n.Fields.VolumeID] = n.Err
	}
	return set
}

// Check returns [record.ErrFormat] if the list has a record of the volume that this version cannot read.
func (s Set) Check(volumeID string) error { return s.newer[volumeID] }

// Of returns the deferred detach of a volume's disk from that instance, unless it is over.
func (s Set) Of(volumeID, instanceID string) (record.Deferral, bool) {
	d, ok := s.records[volumeID]
	return d, ok && !d.Over && d.Instance == instanceID
}

// From returns the deferred detaches from an instance that are not over, in a fixed order.
func (s Set) From(instanceID string) (all []record.Deferral) {
	for _, volumeID := range s.Volumes() {
		if d, ok := s.Of(volumeID, instanceID); ok {
			all = append(all, d)
		}
	}
	return all
}

// Active returns the deferred detach of a volume's disk from any instance, unless it is over.
func (s Set) Active(volumeID string) (record.Deferral, bool) {
	d, ok := s.records[volumeID]
	return d, ok && !d.Over
}

// Recorded returns the deferred detach of a volume's disk, also one that is over.
func (s Set) Recorded(volumeID string) (record.Deferral, bool) {
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

// Erase deletes the deferred detach of a volume's disk. No process may be detaching the disk.
func Erase(ctx context.Context, client *rack.Client, cluster, volumeID string) error {
	return client.DeleteRecordNamed(ctx, record.Deferrals.Named(cluster, volumeID))
}

// EraseOwner deletes all that a cluster has recorded of a volume's detach. The cluster must be gone: no process of it
// may be detaching the disk.
func EraseOwner(ctx context.Context, client *rack.Client, cluster, volumeID string) error {
	if err := client.DeleteRecordNamed(ctx, record.Holds.Named(cluster, volumeID)); err != nil {
		return err
	}
	return Erase(ctx, client, cluster, volumeID)
}
