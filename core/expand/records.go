// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package expand

import (
	"encoding/json"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
)

// intentPrefix is followed by the volume ID. It is permanent: a newer version must find the records of an older one. In a
// list by name the intents come before the decisions, as [Expander.Yield] has to read them.
const intentPrefix = "csi-expand-"

// intent is the record of an expansion under way. Its JSON names are permanent.
type intent struct {
	Version int    `json:"v"`
	Cluster string `json:"cluster"`
	Volume  string `json:"vol"`
	// Disk is the disk that is replaced.
	Disk      string `json:"disk"`
	Attempt   string `json:"try"`
	SizeBytes int64  `json:"bytes"`

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

// Set are the intents and decisions in a list of a rack's records.
type Set struct {
	intents   map[string]intent           // by volume
	decisions map[string]rack.Replacement // by replaced disk
}

// Parse reads a list of records. It leaves out other records and unreadable ones.
func Parse(records []rack.Record) Set {
	set := Set{intents: map[string]intent{}, decisions: map[string]rack.Replacement{}}
	for _, record := range records {
		if i, ok := parseIntent(record); ok {
			set.intents[i.Volume] = i
		} else if d, ok := rack.ParseReplacement(record); ok {
			set.decisions[d.Disk] = d
		}
	}
	return set
}

// concerns reports whether an expansion of the volume's disk is recorded.
func (s Set) concerns(disk rack.Disk) bool {
	_, decided := s.decisions[disk.BackingID]
	return decided || s.intents[disk.ID].Disk == disk.BackingID
}

// othersOf reports whether a later disk of the same volume is being replaced.
func (s Set) othersOf(d rack.Replacement) bool {
	if d.Disk != d.Volume {
		return false
	}
	for _, other := range s.decisions {
		if other.Volume == d.Volume && other.Disk != d.Disk && other.Committed {
			return true
		}
	}
	return false
}

// names reports whether a record names the snapshot of an attempt.
func (s Set) names(attempt string) bool {
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
