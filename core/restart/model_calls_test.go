// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// modelView is the rack and the orchestrator as the current activity sees them.
type modelView struct{ m *model }

// modelCall is the call that an activity waits for.
type modelCall struct {
	name string
	// do carries the call out and returns its result. The model is a parameter because a late call may arrive in a copy.
	do func(m *model) (any, error)
	// mutates is true if the call changes the modelled world.
	mutates bool
	// asks is true if the call goes to the orchestrator instead of the rack.
	asks bool
	// ready reports whether the call can return now. Nil means always.
	ready func() bool
	// text is the record that the call writes.
	text string
	// choice is true for a wait; the scheduler decides whether it is over.
	choice bool
}

// lateCall is a call that arrives after the process that sent it has died.
type lateCall struct {
	// during are the takeovers that had begun when the call was sent.
	during                      []string
	process, holder, name, text string
	do                          func(m *model) (any, error)
}

type nothing = struct{}

func call[T any](v *modelView, c modelCall, do func(m *model) (T, error)) (T, error) {
	c.do = func(m *model) (any, error) { return do(m) }
	value, err := v.m.call(c)
	got, _ := value.(T)
	return got, err
}

func read(name string) modelCall   { return modelCall{name: name} }
func change(name string) modelCall { return modelCall{name: name, mutates: true} }
func ask(name string) modelCall    { return modelCall{name: name, asks: true} }
func askFor(name string) modelCall { return modelCall{name: name, asks: true, mutates: true} }

func (m *model) call(c modelCall) (any, error) {
	a := m.current
	if !a.yield(c) {
		panic(abandoned{})
	}
	return a.value, a.err
}

// --- the rack

func (d *modelDisk) view() rack.Disk {
	disk := rack.Disk{VolumeID: d.id, ID: rack.DiskID(d.backing), Name: d.id[len(d.id)-4:], State: rack.Detached}
	if d.instance != "" {
		disk.State, disk.InstanceID = rack.Attached, d.instance
	}
	return disk
}

func (v *modelView) Disk(_ context.Context, id string) (rack.Disk, error) {
	return call(v, read("disk "+id), func(m *model) (rack.Disk, error) {
		switch d := m.disk(id); {
		case d.deleted:
			return rack.Disk{}, rack.ErrNotFound
		case d.replaced:
			return rack.Disk{}, rack.ErrReplaced
		default:
			return d.view(), nil
		}
	})
}

func (v *modelView) Instance(_ context.Context, id string) (rack.Instance, error) {
	return call(v, read("instance "+id), func(m *model) (rack.Instance, error) { return m.found(id) })
}

// found returns an instance that exists.
func (m *model) found(id string) (rack.Instance, error) {
	if i := m.instance(id); i.run != runDeleted {
		return i.view(), nil
	}
	return rack.Instance{}, rack.ErrNotFound
}

func (v *modelView) Disks(context.Context, rack.Cursor, int) iter.Seq2[rack.ListItem[rack.Disk], error] {
	panic("scenarios have fewer disks than a tick lists")
}

func (v *modelView) Instances(context.Context) ([]rack.Instance, error) {
	panic("scenarios have fewer instances than a tick lists")
}

func (v *modelView) InstanceDisks(_ context.Context, id string) ([]rack.Disk, error) {
	return call(v, read("instance disks "+id), func(m *model) ([]rack.Disk, error) {
		_, err := m.found(id)
		return m.disksOf(id), err
	})
}

func (m *model) disksOf(instance string) []rack.Disk {
	var disks []rack.Disk
	for _, d := range m.disks {
		if d.instance == instance {
			disks = append(disks, d.view())
		}
	}
	return disks
}

func (v *modelView) Attach(_ context.Context, backing rack.DiskID, instance string) (rack.Disk, error) {
	byRestart := v.m.current.tick
	return call(v, change("attach "+string(backing)+" to "+instance), func(m *model) (rack.Disk, error) {
		d, err := m.diskBacked(backing)
		if err == nil {
			_, err = m.found(instance)
		}
		switch {
		case err != nil:
			return rack.Disk{}, err
		case d.instance == instance:
		case d.instance != "":
			return rack.Disk{}, fmt.Errorf("attached elsewhere: %w", rack.ErrRefused)
		case m.instance(instance).run != rack.Stopped:
			return rack.Disk{}, rack.ErrNotStopped
		case len(m.disksOf(instance)) >= m.scenario.room():
			return rack.Disk{}, rack.ErrFull
		default:
			d.instance, d.late = instance, !byRestart && m.looked(instance)
		}
		return d.view(), nil
	})
}

func (v *modelView) Detach(_ context.Context, backing rack.DiskID, instance string) (rack.Disk, error) {
	byRestart := v.m.current.tick
	return call(v, change("detach "+string(backing)+" from "+instance), func(m *model) (rack.Disk, error) {
		d, err := m.diskBacked(backing)
		if err != nil {
			return rack.Disk{}, err
		}
		return m.detach(d, instance, byRestart)
	})
}

