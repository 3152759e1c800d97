// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/expand"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
)

// The expansion of one volume's disk is a fault of the kind "expansion". Its controller is not one of the modelled
// processes: it takes the steps of core/expand's documentation, each at any time, and may stop for ever after each one.
// The modelled processes look at the records with core/expand's own code.

// growthPhase is the last step that the expansion has taken.
type growthPhase string

const (
	growthNone      growthPhase = ""
	growthBegun     growthPhase = "begun"     // the intent exists
	growthLooked    growthPhase = "looked"    // the disk was detached, and the snapshot is made
	growthCommitted growthPhase = "committed" // the decision is created
	growthDeleted   growthPhase = "deleted"   // the old disk is deleted
	growthOver      growthPhase = "over"
)

// modelGrowth is the expansion of a run.
type modelGrowth struct {
	phase  growthPhase
	volume string
	// snapshot says that the snapshot exists.
	snapshot bool
}

const (
	growthAttempt = "30000000-0000-4000-8000-000000000000"
	// of core/record
	intentPrefix      = "csi-expand-"
	replacementPrefix = "csi-grown-"
)

// intentName is the name of the record of a disk's expansion.
func intentName(d *modelDisk) string {
	return record.Intents.Named("", diskname.ForWork(d.view().Name))
}

// successor is the ID of the disk that replaces the first disk of a volume.
func successor(volume string) string { return "4" + volume[1:] }

// expansionOptions are the begin and the next step of an expansion.
func (m *model) expansionOptions() {
	if m.growth.phase == growthNone {
		for _, d := range m.disks {
			m.fault("expansion", "begins to grow", d.id, func() { m.beginGrowth(d) })
		}
		return
	}
	d := m.disk(m.growth.volume)
	switch m.growth.phase {
	case growthBegun:
		m.add("looks before it grows", d.id, func() { m.lookBeforeGrowth(d) })
	case growthLooked:
		m.add("commits to grow", d.id, func() { m.commitGrowth(d) })
	case growthCommitted:
		if d.instance == "" || !m.hasIntent(d) { // otherwise the rack refuses to delete the disk
			m.add("deletes the old disk", d.id, func() { m.deleteOldDisk(d) })
		}
	case growthDeleted:
		m.add("makes the new disk", d.id, func() { m.finishGrowth(d) })
	}
}

func (m *model) putRecord(name, text string) {
	// The ID is none of those that the processes' records get.
	m.records[name] = record.Record{ID: name + "/growth", Name: name, Text: text}
}

func (m *model) beginGrowth(d *modelDisk) {
	m.growth = modelGrowth{phase: growthBegun, volume: d.id}
	m.putRecord(intentName(d), fmt.Sprintf(
		`{"v":1,"cluster":%q,"vol":%q,"disk":%q,"name":%q,"try":%q,"bytes":2}`,
		modelCluster, d.id, d.backing, d.view().Name, growthAttempt))
}

func (m *model) lookBeforeGrowth(d *modelDisk) {
	if d.instance == "" {
		m.growth.phase, m.growth.snapshot = growthLooked, true
		return
	}
	m.dropGrowth(d)
}

func (m *model) commitGrowth(d *modelDisk) {
	name := replacementPrefix + d.id
	if _, decided := m.records[name]; decided {
		m.dropGrowth(d) // it was taken back
		return
	}
	m.growth.phase = growthCommitted
	m.putRecord(name, record.Replacements.Text(record.Replacement{
		Cluster:   modelCluster,
		Volume:    d.id,
		Disk:      rack.DiskID(d.id),
		DiskName:  d.view().Name,
		Attempt:   growthAttempt,
		SizeBytes: 2,
		Committed: true,
	}))
}

func (m *model) deleteOldDisk(d *modelDisk) {
	switch {
	case d.backing != d.id:
		m.growth.phase = growthOver // another process has finished the expansion
	case !m.hasIntent(d):
		m.dropGrowth(d) // it was taken back before the commit
	default:
		d.replaced = true
		m.growth.phase = growthDeleted
	}
}

