// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package diagnose

import (
	"cmp"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// shown reports whether the facts show a fault without a message that has its word.
var shown = map[*fault.Row]func(Facts) bool{
	fault.OtherDriver:      has(orchestrator.OtherDriver),
	fault.SnapshotNotReady: has(orchestrator.SnapshotNotReady),
	fault.ClaimMissing:     has(orchestrator.ClaimMissing),
	fault.NoConsumer:       has(orchestrator.NoConsumer),
	fault.VolumeReleased:   has(orchestrator.Released),
	fault.DiskGone:         func(f Facts) bool { return f.DiskGone },
	fault.DiskFaulted:      func(f Facts) bool { return f.Disk != nil && f.Disk.State == rack.Faulted },
	fault.InstanceDeleted:  func(f Facts) bool { return f.InstanceGone },
	fault.InstanceStopped: func(f Facts) bool {
		return f.Instance != nil && slices.Contains([]string{rack.Stopped, rack.Failed, "stopping"}, f.Instance.RunState)
	},
	fault.DeviceNotFound:   func(f Facts) bool { return f.NoDevice },
	fault.RunsWithoutDisk:  Facts.runsWithoutDisk,
	fault.RunsWithoutMount: Facts.runsWithoutMount,
	fault.RunsWithoutClaim: func(f Facts) bool {
		return f.has(orchestrator.Running) && !f.has(orchestrator.Attached)
	},
	fault.AttachedElsewhere:    func(f Facts) bool { return f.pending() && f.diskElsewhere() },
	fault.ControllerNotRunning: has(orchestrator.NoController),
	fault.ClaimHeld:            has(orchestrator.ClaimOfAnother),
	fault.ClaimTerminating:     has(orchestrator.Terminating),
	fault.WorkloadTerminating:  has(orchestrator.WorkloadTerminating),
	fault.ClaimNotReleased:     unlessRunning(orchestrator.ClaimOfEnded),
	fault.PluginNotRegistered:  has(orchestrator.NotRegistered),
	fault.NodeNotReady:         has(orchestrator.NodeNotReady),
	fault.ExpansionWaits:       has(orchestrator.ExpansionPending),
	fault.StateUnknown:         func(f Facts) bool { return f.Disk != nil && f.Disk.Unknown != "" },
	fault.NotStartedYet:        func(f Facts) bool { return f.pending() && f.RackError == "" && len(f.Messages) == 0 },
}

// runsWithoutDisk reports whether a workload runs, and the rack shows its disk elsewhere or nowhere.
func (f Facts) runsWithoutDisk() bool {
	return f.has(orchestrator.Running) && (f.diskIs(rack.Detached) || f.diskElsewhere())
}

// diskElsewhere reports whether the rack shows the disk on another instance than that of the workload.
func (f Facts) diskElsewhere() bool {
	node, known := diskname.ParseID(f.NodeID)
	return known && f.diskIs(rack.Attached) && f.Disk.InstanceID != node
}

func (f Facts) diskIs(state rack.State) bool {
	return f.Disk != nil && f.Disk.Unknown == "" && f.RackError == "" && f.Disk.State == state
}

// runsWithoutMount reports whether a workload runs, and this machine, which has its disk, has not mounted it. Of an
// encrypted disk another device is mounted.
func (f Facts) runsWithoutMount() bool {
	node, known := diskname.ParseID(f.NodeID)
	if !f.has(orchestrator.Running) || !f.NotMounted || !known || f.Disk.InstanceID != node {
		return false
	}
	described, _ := rack.ParseDescription(f.Disk.Description)
	return described.LUKS == 0
}

func has(condition orchestrator.TraceCondition) func(Facts) bool {
	return func(f Facts) bool { return f.has(condition) }
}

// unlessRunning is [has] for a condition that does no harm to a workload that runs.
func unlessRunning(condition orchestrator.TraceCondition) func(Facts) bool {
	return func(f Facts) bool { return f.has(condition) && !f.has(orchestrator.Running) }
}

// show reports whether the facts show a fault.
func (f Facts) show(row *fault.Row) bool {
	if shows := shown[row]; shows != nil && shows(f) {
		return true
	}
	if row == fault.AttachedElsewhere && f.has(orchestrator.Attached) {
		return false // the message is an old one
	}
	return slices.ContainsFunc(f.messages(), func(m string) bool {
		words := fault.In(m)
		return slices.Contains(words, row) || len(words) == 0 && said[row] != nil && said[row].MatchString(m)
	})
}

// NextFor is the next step of a fault with the commands of an orchestrator.
func NextFor(row *fault.Row, of string) string {
	switch of {
	case orchestrator.Nomad:
		return cmp.Or(row.OnNomad, row.Next)
	case orchestrator.None:
		return cmp.Or(row.OnHosts, row.Next)
	}
	return row.Next
}

// Works is the verdict if nothing is wrong. Unknown is the verdict if the facts show no fault.
var (
	Works = &fault.Row{
		Word:    "Works",
		Verdict: "nothing is wrong with volume {volume}, as far as can be seen",
		Actor:   "nobody",
		Next:    "if the workload still has a problem, its own log is the next place",
	}
	Unknown = &fault.Row{
		Word:    "Unknown",
		Verdict: "volume {volume} waits, for a reason that is not in the table",
		Actor:   fault.Operator,
		Next:    "read the messages below, and the logs of controller and node",
	}
)

// pending reports whether the workload has not started.
func (f Facts) pending() bool {
	return slices.ContainsFunc(f.Steps, func(s orchestrator.TraceStep) bool {
		// The word of Kubernetes and of Nomad.
		return (s.Link == "workload" || s.Link == "claim") && strings.EqualFold(s.State, "pending")
	})
}
