// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/core/detach"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
)

// recordSet is the content of one cluster's records.
type recordSet struct {
	// restarts are the records with the highest epoch of each restart, sorted by slot. A slot has one of them, except
	// after a record was created late, see [Engine.adopt].
	restarts []record.Restart
	// superseded are the records of restarts for which there is a higher epoch.
	superseded []record.Restart
	// all are the records as the rack lists them.
	all      []record.Record
	deferred detach.Set
	// newer are restarts in a newer format. They keep their slots, and this version does nothing with their instances.
	newer []record.Newer[record.Restart]
}

// stillFrees reports whether the disk for which a restart was handed over still has to be freed.
func (b recordSet) stillFrees(r record.Restart) bool {
	return b.detachDeferred(r.FreedVolume(), r.Instance)
}

// freeSlot returns the first slot without a restart. It returns false if maxDown restarts count. A slot is also taken
// by a group that only has the name of its record: no record of that name can be made.
func (b recordSet) freeSlot(cluster string, maxDown int) (slot int, free bool) {
	for slices.ContainsFunc(b.all, func(r record.Record) bool {
		return strings.HasPrefix(r.Name, record.Restarts.Named(cluster, fmt.Sprintf("%d-", slot)))
	}) {
		slot++
	}
	return slot, b.count("", maxDown) < maxDown
}

// count counts the restarts that limit further ones, without the one whose ID is except. Up to maxDown stuck restarts
// do not count. If more are stuck, the cause is hardly a single node, and more restarts would take more nodes down.
func (b recordSet) count(except string, maxDown int) int {
	running, stuck := len(b.newer), 0
	for _, r := range b.restarts {
		switch {
		case r.ID == except:
		case r.Stuck:
			stuck++
		default:
			running++
		}
	}
	return running + max(0, stuck-maxDown)
}

// restartOf returns the restart of an instance whose ID is not except.
func (b recordSet) restartOf(instance, except string) (record.Restart, bool) {
	for _, r := range b.restarts {
		if r.Instance == instance && r.ID != except {
			return r, true
		}
	}
	return record.Restart{}, false
}

// check returns [record.ErrFormat] for an instance whose restart this version cannot read.
func (b recordSet) check(instance string) error {
	for _, n := range b.newer {
		if n.Fields.Instance == instance {
			return n.Err
		}
	}
	return nil
}

// detachDeferred reports whether the detach of the volume's disk from that instance is deferred.
func (b recordSet) detachDeferred(volume, instance string) bool {
	_, ok := b.deferred.Of(volume, instance)
	return ok
}

// frees reports whether the next restart of the instance detaches the volume's disk. A restart for other volumes does
// not carry out an untimed deferred detach, because the volume may be in use.
func (b recordSet) frees(volume, instance string) bool {
	d, ok := b.deferred.Of(volume, instance)
	return ok && !d.Untimed
}

// readRecords lists the records of this cluster.
func (e *Engine) readRecords(ctx context.Context) (recordSet, error) {
	records, err := e.rack.Records(ctx)
	if err != nil {
		return recordSet{}, err
	}
	b := recordSet{all: records, deferred: detach.Parse(records, e.opts.Cluster)}
	b.restarts, b.newer = record.Restarts.In(records, e.opts.Cluster)
	// A newer version has taken these over.
	b.restarts = slices.DeleteFunc(b.restarts, func(r record.Restart) bool {
		return slices.ContainsFunc(b.newer, func(n record.Newer[record.Restart]) bool {
			return n.Fields.Slot == r.Slot && n.Fields.Epoch > r.Epoch
		})
	})
	slices.SortFunc(b.restarts, func(x, y record.Restart) int {
		return cmp.Or(x.Slot-y.Slot, y.Epoch-x.Epoch)
	})
	counting := b.restarts[:0:0]
	for _, r := range b.restarts {
		if slices.ContainsFunc(counting, func(other record.Restart) bool { return other.ID == r.ID }) {
			b.superseded = append(b.superseded, r)
			continue
		}
		counting = append(counting, r)
	}
	b.restarts = counting
	return b, nil
}

// createRestart creates a restart's record. It returns false if another process has created it first.
func (e *Engine) createRestart(ctx context.Context, r record.Restart) (record.Restart, bool, error) {
	made, err := record.Restarts.Create(ctx, e.rack, r)
	if errors.Is(err, rack.ErrAlreadyExists) {
		return r, false, nil
	}
	return made, err == nil, err
}