func (m *model) finishGrowth(d *modelDisk) {
	d.backing, d.replaced = successor(d.id), false
	delete(m.records, intentName(d))
	m.growth.phase, m.growth.snapshot = growthOver, false
}

// dropGrowth deletes what is left of an expansion that was taken back.
func (m *model) dropGrowth(d *modelDisk) {
	delete(m.records, intentName(d))
	delete(m.records, replacementPrefix+d.id)
	m.growth.phase, m.growth.snapshot = growthOver, false
}

func (m *model) hasIntent(d *modelDisk) bool {
	_, exists := m.records[intentName(d)]
	return exists
}

// isReplaced reports whether the disk that a volume has is committed to be replaced. Without the intent the commit came
// after the expansion was taken back.
func (m *model) isReplaced(d *modelDisk) bool {
	decisions, _ := record.Replacements.In([]record.Record{m.records[replacementPrefix+d.backing]}, "")
	return len(decisions) > 0 && decisions[0].Committed && m.hasIntent(d)
}

// mayLoseWrites reports whether what a guest writes to an attached disk may be lost: the disk is committed to be
// replaced, or may still be, by an expansion that found it detached.
func (m *model) mayLoseWrites(d *modelDisk) bool {
	_, decided := m.records[replacementPrefix+d.id]
	undecided := m.growth.phase == growthLooked && m.growth.volume == d.id && m.hasIntent(d) && !decided
	return d.instance != "" && (undecided || m.isReplaced(d))
}

// checkGrowth fails if a volume is published on a disk that is being replaced.
func (m *model) checkGrowth(v *modelVolume, d *modelDisk) {
	if v.published != "" && m.mayLoseWrites(d) {
		m.fail("volume %s is published, and its disk is being replaced", v.id)
	}
}

// checkGrowthAtStart fails if an instance is started with a disk that is being replaced.
func (m *model) checkGrowthAtStart(instance string) {
	for _, d := range m.disks {
		if d.instance == instance && !d.late && m.mayLoseWrites(d) {
			m.fail("instance %s is started, and its disk %s is being replaced", instance, d.id)
		}
	}
}

// checkGrowthAfterPublish fails if a publish that has to wait leaves a disk attached that is being replaced. The rack
// does not detach it while its instance runs.
func (m *model) checkGrowthAfterPublish(d *modelDisk) {
	if m.mayLoseWrites(d) && !(m.isReplaced(d) && m.instance(d.instance).run != rack.Stopped) {
		m.fail("a publish left disk %s attached, which is being replaced", d.id)
	}
}

// looked reports whether a restart of a stopped instance has looked at its disks for the last time.
func (m *model) looked(instance string) bool {
	for _, p := range m.processes {
		for _, h := range p.engine.held {
			if h.record.Instance == instance && (h.stage == stageStarting || h.attached != nil) {
				return true
			}
		}
	}
	return false
}

// isStranded reports whether a disk that is replaced waits for the next restart of its instance, which a person causes.
func (m *model) isStranded(d *modelDisk) bool { return d.late && d.instance != "" && m.isReplaced(d) }

// growthSettled reports whether no expansion is under way, and of one that is over only the decision is left.
func (m *model) growthSettled() bool {
	for _, d := range m.disks {
		if m.isStranded(d) {
			return true
		}
		_, decided := m.records[replacementPrefix+d.id]
		if m.hasIntent(d) || d.replaced || decided != (d.backing != d.id) {
			return false
		}
	}
	return !m.growth.snapshot && (m.growth.phase == growthNone || m.growth.phase == growthOver)
}

// yield is what core/controller sets as [Options.Yield].
func (v *modelView) yield(ctx context.Context, disk rack.Disk, records []record.Record) error {
	expander := expand.New(growingRack{v}, modelCluster, slog.New(slog.DiscardHandler))
	err := expander.Yield(ctx, disk, records)
	if errors.Is(err, expand.ErrUnderWay) {
		return fmt.Errorf("%w: %w", err, rack.ErrRefused)
	}
	return err
}

