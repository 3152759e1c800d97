// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package diagnose

import (
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/luks"
	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/restart"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// Symptom is a row of the table from which verdicts are made, and docs/how-to/troubleshooting.md.
type Symptom struct {
	// Reason is one permanent word: scripts and alerts may use it, and the page has a heading for it.
	Reason string
	// Link is the broken link of the chain.
	Link string
	// matches reports whether the facts show this symptom.
	matches func(Facts) bool
	// Verdict says what is wrong, Actor who has to act, and Next what to do. They may hold the placeholders of
	// [Facts.fill].
	Verdict, Actor, Next string
	// Why explains it on the page.
	Why string
}

// Actors.
const (
	actorOperator = "you, the operator of the cluster"
	actorRack     = "an operator of the rack"
	actorNobody   = "nobody: this ends by itself"
	actorUser     = "the owner of the workload"
)

// says matches if a message has one of these texts. Texts of a package's errors come from the package.
func says(texts ...string) func(Facts) bool {
	return func(f Facts) bool {
		return slices.ContainsFunc(texts, func(text string) bool { return f.says(text) })
	}
}

func saysError(errs ...error) func(Facts) bool {
	return func(f Facts) bool {
		return slices.ContainsFunc(errs, func(err error) bool { return f.says(err.Error()) })
	}
}

func has(condition metadata.TraceCondition) func(Facts) bool {
	return func(f Facts) bool { return f.has(condition) }
}

func either(matches ...func(Facts) bool) func(Facts) bool {
	return func(f Facts) bool {
		return slices.ContainsFunc(matches, func(match func(Facts) bool) bool { return match(f) })
	}
}

// Symptoms are all symptoms. The first that matches is the verdict: what lies deeper comes first, because the rest
// follows from it.
var Symptoms = []Symptom{
	{
		"TokenRejected", "rack", saysError(rack.ErrUnauthenticated),
		"the rack rejects the plugin's API token", actorOperator,
		"put a valid token of this silo into the token file; the plugin reads it again, without a restart",
		"The token is missing, wrong, expired or revoked. Every call to the rack fails, for all volumes.",
	},
	{
		"ProjectUnusable", "rack", saysError(rack.ErrProject),
		"the project of the settings does not exist, or the token's user has no role on it", actorOperator,
		"correct --oxide-project (OXIDE_PROJECT), or give the user the role limited-collaborator on the project",
		"A rack answers 404 for a project that a user may not see. So a wrong name and a missing role look the same.",
	},
	{
		"RoleTooLow", "rack", saysError(rack.ErrForbidden),
		"the token's role allows to read, but not to change", actorOperator,
		"give the token's user the role limited-collaborator (collaborator on racks before release 17) on the project",
		"Disks can be listed, and nothing can be created, attached or deleted.",
	},
	{
		"OtherDriver",
		"claim",
		has(metadata.OtherDriver),
		"claim {claim} has a storage class that is not this plugin's",
		actorUser,
		"kubectl get storageclass; then create the claim again with a class whose provisioner is csi.oxide.computer",
		"The class of a claim never changes. A class that does not exist, or names another driver, does not reach the plugin.",
	},
	{
		"SnapshotNotReady", "claim", has(metadata.SnapshotNotReady),
		"claim {claim} waits for its snapshot, which is not ready", actorUser,
		"kubectl describe volumesnapshot: its status has the reason",
		"The provisioner creates the volume when the VolumeSnapshot has readyToUse: true.",
	},
	{
		"QuotaExhausted", "disk", saysError(rack.ErrCapacity),
		"the silo's quota, or the rack's space, is too small for the volume", actorRack,
		"oxide-csi orphans shows what can be deleted; otherwise ask for more quota",
		"Disks and snapshots of all projects of the silo count. A clone needs its size once more for a moment.",
	},
	{
		"DiskGone", "disk", func(f Facts) bool { return f.DiskGone },
		"no rack has the disk of volume {volume}", actorOperator,
		"restore the data from a snapshot or a backup into a new volume; oxide-csi orphans lists all such volumes",
		"Somebody has deleted the disk on the rack, or the volume belongs to another project or rack.",
	},
	{
		"DiskFaulted", "disk", func(f Facts) bool { return f.Disk != nil && f.Disk.State == rack.Faulted },
		"disk {disk} is faulted", actorRack, "report the disk's ID to the operator of the rack",
		"The rack cannot serve the disk. It can neither be attached nor read.",
	},
	{
		"InstanceDeleted", "instance", func(f Facts) bool { return f.InstanceGone },
		"the instance {instance} of node {node} does not exist any more", actorOperator,
		"kubectl delete node {node}: Kubernetes then gives up the pods there and detaches their volumes",
		"Deleting an instance detaches its disks. The orchestrator still waits for the node, because nothing told it.",
	},
	{
		"RestartRefused", "instance", func(f Facts) bool {
			return f.saysAll(restart.ErrPlanned.Error(), "; next attempt after")
		},
		"the node refuses the restart that volume {volume} waits for", actorOperator,
		"oxide-csi volume show {volume} has the node's reason; remove it, and the restart is tried again",
		"With --attach-mode=restart the node plugin shuts its guest down, and refuses where that would end pods for good.",
	},
	{
		"RestartPlanned", "instance", saysError(restart.ErrPlanned),
		"volume {volume} waits for a planned restart of node {node}", actorNobody,
		"oxide-csi volume show {volume} shows when it begins, and what it waits for",
		"The rack attaches disks only while an instance is stopped. One restart serves all volumes that wait for the node.",
	},
	{
		"InstanceFull",
		"instance",
		says("and takes no more: --max-disks is", "rack allows fewer than --max-disks", "allows fewer than --max-disks"),
		"instance {instance} of node {node} has no room for another disk",
		actorOperator,
		"move a workload with a volume to another node; racks from release 18 on take --max-disks=12",
		"The boot disk counts. Disks that were attached by hand count too.",
	},
	{
		"SerialCollision",
		"device",
		either(says("in their names, so the guest would see only one"), saysError(device.ErrAmbiguous)),
		"the disk of volume {volume} cannot be told from another disk of node {node}",
		actorOperator,
		"detach the other disk from the node, or run the workload on another node",
		"A guest knows a disk only by the first 20 bytes of its name. Of two disks with the same it shows only one.",
	},
	{
		"InstanceStopped", "instance", func(f Facts) bool {
			return f.Instance != nil && slices.Contains([]string{rack.Stopped, rack.Failed, "stopping"}, f.Instance.RunState)
		},
		"instance {instance} of node {node} is not running", actorOperator,
		"start the instance; its disks are still attached",
		"Somebody has stopped it, or it failed. The plugin does not start an instance that it has not stopped.",
	},
	{
		"RackHasNoHotplug", "attachment", says("attaches and detaches disks only while the instance is stopped"),
		"this rack does not attach disks to a running instance, and node {node} runs", actorOperator,
		"stop instance {instance}, wait until the volume is attached, and start it; or use --attach-mode=restart",
		"docs/explanation/racks-without-hotplug.md has the choices.",
	},
	{
		"AttachedElsewhere", "attachment", func(f Facts) bool {
			return !f.has(metadata.Attached) && f.says("is attached to instance") &&
				f.says("unpublish the volume from that node first")
		},
		"disk {disk} is still attached to another instance", actorOperator,
		"kubectl get volumeattachment shows the node that has it; end the workload there",
		"A disk is attached to one instance at a time. Kubernetes detaches it from a node that is down after six minutes.",
	},
	{
		"PluginNotRegistered",
		"node",
		has(metadata.NotRegistered),
		"node {node} has no running plugin",
		actorOperator,
		"kubectl -n oxide-csi get pods -o wide: the node's oxide-csi-node pod must run; then see its log",
		"The kubelet mounts volumes only after the plugin has registered. docs/how-to/registration.md has the ways to register.",
	},
	{
		"NodeNotReady",
		"node",
		has(metadata.NodeNotReady),
		"the orchestrator does not hear from node {node}",
		actorOperator,
		"start the node again; if it is gone for good: kubectl taint node {node} node.kubernetes.io/out-of-service=nodeshutdown:NoExecute",
		"The volume stays attached there until the node comes back, is deleted or gets the taint.",
	},
	{
		"PassphraseMissing", "device", says("the request has no passphrase"),
		"volume {volume} is encrypted, and the node gets no passphrase for it", actorUser,
		"create the Secret that the storage class names for the claim, with the key passphrase",
		"The passphrase comes with each mount. docs/how-to/encrypt-volumes.md has the Secret and the class.",
	},
	{
		"WrongPassphrase", "device", saysError(luks.ErrPassphrase),
		"the passphrase in the Secret does not open the encrypted volume {volume}", actorUser,
		"restore the Secret with which the volume was first used",
		"The plugin never formats an encrypted disk again, so the data is still there.",
	},
	{
		"DiskNotResponding", "device", saysError(device.ErrNoAnswer),
		"the disk of volume {volume} does not answer on node {node}", actorRack,
		"read the kernel's log of the node; the rack's operator knows whether the disk has a problem",
		"Reads wait without an end. The plugin waits a few seconds, and starts nothing that would hang too.",
	},
	{
		"DiskInUse", "device", either(says("cannot be staged: its disk"), saysError(device.ErrInUse)),
		"another program on node {node} uses the disk of volume {volume}", actorOperator,
		"end the use that the message names: an LVM group, a mount by hand, another container",
		"The plugin mounts a disk only if no other program holds it: two users would destroy the filesystem.",
	},
	{
		"ForeignFilesystem",
		"filesystem",
		says("belongs to another volume: its UUID is", "not a supported filesystem", "correct fs_type"),
		"the disk of volume {volume} holds something that the plugin has not made",
		actorUser,
		"find out what the disk holds; the message names it. The plugin never replaces it",
		"Mounting another volume's filesystem, or formatting over it, would lose data.",
	},
	{
		"DiskNotBlank", "filesystem", saysError(device.ErrNotBlank),
		"the disk of volume {volume} is not proved blank, and has no filesystem", actorUser,
		"if its content is not needed, wipe the disk by hand; otherwise use the volume as raw block",
		"The plugin formats only a disk that it has read and found empty.",
	},
	{
		"FilesystemUnclean", "filesystem", saysError(mount.ErrDamaged),
		"the filesystem of volume {volume} is damaged beyond an automatic repair", actorUser,
		"make a snapshot first; then run e2fsck -f on the node, as the message says, or restore a snapshot",
		"Before a writable mount the plugin runs e2fsck -p, which repairs only what loses no data.",
	},
	{
		"FilesystemChecked", "filesystem", saysError(mount.ErrChecking),
		"the filesystem of volume {volume} is being checked or grown", actorNobody, "wait: the orchestrator tries again",
		"After a power cut a large filesystem takes minutes. The check continues when the call that began it has ended.",
	},
	{
		"ExpansionWaits", "volume", has(metadata.ExpansionPending),
		"volume {volume} gets its new size when no workload uses it", actorUser,
		"end the workload that uses claim {claim}, and start it again when the claim shows the new size",
		"A rack cannot change the size of a disk. The volume is copied to a larger one while it is detached.",
	},
	{
		"RackUnavailable", "rack", saysError(rack.ErrUnavailable, rack.ErrInternal),
		"the rack does not answer, or fails", actorRack,
		"oxide-csi doctor on the controller shows what can be reached",
		"The orchestrator repeats its calls, and nothing is lost.",
	},
}

// Works is the verdict if nothing is wrong. Unknown is the verdict if no row matches.
var (
	Works = Symptom{
		Reason:  "Works",
		Link:    "",
		Verdict: "nothing is wrong with volume {volume}, as far as can be seen",
		Actor:   actorNobody,
		Next:    "if the workload still has a problem, its own log is the next place",
	}
	Unknown = Symptom{
		Reason:  "Unknown",
		Link:    "",
		Verdict: "volume {volume} waits, for a reason that is not in the table",
		Actor:   actorOperator,
		Next:    "read the messages below, and the logs of controller and node",
	}
)

// says reports whether a message has the text.
func (f Facts) says(text string) bool {
	return slices.ContainsFunc(f.messages(), func(m string) bool { return strings.Contains(m, text) })
}

// saysAll reports whether one message has all texts.
func (f Facts) saysAll(texts ...string) bool {
	return slices.ContainsFunc(f.messages(), func(m string) bool {
		return !slices.ContainsFunc(texts, func(text string) bool { return !strings.Contains(m, text) })
	})
}
