// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package expand

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
)

// intentPrefix is followed by the volume ID. It is permanent: a newer version must find the records of an older one. In
// a list by name the intents come before the decisions, as [Expander.Yield] has to read them.
const intentPrefix = "csi-expand-"

// intent is the record of an expansion under way. Its JSON names are permanent.
type intent struct {
	Version int    `json:"v"`
	Cluster string `json:"cluster"`
	Volume  string `json:"vol"`
	// Disk is the disk that is replaced.
	Disk      rack.DiskID `json:"disk"`
	Attempt   string      `json:"try"`
	SizeBytes int64       `json:"bytes"`

	recordID string
}

func parseIntent(record rack.Record) (intent, bool) {
	i := intent{recordID: record.ID}
	volume, named := strings.CutPrefix(record.Name, intentPrefix)
	if !named || json.Unmarshal([]byte(record.Text), &i) != nil || i.Version < 1 || i.Volume != volume {
		return intent{}, false
	}
	return i, true
}

// recordSet are the intents and decisions in a list of a rack's records.
type recordSet struct {
	intents   map[string]intent                // by volume
	decisions map[rack.DiskID]rack.Replacement // by replaced disk
}

// parseRecords reads a list of records. It leaves out other records and unreadable ones.
func parseRecords(records []rack.Record) recordSet {
	set := recordSet{intents: map[string]intent{}, decisions: map[rack.DiskID]rack.Replacement{}}
	for _, record := range records {
		if i, ok := parseIntent(record); ok {
			set.intents[i.Volume] = i
		} else if d, ok := rack.ParseReplacement(record); ok {
			set.decisions[d.Disk] = d
		}
	}
	return set
}

// volumes returns the volumes that the records are about, sorted.
func (s recordSet) volumes() []string {
	volumes := slices.Collect(maps.Keys(s.intents))
	for _, d := range s.decisions {
		volumes = append(volumes, d.Volume)
	}
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
func (s recordSet) underWay(d rack.Replacement) bool {
	return d.Committed && s.intents[d.Volume].Attempt == d.Attempt
}

// names reports whether a record names the snapshot of an attempt.
func (s recordSet) names(attempt string) bool {
	for _, i := range s.intents {
		if i.Attempt == attempt {
			return true
		}
	}
	for _, d := range s.decisions {
		if d.Attempt == attempt {
			return true
		}
	}
	return false
}

// intent returns the intent of a volume.
func (e *Expander) intent(ctx context.Context, volumeID string) (intent, bool, error) {
	return recordOf(ctx, e.rack, intentPrefix+volumeID, parseIntent)
}

// decision returns the decision about a disk.
func (e *Expander) decision(ctx context.Context, diskID rack.DiskID) (rack.Replacement, bool, error) {
	return recordOf(ctx, e.rack, rack.ReplacementPrefix+string(diskID), rack.ParseReplacement)
}

// decisionOf returns the decision of an attempt.
func (e *Expander) decisionOf(ctx context.Context, i intent) (rack.Replacement, bool, error) {
	d, found, err := e.decision(ctx, i.Disk)
	return d, found && d.Attempt == i.Attempt, err
}

// recordOf reads a record by its name.
func recordOf[T any](ctx context.Context, r Rack, name string, parse func(rack.Record) (T, bool)) (T, bool, error) {
	var zero T
	record, err := r.RecordNamed(ctx, name)
	if errors.Is(err, rack.ErrNotFound) {
		return zero, false, nil
	}
	if err != nil {
		return zero, false, err
	}
	parsed, ok := parse(record)
	if !ok {
		return zero, false, fmt.Errorf(
			"anti-affinity group %q is no record: delete it: %w", record.Name, rack.ErrConflict)
	}
	return parsed, true, nil
}