// growingRack is the rack for an expander that gives way, and finishes an expansion or takes it back.
type growingRack struct{ *modelView }

func (r growingRack) DeleteRecordNamed(_ context.Context, name string) error {
	return r.deleteRecordNamed(name)
}

func (m *model) diskWith(what func(d *modelDisk) bool) (*modelDisk, error) {
	i := slices.IndexFunc(m.disks, func(d *modelDisk) bool { return !d.deleted && !d.replaced && what(d) })
	if i < 0 {
		return nil, rack.ErrNotFound
	}
	return m.disks[i], nil
}

func (m *model) diskBacked(backing rack.DiskID) (*modelDisk, error) {
	return m.diskWith(func(d *modelDisk) bool { return d.backing == string(backing) })
}

func (r growingRack) DiskByID(_ context.Context, backing rack.DiskID) (rack.Disk, error) {
	return call(r.modelView, read("backing disk "+string(backing)), func(m *model) (rack.Disk, error) {
		d, err := m.diskBacked(backing)
		if err != nil {
			return rack.Disk{}, err
		}
		return d.view(), nil
	})
}

func (r growingRack) DiskByName(_ context.Context, name string) (rack.Disk, error) {
	return call(r.modelView, read("disk named "+name), func(m *model) (rack.Disk, error) {
		d, err := m.diskWith(func(d *modelDisk) bool { return d.view().Name == name })
		if err != nil {
			return rack.Disk{}, err
		}
		return d.view(), nil
	})
}

func (r growingRack) CreateDisk(_ context.Context, spec rack.DiskSpec) (rack.Disk, error) {
	return call(r.modelView, change("create disk "+spec.Name), func(m *model) (rack.Disk, error) {
		for _, d := range m.disks {
			if d.replaced && d.view().Name == spec.Name {
				d.backing, d.replaced = successor(d.id), false
				return d.view(), nil
			}
		}
		return rack.Disk{}, rack.ErrAlreadyExists
	})
}

func (r growingRack) DeleteDisk(_ context.Context, backing rack.DiskID) error {
	_, err := call(r.modelView, change("delete backing disk "+string(backing)), func(m *model) (nothing, error) {
		d, err := m.diskBacked(backing)
		switch {
		case err != nil:
			return nothing{}, err
		case d.instance != "":
			return nothing{}, rack.ErrRefused
		}
		d.replaced = true
		return nothing{}, nil
	})
	return err
}

func (r growingRack) SnapshotByName(_ context.Context, name string) (rack.Snapshot, error) {
	return call(r.modelView, read("snapshot"), func(m *model) (rack.Snapshot, error) {
		if !m.growth.snapshot || name != diskname.ForExpansion(growthAttempt) {
			return rack.Snapshot{}, rack.ErrNotFound
		}
		return rack.Snapshot{ID: growthAttempt, Name: name, State: rack.SnapshotReady, SizeBytes: 1}, nil
	})
}

func (r growingRack) DeleteSnapshot(context.Context, string) error {
	_, err := call(r.modelView, change("delete snapshot"), func(m *model) (nothing, error) {
		if !m.growth.snapshot {
			return nothing{}, rack.ErrNotFound
		}
		m.growth.snapshot = false
		return nothing{}, nil
	})
	return err
}

const notAtYield = "an expander does this only in a new expansion"

func (growingRack) CreateSnapshot(context.Context, string, string, rack.DiskID) (rack.Snapshot, error) {
	panic(notAtYield)
}

func (growingRack) WaitForSnapshot(context.Context, rack.Snapshot, time.Duration) (rack.Snapshot, error) {
	panic(notAtYield)
}

func (growingRack) Storage(context.Context) (quotaBytes, usedBytes uint64, err error) {
	panic(notAtYield)
}
