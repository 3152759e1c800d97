// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package expand

import (
	"context"
	"errors"
	"maps"
	"slices"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
)

// recordSet are the intents and decisions in a list of a rack's records.
type recordSet struct {
	intents   map[string]record.Intent           // by volume
	decisions map[rack.DiskID]record.Replacement // by replaced disk
	// newer are the volumes with a record of a newer format. attempts has their attempts, too.
	newer    map[string]error
	attempts map[string]bool
}

// parseRecords reads a list of records. It leaves out other records.
func parseRecords(records []record.Record) recordSet {
	set := recordSet{
		intents: map[string]record.Intent{}, decisions: map[rack.DiskID]record.Replacement{},
		newer: map[string]error{}, attempts: map[string]bool{},
	}
	intents, newerIntents := record.Intents.In(records, "")
	for _, i := range intents {
		set.intents[i.Volume], set.attempts[i.Attempt] = i, true
	}
	decisions, newerDecisions := record.Replacements.In(records, "")
	for _, n := range newerIntents {
		set.newer[n.Fields.Volume], set.attempts[n.Fields.Attempt] = n.Err, true
	}
	for _, n := range newerDecisions {
		set.newer[n.Fields.Volume], set.attempts[n.Fields.Attempt] = n.Err, true
	}
	for _, d := range decisions {
		set.decisions[d.Disk], set.attempts[d.Attempt] = d, true
	}
	return set
}

// volumes returns the volumes that the records are about, sorted, without those that this version cannot read.
func (s recordSet) volumes() []string {
	volumes := slices.Collect(maps.Keys(s.intents))
	for _, d := range s.decisions {
		volumes = append(volumes, d.Volume)
	}
	volumes = slices.DeleteFunc(volumes, func(volume string) bool { return s.newer[volume] != nil })
	slices.Sort(volumes)
	return slices.Compact(volumes)
}

// unfinished returns the volumes of a cluster with an expansion that is not finished. hasSnapshot says which attempts
// have a snapshot. The decision about the first disk of a volume stays when its expansion is finished.
func (s recordSet) unfinished(cluster string, hasSnapshot map[string]bool) map[string]bool {
	unfinished := map[string]bool{}
	for volume, i := range s.intents {
		if i.Cluster == cluster {
			unfinished[volume] = true
		}
	}
	for _, d := range s.decisions {
		if d.Cluster == cluster && (d.Disk != rack.DiskID(d.Volume) || !d.Committed || hasSnapshot[d.Attempt]) {
			unfinished[d.Volume] = true
		}
	}
	return unfinished
}

// underWay reports whether a committed expansion is not finished. Its intent is deleted after its new disk was made.
func (s recordSet) underWay(d record.Replacement) bool {
	return d.Committed && s.intents[d.Volume].Attempt == d.Attempt
}

// intent returns the intent of the volume with disks of this name. A group that is none does not count.
func (e *Expander) intent(ctx context.Context, diskName string) (record.Intent, bool, error) {
	i, found, err := record.Intents.Get(ctx, e.rack, "", diskname.ForWork(diskName))
	return i, found, orNone(err)
}

// decision returns the decision about a disk. A group that is none does not count.
func (e *Expander) decision(ctx context.Context, diskID rack.DiskID) (record.Replacement, bool, error) {
	d, found, err := record.Replacements.Get(ctx, e.rack, "", string(diskID))
	return d, found, orNone(err)
}

func orNone(err error) error {
	if errors.Is(err, record.ErrNoRecord) {
		return nil
	}
	return err
}

// decisionOf returns the decision of an attempt.
func (e *Expander) decisionOf(ctx context.Context, i record.Intent) (record.Replacement, bool, error) {
	d, found, err := e.decision(ctx, i.Disk)
	return d, found && d.Attempt == i.Attempt, err
}
