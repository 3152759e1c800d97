// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package diagnose

import (
	"cmp"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/expand"
	"github.com/oxidecomputer/oxide-csi-plugin/core/hostexec"
	"github.com/oxidecomputer/oxide-csi-plugin/core/luks"
	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/restart"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
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

func has(condition orchestrator.TraceCondition) func(Facts) bool {
	return func(f Facts) bool { return f.has(condition) }
}

// unlessRunning is [has] for a condition that does no harm to a workload that runs.
func unlessRunning(condition orchestrator.TraceCondition) func(Facts) bool {
	return func(f Facts) bool { return f.has(condition) && !f.has(orchestrator.Running) }
}

func either(matches ...func(Facts) bool) func(Facts) bool {
	return func(f Facts) bool {
		return slices.ContainsFunc(matches, func(match func(Facts) bool) bool { return match(f) })
	}
}

// Symptoms are all symptoms. The first match is the verdict, so causes come before their effects.
var Symptoms = []Symptom{
	{
		"TokenRejected",
		"rack",
		saysError(rack.ErrUnauthenticated),
		"the rack rejects the plugin's API token",
		actorOperator,
		"put a valid token of this silo into the Secret oxide-secret (key token) of the plugin's namespace; no restart is needed",
		"The token is missing, wrong, expired or revoked. Every call to the rack fails, for all volumes.",
	},
	{
		"ProjectUnusable",
		"rack",
		saysError(rack.ErrProject),
		"the project of the settings does not exist, or the token's user has no role on it",
		actorOperator,
		"correct the controller's OXIDE_PROJECT if it is misspelt; else have the silo's administrator give the user limited-collaborator on it",
		"A rack answers 404 for a project that a user may not see. So a wrong name and a missing role look the same.",
	},
	{
		"RoleTooLow", "rack", saysError(rack.ErrForbidden),
		"the token's role allows to read, but not to change", actorOperator,
		"have the silo's administrator give the token's user the role limited-collaborator on the project",
		"Disks can be listed, and nothing can be created, attached or deleted.",
	},
	{
		"OtherDriver",
		"claim",
		has(orchestrator.OtherDriver),
		"claim {claim} has no volume, and a storage class that is not this plugin's",
		actorUser,
		"if this plugin should make it: end its pod, delete the claim, and create it with a class of csi.oxide.computer (kubectl get storageclass)",
		"The class of a claim never changes. A class that does not exist, or names another driver, does not reach the plugin.",
	},
	{
		"SnapshotNotReady", "claim", has(orchestrator.SnapshotNotReady),
		"claim {claim} waits for its snapshot, which is not ready", actorUser,
		"kubectl describe volumesnapshot -n {namespace}: the status of the one that the claim names has the reason",
		"The provisioner creates the volume when the VolumeSnapshot has readyToUse: true.",
	},
	{
		"OnlySnapshot",
		"disk",
		saysError(expand.ErrOnlySnapshot, rack.ErrReplaced),
		"volume {volume} has no disk: its expansion was interrupted, and its data are on a snapshot csi-grow-…",
		actorOperator,
		"delete neither that snapshot nor the claim; ask the silo's administrator for quota if it is short: then the plugin makes the disk by itself",
		"A volume grows by a new disk that is made from a snapshot of the old one. Here the old one is deleted already.",
	},
	{
		"ExpansionNeedsRoom", "volume", saysError(expand.ErrNoRoom),
		"volume {volume} keeps its size: the quota has no room for the larger disk", actorRack,
		"the volume still works; ask the silo's administrator for more quota",
		"While a volume grows, the quota needs its new size and, for the snapshot, its old size.",
	},
	{
		"NameTaken",
		"disk",
		saysError(expand.ErrNameTaken),
		"another disk took the name of volume {volume} while the volume grew",
		actorOperator,
		"keep the claim and the snapshot csi-grow-…, which has the data; if the owner of the disk in the messages below agrees, delete that disk alone",
		"Another client created a disk of the same name in the moment in which the name was free. The data are on a snapshot.",
	},
	{
		"QuotaExhausted", "disk", saysError(rack.ErrCapacity),
		"the silo's quota, or the rack's space, is too small for the volume", actorRack,
		"ask the silo's administrator for more quota, or the rack's operator for space: the messages below say which is full",
		"Disks and snapshots of all projects of the silo count. A clone needs its size once more for a moment.",
	},
	{
		"DiskGone",
		"disk",
		func(f Facts) bool { return f.DiskGone },
		"the disk of volume {volume} is on no rack of the settings",
		actorOperator,
		"delete nothing; if the rack's console shows the disk, correct the plugin's project or rack; else restore a snapshot or a backup into a new volume",
		"The disk was deleted on the rack, or the volume belongs to another project or rack.",
	},
	{
		"DiskFaulted", "disk", func(f Facts) bool { return f.Disk != nil && f.Disk.State == rack.Faulted },
		"disk {disk} is faulted", actorRack, "report the disk's ID to the operator of the rack",
		"The rack cannot serve the disk. It can neither be attached nor read.",
	},
	{
		"InstanceDeleted",
		"instance",
		func(f Facts) bool { return f.InstanceGone },
		"the instance {instance} of node {node} does not exist any more",
		actorOperator,
		"kubectl get node {node}; if it is NotReady: kubectl delete node {node}, and within six minutes its volumes are free; if it is Ready: oxide-csi doctor, there",
		"Deleting an instance detaches its disks. The orchestrator still waits for the node, because nothing told it.",
	},
	{
		"RestartRefused", "instance", func(f Facts) bool {
			// The attempt after a refusal mentions it, and is most likely refused too.
			return f.saysAll(restart.ErrPlanned.Error(), "; next attempt after") ||
				f.saysAll(restart.ErrPlanned.Error(), "; last failure: ")
		},
		"the node refuses the restart that volume {volume} waits for", actorOperator,
		"oxide-csi volume show {volume} has the node's reason; when the reason is gone, the restart is tried again",
		"With --attach-mode=restart the node plugin shuts its guest down, and refuses where that would end pods for good.",
	},
	{
		"RestartNeeded",
		"instance",
		says("--attach-mode=plan forbids it"),
		"volume {volume} waits for a restart of node {node}, and in mode plan the plugin restarts nothing",
		actorOperator,
		"if all that runs there may end, shut the guest of instance {instance} down; start it when oxide-csi volume show {volume} says attached, not before",
		"The rack attaches disks only while an instance is stopped. With `--attach-mode=restart` the plugin stops and starts it.",
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
		says(
			"and takes no more, because --max-disks is",
			"rack allows fewer than --max-disks",
			"allows fewer than --max-disks",
		),
		"instance {instance} of node {node} has no room for another disk",
		actorOperator,
		"kubectl cordon {node}, then kubectl delete {pod}: it starts on another node; then kubectl uncordon {node}",
		"The boot disk counts. Disks that were attached by hand count too. Racks of release 18 and later take `--max-disks=12`.",
	},
	{
		"SerialCollision",
		"device",
		either(says("in their names, so the guest would see only one"), saysError(device.ErrAmbiguous)),
		"the disk of volume {volume} cannot be told from another disk of node {node}",
		actorOperator,
		"kubectl cordon {node}, then kubectl delete {pod}: it starts on another node. Detach nothing that is mounted",
		"A guest knows a disk only by the first 20 bytes of its name. Of two disks with the same it shows only one.",
	},
	{
		"InstanceStopped",
		"instance",
		func(f Facts) bool {
			return f.Instance != nil && slices.Contains([]string{rack.Stopped, rack.Failed, "stopping"}, f.Instance.RunState)
		},
		"instance {instance} of node {node} is not running",
		actorOperator,
		"unless its owner stopped it on purpose, or oxide-csi volume list shows a restart of it: start it in the rack's console; its disks are still attached",
		"Its owner has stopped it, or it failed. The plugin does not start an instance that it has not stopped.",
	},
	{
		"RackHasNoHotplug",
		"attachment",
		says("attaches and detaches disks only while the instance is stopped"),
		"this rack does not attach disks to a running instance, and node {node} runs",
		actorOperator,
		"if all that runs there may end, shut the guest of instance {instance} down; start it when oxide-csi volume show {volume} says attached, not before",
		"With `--attach-mode=restart` the plugin does that by itself: docs/explanation/racks-without-hotplug.md has the choices.",
	},
	{
		"ClaimsUnknown",
		"attachment",
		says("it is unknown whether it is in use", "does not say whether a workload on it has claimed volume"),
		"the controller cannot find out whether the disk of an unpublished volume is in use, so the disk stays attached",
		actorOperator,
		"nomad alloc logs -namespace=oxide-csi -stderr of the controller's allocation has the reason: mostly the policy controller.policy.hcl is not applied",
		"Before the plugin detaches a disk later than Nomad asked, it asks Nomad for the claims on it, in all namespaces. Without a certain answer the disk stays.",
	},
	{
		"ClaimedThere",
		"attachment",
		says("a workload there has claimed it", "a workload on it has claimed volume"),
		"an allocation on another client, or one of another volume with the same disk, has claimed the disk that would have to leave",
		actorOperator,
		"nomad alloc logs -namespace=oxide-csi -stderr of the controller's allocation names the claim: end that allocation, if it may end",
		"A disk can have several volumes in Nomad: in two namespaces, or registered twice. A claim on one of them keeps the disk attached.",
	},
	{
		"DetachDeferred",
		"attachment",
		says("(--detach-grace)", "is just being detached from the instance that had it before"),
		"volume {volume} waits until its disk, or that of another volume, is detached from the instance that had it",
		actorNobody,
		"wait: the message says how long, and the orchestrator tries again",
		"Nomad unpublishes a volume while it may still be mounted, so the plugin detaches the disk after a grace period. The same node gets the volume back at once.",
	},
	{
		"DetachUntimed",
		"attachment",
		says("is unpublished and still attached to instance"),
		"the disk of an unpublished volume is still attached to instance {holder}, and no time is set for its detach",
		actorOperator,
		"if the volume of the message is mounted nowhere: oxide-csi volume detach VOLUME --node={holder} --unmounted, or stop that instance",
		"Either the volume had just come back to that instance, and the unpublish may have been an old one, or the rack detaches disks only while the instance is stopped.",
	},
	{
		"AttachedElsewhere",
		"attachment",
		func(f Facts) bool {
			return !f.has(orchestrator.Attached) && f.says("is attached to instance") &&
				f.says("unpublish the volume from that node first")
		},
		"disk {disk} is still attached to instance {holder}",
		actorOperator,
		"kubectl get volumeattachment has the node; end the pod there that uses the volume, if it may end. If there is none, detach nothing and ask who attached it",
		"A disk is attached to one instance at a time. Kubernetes does not detach it from a node that is down until somebody acts: docs/how-to/drain-nodes.md.",
	},
	{
		"ControllerNotRunning", "attachment", unlessRunning(orchestrator.NoController),
		"no controller of the plugin is healthy, so nothing attaches volume {volume}", actorOperator,
		"nomad job status -namespace=oxide-csi oxide-csi-controller; then nomad alloc logs -stderr of its allocation",
		"Only a controller calls the rack. Volumes that are mounted already stay usable.",
	},
	{
		"ClaimNotReleased",
		"attachment",
		unlessRunning(orchestrator.ClaimOfEnded),
		"an allocation that has ended still claims volume {volume}",
		actorOperator,
		"if nomad volume status shows no running allocation: nomad system gc; if the claim is still there after five minutes: docs/how-to/troubleshooting-nomad.md#stuck",
		"Nomad gives the volume to no other allocation before it has released the claim.",
	},
	{
		"PluginNotRegistered",
		"node",
		has(orchestrator.NotRegistered),
		"node {node} has no running plugin",
		actorOperator,
		"kubectl -n oxide-csi get pods -o wide, then kubectl -n oxide-csi logs --all-containers of its oxide-csi-node pod there",
		"The kubelet mounts volumes only after the plugin has registered. docs/how-to/registration.md has the ways to register.",
	},
	{
		"NodeNotReady",
		"node",
		has(orchestrator.NodeNotReady),
		"the orchestrator does not hear from node {node}",
		actorOperator,
		"if its instance runs, repair the node; only if the instance is stopped or deleted: kubectl taint node {node} node.kubernetes.io/out-of-service=nodeshutdown:NoExecute",
		"The volume stays attached there until the node comes back, is deleted or gets the taint. Remove the taint when the node is back.",
	},
	{
		"PassphraseMissing",
		"device",
		says("the request has no passphrase"),
		"volume {volume} is encrypted, and the node gets no passphrase for it",
		actorUser,
		"create the Secret that the storage class names, with its old passphrase (key passphrase) if the volume was used before; else with a new one, and keep a copy",
		"The passphrase comes with each mount. docs/how-to/encrypt-volumes.md has the Secret and the class. A PersistentVolume that was made by hand names the Secret itself, in nodeStageSecretRef.",
	},
	{
		"WrongPassphrase",
		"device",
		saysError(luks.ErrPassphrase),
		"the passphrase that the node gets does not open the encrypted volume {volume}",
		actorUser,
		"save a copy of the present Secret, which other volumes may need; then put the first passphrase of this volume back; delete nothing",
		"The plugin never formats an encrypted disk again, so the data is still there.",
	},
	{
		"EncryptionUnavailable",
		"device",
		saysError(luks.ErrNoDeviceMapper, luks.ErrMemory),
		"node {node} cannot open the encrypted volume {volume}: it lacks memory, or dm_mod and dm_crypt",
		actorOperator,
		"the messages below say which: modprobe -a dm_mod dm_crypt there, or a memory limit above --luks-memory for the plugin there",
		"To open an encrypted disk the kernel needs device-mapper, and cryptsetup needs memory for the key.",
	},
	{
		"ProgramMissing", "node", saysError(hostexec.ErrMissing),
		"a program that volume {volume} needs is not installed on node {node}", actorOperator,
		"install on {node} the package that the messages below name, or run the plugin from its container image",
		"The plugin runs mkfs, e2fsck, cryptsetup and others. The image has them; a bare host needs the packages.",
	},
	{
		"DiskNotResponding", "device", saysError(device.ErrNoAnswer),
		"disk {disk} does not answer on node {node}", actorRack,
		"give the disk's ID, and the errors in the kernel log of the node, to the operator of the rack",
		"Reads wait without an end. The plugin waits a few seconds, and starts nothing that would hang too.",
	},
	{
		"DiskInUse",
		"device",
		either(says("cannot be staged: its disk"), saysError(device.ErrInUse)),
		"another program on node {node} uses the disk of volume {volume}",
		actorOperator,
		"the messages below name who; if its owner agrees, unmount it, stop the container, or vgchange -an the LVM group; wipe and remove nothing",
		"The plugin mounts a disk only if no other program holds it: two users would destroy the filesystem.",
	},
	{
		"ForeignFilesystem",
		"filesystem",
		says("belongs to another volume: its UUID is", "not a supported filesystem", "correct fs_type"),
		"the disk of volume {volume} holds something that the plugin has not made",
		actorUser,
		"the messages below name what; ask the owner of the data. If it must stay, keep this volume and its claim, and use another; nothing was changed",
		"Mounting another volume's filesystem, or formatting over it, would lose data.",
	},
	{
		"DiskNotBlank",
		"filesystem",
		saysError(device.ErrNotBlank),
		"the disk of volume {volume} may hold data, but no filesystem, so it was not formatted",
		actorUser,
		"ask the owner of the data; if nothing of it is needed, delete the volume and create a new one; else keep it and its claim, and use another",
		"The plugin formats only a disk that it has read and found empty.",
	},
	{
		"FilesystemUnclean",
		"filesystem",
		saysError(mount.ErrDamaged),
		"the filesystem of volume {volume} is damaged beyond an automatic repair",
		actorUser,
		"end the workload and make a snapshot; then repair it as the messages below say, or restore an older snapshot into a new volume",
		"Before a writable mount the kernel replays the journal, and the plugin runs e2fsck -p, which repairs only what loses no data.",
	},
	{
		"FilesystemChecked", "filesystem", saysError(mount.ErrChecking),
		"the filesystem of volume {volume} is being checked or grown", actorNobody, "wait: the orchestrator tries again",
		"After a power cut a large filesystem takes minutes. The check continues when the call that began it has ended.",
	},
	{
		"ExpansionWaits",
		"volume",
		has(orchestrator.ExpansionPending),
		"volume {volume} gets its new size when no workload uses it",
		actorUser,
		"scale the workload of claim {claim} to 0, and keep the claim; on a rack without hot-plug also stop the instance; go back when kubectl get pvc shows the new capacity",
		"A rack cannot change the size of a disk. Its disk is replaced by a larger copy while it is detached.",
	},
	{
		"StateUnknown",
		"disk",
		either(
			func(f Facts) bool { return f.Disk != nil && f.Disk.Unknown != "" },
			saysError(rack.ErrUnknown),
		),
		"the rack shows the disk or snapshot of volume {volume} in a state that the plugin does not know, and leaves it alone",
		actorOperator,
		"upgrade the plugin; the message has the state: if the newest version does not know it either, report it, and let the rack's operator look",
		"A later release of the rack may have states that this version of the plugin does not know. What may be done with such " +
			"a disk or snapshot is unknown: it is neither attached nor detached, deleted or expanded. All others work.",
	},
	{
		"ProxyAnswered",
		"rack",
		saysError(rack.ErrProxy),
		"a proxy or another server answers the plugin's calls, and not the rack",
		actorOperator,
		"look at the proxies and load balancers before the rack, at the plugin's OXIDE_HOST, and at HTTPS_PROXY and NO_PROXY of the controller",
		"Every answer of a rack has an ID of its request. What a proxy answers says nothing about volumes, token or project. " +
			"The orchestrator repeats its calls, and nothing is lost.",
	},
	{
		"RackUnavailable",
		"rack",
		saysError(rack.ErrUnavailable, rack.ErrInternal),
		"the rack does not answer, or fails",
		actorRack,
		"kubectl -n oxide-csi exec deploy/oxide-csi-controller -c oxide-plugin -- /oxide-csi doctor; then the rack's operator",
		"The orchestrator repeats its calls, and nothing is lost.",
	},
	{
		"NotStartedYet", "", func(f Facts) bool { return f.pending() && f.RackError == "" && len(f.Messages) == 0 },
		"nothing is wrong with volume {volume} as far as can be seen, and its workload has not started", actorNobody,
		"ask again in a minute; kubectl describe {pod} shows what else it waits for",
		"Neither the plugin nor the orchestrator has said why. A workload also waits for its images and for room on a node.",
	},
}

// nextElsewhere are the next steps of symptoms, by orchestrator and reason, where others than those of Kubernetes are
// needed. Without an orchestrator only what the rack answers leads to a verdict.
var nextElsewhere = map[string]map[string]string{
	orchestrator.Nomad: {
		"RackHasNoHotplug": "if all that runs there may end, shut the guest of instance {instance} down, attach the volume from a " +
			"controller on another client, and start it: docs/how-to/planned-restarts-nomad.md#stop-an-instance-yourself",
		"TokenRejected": "put a valid token of this silo into the variable of the controller's job: docs/how-to/rotate-token.md",
		"OnlySnapshot": "delete neither that snapshot nor the volume; ask the silo's administrator for quota if it is short: then the " +
			"plugin makes the disk by itself",
		"NameTaken": "keep the volume and the snapshot csi-grow-…, which has the data; if the owner of the disk in the messages below " +
			"agrees, delete that disk alone",
		"ForeignFilesystem": "the messages below name what; ask the owner of the data. If it must stay, keep this volume, and use " +
			"another; nothing was changed",
		"InstanceDeleted": "when nomad node status shows the client as down, the allocation moves; then, if the volume is still claimed: nomad system gc",
		"InstanceFull": "nomad node eligibility -disable of client {node}, then nomad alloc stop {allocation}: it starts on another " +
			"client; then -enable",
		"SerialCollision": "nomad node eligibility -disable of client {node}, then nomad alloc stop {allocation}: it starts on " +
			"another client. Detach nothing that is mounted",
		"AttachedElsewhere": "nomad volume status has the allocation and its client: end it, if it may end. If the disk stays attached, or " +
			"there is no such allocation: docs/how-to/troubleshooting-nomad.md#stuck",
		"PluginNotRegistered": "nomad job status -namespace=oxide-csi oxide-csi-node; then nomad alloc logs -stderr of its allocation " +
			"on client {node}",
		"NodeNotReady": "if its instance runs, start the Nomad client there again; if it was stopped by mistake, start it; if it is gone " +
			"for good, Nomad moves the allocation by itself",
		"NotStartedYet": "ask again in a minute; nomad alloc status {allocation} shows what else it waits for",
		"PassphraseMissing": "nomad volume register of its file, with secrets { passphrase = … }: the old passphrase if the volume was " +
			"used before; else a new one, and keep a copy",
		"WrongPassphrase": "nomad volume register of its file, with the first passphrase in secrets { passphrase = … }; delete nothing, " +
			"the data are intact",
		"RackUnavailable": "nomad alloc exec -namespace=oxide-csi -job oxide-csi-controller /usr/local/bin/oxide-csi doctor; then the " +
			"rack's operator",
	},
	orchestrator.None: {
		"TokenRejected":   "put a valid token of this silo into the controller's token file (OXIDE_TOKEN_FILE); no restart is needed",
		"OnlySnapshot":    "delete neither that snapshot nor the volume; the plugin makes the disk by itself, when there is room for it",
		"InstanceDeleted": "its disks were detached with it: oxide-csi volume attach {volume}, on the host that takes over",
		"RackUnavailable": "oxide-csi doctor, on the controller's host, shows what can be reached; then the rack's operator",
	},
}

// nextFor is the next step with the commands of an orchestrator.
func (s Symptom) nextFor(orchestrator string) string {
	return cmp.Or(nextElsewhere[orchestrator][s.Reason], s.Next)
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

// pending reports whether the workload has not started.
func (f Facts) pending() bool {
	return slices.ContainsFunc(f.Steps, func(s orchestrator.TraceStep) bool {
		return s.Link == "workload" && strings.EqualFold(s.State, "pending") // the word of Kubernetes and of Nomad
	})
}

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