func (m *model) detach(d *modelDisk, instance string, byRestart bool) (rack.Disk, error) {
	i := m.instance(instance)
	// A rack with hot-plug would take the disk from a guest that uses it.
	if byRestart && d.instance == instance && i.run != rack.Stopped && !i.ownerActed {
		m.fail("a restart detaches disk %s from instance %s, which is %s", d.id, instance, i.run)
	}
	switch {
	case d.instance == "":
	case d.instance != instance:
		return rack.Disk{}, fmt.Errorf("attached elsewhere: %w", rack.ErrRefused)
	case i.run != rack.Stopped:
		return rack.Disk{}, rack.ErrNotStopped
	default:
		d.instance, d.late = "", false
	}
	return d.view(), nil
}

func (v *modelView) StopInstance(_ context.Context, id string) error {
	for _, w := range v.m.current.process.engine.held {
		if w.record.Instance == id && w.recovering && v.m.instance(id).run != rack.Failed {
			v.m.fail("instance %s is stopped by a process that should only bring it back", id)
		}
	}
	_, err := call(v, change("stop "+id), func(m *model) (nothing, error) {
		_, err := m.found(id)
		if i := m.instance(id); i.run == rack.Running {
			// Without an interruption, the rack has just shown this run state.
			if i.cooling && m.scenario.switches == 0 {
				m.fail("instance %s is stopped in its cool-down", id)
			}
			m.changeRun(i, "stopping")
			m.bringDown(i)
		}
		return nothing{}, err
	})
	return err
}

func (v *modelView) StartInstance(_ context.Context, id string) (rack.Instance, error) {
	recovers := false
	for _, h := range v.m.current.process.engine.held {
		recovers = recovers || h.record.Instance == id && h.recovering
	}
	return call(v, change("start "+id), func(m *model) (rack.Instance, error) {
		i := m.instance(id)
		switch i.run {
		case rack.Stopped:
			if i.stoppedByOwner {
				m.fail("instance %s was stopped by its owner, and was started by a process", id)
			}
			m.checkGrowthAtStart(id)
			m.changeRun(i, "starting")
			i.broughtBack = i.down && !recovers
		case rack.Running, "starting":
		case runDeleted:
			return rack.Instance{}, rack.ErrNotFound
		default:
			return rack.Instance{}, rack.ErrConflict
		}
		return i.view(), nil
	})
}

// WaitForDisk is no call: no disk of the model is in a transient state.
func (v *modelView) WaitForDisk(_ context.Context, disk rack.Disk, _ time.Duration) (rack.Disk, error) {
	return disk, nil
}

// ConfirmProject is no call of its own: its answer follows that of the call before.
func (v *modelView) ConfirmProject(context.Context) error {
	if v.m.hidden {
		return errTransient
	}
	return nil
}

// --- the records

func (v *modelView) Records(context.Context) ([]record.Record, error) {
	a := v.m.current
	return call(v, read("records"), func(m *model) ([]record.Record, error) {
		a.hasListed = a.tick
		var records []record.Record
		for _, name := range sortedKeys(m.records) {
			records = append(records, m.records[name])
		}
		return records, nil
	})
}

func (v *modelView) CreateRecord(_ context.Context, name, text string) (record.Record, error) {
	return call(v, modelCall{name: "create " + name, mutates: true, text: text}, func(m *model) (record.Record, error) {
		if _, taken := m.records[name]; taken {
			return record.Record{}, rack.ErrAlreadyExists
		}
		// A record that is deleted and created again gets another ID.
		n := 0
		for m.remembered(fmt.Sprintf("%s/%d", name, n)) {
			n++
		}
		m.records[name] = record.Record{ID: fmt.Sprintf("%s/%d", name, n), Name: name, Text: text}
		return m.records[name], nil
	})
}

// remembered reports whether a process may know a record by this ID.
func (m *model) remembered(recordID string) bool {
	for _, p := range m.processes {
		if _, seen := p.engine.lastSeen[recordID]; seen {
			return true
		}
		for _, w := range p.engine.held {
			if w.record.Stored.ID == recordID || w.takenFrom == recordID {
				return true
			}
		}
	}
	return false
}

func (m *model) recordName(id string) (string, bool) {
	for name, r := range m.records {
		if r.ID == id {
			return name, true
		}
	}
	return "", false
}

// RecordNamed is [rack.Client.RecordNamed].
func (v *modelView) RecordNamed(_ context.Context, name string) (found record.Record, exists bool, err error) {
	found, err = call(v, read("record "+name), func(m *model) (record.Record, error) {
		return m.records[name], nil
	})
	if errors.Is(err, rack.ErrNotFound) {
		err = nil
	}
	return found, found.ID != "", err
}

func (v *modelView) UpdateRecord(_ context.Context, id, text string) (found bool, err error) {
	a := v.m.current
	found, err = call(v, modelCall{name: "update " + id, mutates: true, text: text}, func(m *model) (bool, error) {
		name, ok := m.recordName(id)
		if !ok {
			return false, nil
		}
		r := m.records[name]
		if !strings.Contains(r.Text, mayStop) && strings.Contains(text, mayStop) {
			m.checkWanted(a, name, text)
			for _, i := range m.instances {
				i.broughtBack = i.broughtBack && !strings.Contains(text, i.id)
			}
		}
		r.Text = text
		m.records[name] = r
		return true, nil
	})
	return found, v.confirmGone(err)
}

func (v *modelView) DeleteRecord(_ context.Context, id string) error {
	_, err := call(v, change("delete "+id), func(m *model) (nothing, error) {
		if name, ok := m.recordName(id); ok {
			delete(m.records, name)
		}
		return nothing{}, nil
	})
	return v.confirmGone(err)
}

// confirmGone is what [rack.Client] does with a 404 about a record.
func (v *modelView) confirmGone(err error) error {
	if errors.Is(err, rack.ErrNotFound) {
		return v.ConfirmProject(context.Background())
	}
	return err
}

// deleteRecordNamed is [rack.Client.DeleteRecordNamed].
func (v *modelView) deleteRecordNamed(name string) error {
	_, err := call(v, change("delete "+name), func(m *model) (nothing, error) {
		delete(m.records, name)
		return nothing{}, nil
	})
	return err
}

// deleteDisk deletes a detached disk.
func (v *modelView) deleteDisk(id string) error {
	_, err := call(v, change("delete disk "+id), func(m *model) (nothing, error) {
		d := m.disk(id)
		if d.instance != "" {
			return nothing{}, rack.ErrRefused
		}
		d.deleted = true
		return nothing{}, nil
	})
	return err
}

// --- the orchestrator

// reach returns an error for a node that the orchestrator cannot reach.
func (m *model) reach(instance string) (*modelInstance, error) {
	if i := m.instance(instance); i.guest != guestLost {
		return i, nil
	}
	return nil, errTransient
}

func (v *modelView) Request(_ context.Context, instance, id string) error {
	_, err := call(v, askFor("ask "+instance), func(m *model) (nothing, error) {
		i, err := m.reach(instance)
		if err != nil {
			return nothing{}, err
		}
		if m.scenario.shutdown == Drain && i.drain != drainDone && !i.ownerActed {
			m.fail("instance %s is asked to shut down before its node is drained", instance)
		}
		if i.request != id {
			i.request, i.reply = id, orchestrator.RestartReply{}
		}
		return nothing{}, nil
	})
	return err
}

func (v *modelView) Reply(_ context.Context, instance, id string) (orchestrator.RestartReply, error) {
	return call(v, ask("answer "+instance), func(m *model) (orchestrator.RestartReply, error) {
		i, err := m.reach(instance)
		if err != nil || i.request != id {
			return orchestrator.RestartReply{}, err
		}
		return i.reply, nil
	})
}

func (v *modelView) Withdraw(_ context.Context, instance, id string) (orchestrator.RestartReply, error) {
	return call(v, askFor("withdraw "+instance), func(m *model) (orchestrator.RestartReply, error) {
		i, err := m.reach(instance)
		if err != nil || i.request != id {
			return orchestrator.RestartReply{}, err
		}
		said := i.reply
		if said.State != orchestrator.RestartAccepted {
			i.request, i.reply = "", orchestrator.RestartReply{}
		}
		return said, nil
	})
}

func (v *modelView) Forget(_ context.Context, instance, id string) error {
	_, err := call(v, askFor("forget "+instance), func(m *model) (nothing, error) {
		i, err := m.reach(instance)
		if err == nil && i.request == id {
			i.request, i.reply = "", orchestrator.RestartReply{}
		}
		return nothing{}, err
	})
	return err
}

func (v *modelView) Report(context.Context, string, orchestrator.Report) error { return nil }

func (v *modelView) Drain(_ context.Context, instance, _ string) (left []string, err error) {
	return call(v, askFor("drain "+instance), func(m *model) ([]string, error) {
		i, err := m.reach(instance)
		switch {
		case err != nil:
			return nil, err
		case i.drain == drainDone:
			return nil, nil
		case i.drain == drainNone:
			i.drain = drainStarted
		}
		return []string{"work"}, nil
	})
}

func (v *modelView) Undrain(_ context.Context, instance, _ string) error {
	_, err := call(v, askFor("undrain "+instance), func(m *model) (nothing, error) {
		i, err := m.reach(instance)
		if err == nil {
			i.drain = drainNone
		}
		return nothing{}, err
	})
	return err
}
