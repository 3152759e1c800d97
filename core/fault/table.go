// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package fault

import (
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// Table has all rows, in the order of this file. Causes come before their effects: the first row that matches is that
// of an error that wraps several errors, and the verdict of explain.
var Table []*Row

func row(r Row) *Row {
	Table = append(Table, &r)
	return &r
}

// The rows. Texts may hold the placeholders {volume}, {disk}, {instance}, {holder}, {blocker}, {node}, {claim},
// {namespace}, {pod} and {allocation}; OnHosts holds none for an error of an RPC, because the commands print it as it
// is.
var (
	TokenRejected = row(Row{
		Word: "TokenRejected", Code: codes.Unauthenticated, Link: "rack", Actor: Operator,
		Verdict: "the rack rejects the plugin's API token",
		Next:    "put a valid token of this silo into the Secret oxide-secret (key token) of the plugin's namespace; no restart is needed",
		OnNomad: "put a valid token of this silo into the variable of the controller's job: docs/how-to/rotate-token.md",
		OnHosts: "put a valid token of this silo into the controller's token file (OXIDE_TOKEN_FILE); no restart is needed",
		Why:     "The token is missing, wrong, expired or revoked. Every call to the rack fails, for all volumes. A create answers UNAVAILABLE instead, which is not final.",
	})
	ProjectUnusable = row(Row{
		Word: "ProjectUnusable", Code: codes.FailedPrecondition, Link: "rack", Actor: Operator,
		Verdict: "the project of the settings does not exist, or the token's user has no role on it",
		Next:    "correct the controller's OXIDE_PROJECT if it is misspelt; else have the silo's administrator give the user limited-collaborator on it",
		OnHosts: "correct the controller's OXIDE_PROJECT if it is misspelt; else have the silo's administrator give the token's user limited-collaborator on it",
		Why:     "A rack answers 404 for a project that a user may not see. So a wrong name and a missing role look the same. A create answers UNAVAILABLE instead.",
	})
	RoleTooLow = row(Row{
		Word: "RoleTooLow", Code: codes.PermissionDenied, Link: "rack", Actor: Operator,
		Verdict: "the token's role allows to read, but not to change",
		Next:    "have the silo's administrator give the token's user the role limited-collaborator on the project",
		OnHosts: "have the silo's administrator give the user of the controller's token (OXIDE_TOKEN_FILE) the role limited-collaborator on the project",
		Why:     "Disks can be listed, and nothing can be created, attached or deleted. A create answers UNAVAILABLE instead.",
	})
	OtherDriver = row(Row{
		Word: "OtherDriver", Link: "claim", Actor: Owner,
		Verdict: "claim {claim} has no volume, and a storage class that is not this plugin's",
		Next:    "if this plugin should make it: end its pod, delete the claim, and create it with a class of csi.oxide.computer (kubectl get storageclass)",
		Why:     "The class of a claim never changes. A class that does not exist, or names another driver, does not reach the plugin.",
	})
	SnapshotNotReady = row(Row{
		Word: "SnapshotNotReady", Link: "claim", Actor: Owner,
		Verdict: "claim {claim} waits for its snapshot, which is not ready",
		Next:    "kubectl describe volumesnapshot -n {namespace}: the status of the one that the claim names has the reason",
		Why:     "The provisioner creates the volume when the VolumeSnapshot has readyToUse: true.",
	})
	OnlySnapshot = row(Row{
		Word: "OnlySnapshot", Code: codes.FailedPrecondition, Link: "disk", Actor: Operator,
		Verdict: "volume {volume} has no disk: its expansion was interrupted, and its data are on a snapshot csi-grow-…",
		Next:    "delete neither that snapshot nor the claim; ask the silo's administrator for quota if it is short: then the plugin makes the disk by itself",
		OnNomad: "delete neither that snapshot nor the volume; ask the silo's administrator for quota if it is short: then the plugin makes the disk by itself",
		OnHosts: "delete neither that snapshot nor the volume; the plugin makes the disk by itself, when there is room for it",
		Why:     "A volume grows by a new disk that is made from a snapshot of the old one. Here the old one is deleted already.",
	})
	VolumeBeingReplaced = row(Row{
		Word: "VolumeBeingReplaced", Code: codes.Aborted, Link: "disk", Actor: Nobody,
		Verdict: "volume {volume} has no disk until its expansion is finished",
		Next:    "wait: the plugin makes the disk by itself. Delete neither the snapshot csi-grow-… nor the volume, and ask for quota if it lasts",
		Why:     "A volume grows by a new disk that is made from a snapshot of the old one. Every orchestrator retries.",
	})
	ExpansionNeedsRoom = row(Row{
		Word: "ExpansionNeedsRoom", Code: codes.OutOfRange, Link: "volume", Actor: RackOperator,
		Verdict: "volume {volume} keeps its size: the quota has no room for the larger disk",
		Next:    "the volume still works; ask the silo's administrator for more quota",
		Why:     "While a volume grows, the quota needs its new size and, for the snapshot, its old size. RESOURCE_EXHAUSTED would tell a resizer that the expansion goes on.",
	})
	NameTaken = row(Row{
		Word: "NameTaken", Code: codes.FailedPrecondition, Link: "disk", Actor: Operator,
		Verdict: "another disk took the name of volume {volume} while the volume grew",
		Next:    "keep the claim and the snapshot csi-grow-…, which has the data; if the owner of the disk in the messages below agrees, delete that disk alone",
		OnNomad: "keep the volume and the snapshot csi-grow-…, which has the data; if the owner of the disk in the messages below agrees, delete that disk alone",
		Why:     "Another client created a disk of the same name in the moment in which the name was free. The data are on a snapshot.",
	})
	VolumeDiffers = row(Row{
		Word: "VolumeDiffers", Code: codes.AlreadyExists, Link: "disk", Actor: Owner,
		Verdict: "a disk has the name of volume {volume} already, and is not what is asked for",
		Next:    "delete nothing: the message says what differs. Ask for what the disk is, or make a new claim, which gets a new name",
		OnNomad: "delete nothing: the message says what differs. Ask for what the disk is, or give the volume another name",
		OnHosts: "or ask for what it is; oxide-csi volume expand makes it larger",
		Why:     "A volume's name leads to its disk, so that a repeated create finds it. The size is that with which the volume was made, also after it has grown.",
	})
	QuotaExhausted = row(Row{
		Word: "QuotaExhausted", Code: codes.ResourceExhausted, Link: "disk", Actor: RackOperator,
		Verdict: "the silo's quota, or the rack's space, is too small for the volume",
		Next:    "ask the silo's administrator for more quota, or the rack's operator for space: the messages below say which is full",
		OnHosts: "ask the silo's administrator for more quota, or the rack's operator for space",
		Why:     "Disks and snapshots of all projects of the silo count. A clone needs its size once more for a moment. A provisioner tries another topology segment.",
	})
	DiskGone = row(Row{
		Word: "DiskGone", Link: "disk", Actor: Operator,
		Verdict: "the disk of volume {volume} is on no rack of the settings",
		Next:    "delete nothing; if the rack's console shows the disk, correct the plugin's project or rack; else restore a snapshot or a backup into a new volume",
		Why:     "The disk was deleted on the rack, or the volume belongs to another project or rack.",
	})
	DiskFaulted = row(Row{
		Word: "DiskFaulted", Code: codes.Internal, Link: "disk", Actor: RackOperator,
		Verdict: "disk {disk} is faulted",
		Next:    "report the disk's ID to the operator of the rack",
		Why:     "The rack cannot serve the disk. It can neither be attached nor read.",
	})
	InstanceDeleted = row(Row{
		Word: "InstanceDeleted", Link: "instance", Actor: Operator,
		Verdict: "the instance {instance} of node {node} does not exist any more",
		Next:    "kubectl get node {node}; if it is NotReady: kubectl delete node {node}, and within six minutes its volumes are free; if it is Ready: oxide-csi doctor, there",
		OnNomad: "when nomad node status shows the client as down, the allocation moves; then, if the volume is still claimed: nomad system gc",
		OnHosts: "its disks were detached with it: oxide-csi volume attach {volume}, on the host that takes over",
		Why:     "Deleting an instance detaches its disks. The orchestrator still waits for the node, because nothing told it.",
	})
	RestartRefused = row(Row{
		Word: "RestartRefused", Code: codes.FailedPrecondition, Link: "instance", Actor: Operator,
		Verdict: "the node refuses the restart that volume {volume} waits for",
		Next:    "oxide-csi volume show {volume} has the node's reason; when the reason is gone, the restart is tried again",
		OnHosts: "when the node's reason is gone, the restart is tried again; oxide-csi volume attach with --wait waits for it",
		Why:     "With --attach-mode=restart the node plugin shuts its guest down, and refuses where that would end pods for good.",
	})
	RestartNeeded = row(Row{
		Word: "RestartNeeded", Code: codes.FailedPrecondition, Link: "instance", Actor: Operator,
		Verdict: "volume {volume} waits for a restart of node {node}, and in mode plan the plugin restarts nothing",
		Next:    "if all that runs there may end, shut the guest of instance {instance} down; start it when oxide-csi volume show {volume} says attached, not before",
		OnHosts: "shut the guest of that instance down, if all that runs there may end; oxide-csi volume attach with --wait and --node then attaches the disk",
		Why:     "The rack attaches disks only while an instance is stopped. With `--attach-mode=restart` the plugin stops and starts it.",
	})
	RestartPlanned = row(Row{
		Word: "RestartPlanned", Code: codes.FailedPrecondition, Link: "instance", Actor: Nobody,
		Verdict: "volume {volume} waits for a planned restart of node {node}",
		Next:    "oxide-csi volume show {volume} shows when it begins, and what it waits for",
		OnHosts: "oxide-csi volume attach with --wait waits for it; without, repeat it at least every 10 minutes, or the request ends",
		Why:     "The rack attaches disks only while an instance is stopped. One restart serves all volumes that wait for the node. Nomad retries only this code, for a day; Kubernetes' external-attacher retries every code.",
	})
	InstanceFull = row(Row{
		Word: "InstanceFull", Code: codes.ResourceExhausted, Link: "instance", Actor: Operator,
		Verdict: "instance {instance} of node {node} has no room for another disk",
		Next:    "kubectl cordon {node}, then kubectl delete {pod}: it starts on another node; then kubectl uncordon {node}",
		OnNomad: "nomad node eligibility -disable of client {node}, then nomad alloc stop {allocation}: it starts on another client; then -enable",
		OnHosts: "attach the volume to another instance, or detach one from this: oxide-csi volume list has them",
		Why:     "The boot disk counts. Disks that were attached by hand count too. Racks of release 18 and later take `--max-disks=12`.",
	})
	SerialCollision = row(Row{
		Word: "SerialCollision", Code: codes.FailedPrecondition, Link: "device", Actor: Operator,
		Verdict: "the disk of volume {volume} cannot be told from another disk of node {node}",
		Next:    "kubectl cordon {node}, then kubectl delete {pod}: it starts on another node. Detach nothing that is mounted",
		OnNomad: "nomad node eligibility -disable of client {node}, then nomad alloc stop {allocation}: it starts on another client. Detach nothing that is mounted",
		OnHosts: "attach the volume to another instance; detach nothing that is mounted",
		Why:     "A guest knows a disk only by the first 20 bytes of its name. Of two disks with the same it shows only one.",
	})
	InstanceStopped = row(Row{
		Word: "InstanceStopped", Link: "instance", Actor: Operator,
		Verdict: "instance {instance} of node {node} is not running",
		Next:    "unless its owner stopped it on purpose, or oxide-csi volume list shows a restart of it: start it in the rack's console; its disks are still attached",
		Why:     "Its owner has stopped it, or it failed. The plugin does not start an instance that it has not stopped.",
	})
	RunsWithoutDisk = row(Row{
		Word: "RunsWithoutDisk", Link: "disk", Actor: Operator,
		Verdict: "a workload runs with volume {volume}, and its disk {disk} is not attached to the instance {instance} where it runs",
		Next:    "let nothing else use the volume; kubectl delete {pod}: it starts again, and gets the disk. What it wrote since may be lost",
		OnNomad: "let nothing else use the volume; nomad alloc stop {allocation}: the next one gets the disk. What it wrote since may be lost",
		Why:     "The orchestrator takes the volume for attached, and the rack says otherwise: somebody detached the disk, or attached it to another instance. Reads and writes fail there.",
	})
	RunsWithoutMount = row(Row{
		Word: "RunsWithoutMount", Link: "mount", Actor: Operator,
		Verdict: "a workload runs with volume {volume} on node {node}, and nothing of its disk is mounted there",
		Next:    "kubectl delete {pod}: it starts again, and the volume is mounted. What it wrote since is in no volume",
		OnNomad: "nomad alloc stop {allocation}: the next one gets the volume mounted. What this one wrote since is in no volume",
		Why:     "Somebody unmounted the volume by hand, or the node lost its mounts while the orchestrator takes the workload for running.",
	})
	NodesFull = row(Row{
		Word: "NodesFull", Link: "workload", Actor: Operator,
		Verdict: "every node that could run the workload of claim {claim} has as many disks as it may have",
		Next:    "add a node, or end a pod with a volume; on racks from release 18 on set maxDisks to 12: docs/how-to/kubernetes.md#how-many-volumes-a-node-takes",
		OnNomad: "add a client, or stop a job with a volume; racks from release 18 on take 12 disks (OXIDE_CSI_MAX_DISKS)",
		OnHosts: "add an instance, or detach a volume",
		Why:     "The scheduler places no more volumes on a node than its CSINode allows: exceed max volume count.",
	})
	RackHasNoHotplug = row(Row{
		Word: "RackHasNoHotplug", Code: codes.FailedPrecondition, Link: "attachment", Actor: Operator,
		Verdict: "this rack does not attach disks to a running instance, and node {node} runs",
		Next:    "if all that runs there may end, shut the guest of instance {instance} down; start it when oxide-csi volume show {volume} says attached, not before",
		OnNomad: "if all that runs there may end, shut the guest of instance {instance} down, attach the volume from a controller on another client, and start it: docs/how-to/planned-restarts-nomad.md#stop-an-instance-yourself",
		OnHosts: "with --wait and --node, on another host, the command waits until the instance is stopped; then start it again",
		Why:     "With `--attach-mode=restart` the plugin does that by itself: docs/explanation/racks-without-hotplug.md has the choices.",
	})
	ClaimsUnknown = row(Row{
		Word: "ClaimsUnknown", Code: codes.FailedPrecondition, Link: "attachment", Actor: Operator,
		Verdict: "the controller cannot find out whether the disk of an unpublished volume is in use, so the disk stays attached",
		Next:    "nomad alloc logs -namespace=oxide-csi -stderr of the controller's allocation has the reason: mostly the policy controller.policy.hcl is not applied",
		Why:     "Before the plugin detaches a disk later than Nomad asked, it asks Nomad for the claims on it, in all namespaces. Without a certain answer the disk stays.",
	})
	ClaimedThere = row(Row{
		Word: "ClaimedThere", Code: codes.FailedPrecondition, Link: "attachment", Actor: Operator,
		Verdict: "an allocation on another client, or one of another volume with the same disk, has claimed the disk that would have to leave",
		Next:    "nomad alloc logs -namespace=oxide-csi -stderr of the controller's allocation names the claim: end that allocation, if it may end",
		Why:     "A disk can have several volumes in Nomad: in two namespaces, or registered twice. A claim on one of them keeps the disk attached.",
	})
	DetachDeferred = row(Row{
		Word: "DetachDeferred", Code: codes.FailedPrecondition, Link: "attachment", Actor: Nobody,
		Verdict: "volume {volume} waits until its disk, or that of another volume, is detached from the instance that had it",
		Next:    "wait: the message says how long, and the orchestrator tries again",
		Why:     "Nomad unpublishes a volume while it may still be mounted, so the plugin detaches the disk after a grace period. The same node gets the volume back at once.",
	})
	DetachUntimed = row(Row{
		Word: "DetachUntimed", Code: codes.FailedPrecondition, Link: "attachment", Actor: Operator,
		Verdict: "the disk of an unpublished volume is still attached to instance {holder}, and no time is set for its detach",
		Next:    "if volume {blocker} is mounted nowhere: oxide-csi volume detach {blocker} --node={holder} --unmounted, or stop that instance",
		OnHosts: "if the volume is mounted nowhere: oxide-csi volume detach with --node and --unmounted, or stop that instance",
		Why:     "Either the volume had just come back to that instance, and the unpublish may have been an old one, or the rack detaches disks only while the instance is stopped.",
	})
	AttachedElsewhere = row(Row{
		Word: "AttachedElsewhere", Code: codes.FailedPrecondition, Link: "attachment", Actor: Operator,
		Verdict: "disk {disk} is still attached to instance {holder}",
		Next:    "kubectl get volumeattachment has the node; end the pod there that uses the volume, if it may end. If there is none, detach nothing and ask who attached it",
		OnNomad: "nomad volume status has the allocation and its client: end it, if it may end. If the disk stays attached, or there is no such allocation: docs/how-to/troubleshooting-nomad.md#stuck",
		OnHosts: "oxide-csi volume show has the node: oxide-csi volume unmount there, then oxide-csi volume detach",
		Why:     "A disk is attached to one instance at a time. Kubernetes does not detach it from a node that is down until somebody acts: docs/how-to/drain-nodes.md.",
	})
	ControllerNotRunning = row(Row{
		Word: "ControllerNotRunning", Link: "attachment", Actor: Operator,
		Verdict: "no controller of the plugin is healthy, so nothing attaches volume {volume}",
		Next:    "nomad job status -namespace=oxide-csi oxide-csi-controller; then nomad alloc logs -stderr of its allocation",
		Why:     "Only a controller calls the rack. Volumes that are mounted already stay usable.",
	})
	ClaimHeld = row(Row{
		Word: "ClaimHeld", Link: "attachment", Actor: Operator,
		Verdict: "another allocation has claimed volume {volume}, and it has one writer at a time",
		Next:    "the chain below has the allocation with the claim: end it, if it may end. A canary of a job with a volume never starts beside its predecessor",
		OnNomad: "the chain below has the allocation with the claim: nomad alloc stop of it, if it may end; if no client runs it: docs/how-to/troubleshooting-nomad.md#stuck. A canary never starts beside its predecessor",
		Why:     "Nomad gives a volume with one writer to one allocation. A claim that nomad operator snapshot restore has brought back does not end by itself.",
	})
	ClaimNotReleased = row(Row{
		Word: "ClaimNotReleased", Link: "attachment", Actor: Operator,
		Verdict: "an allocation that has ended still claims volume {volume}",
		Next:    "if nomad volume status shows no running allocation: nomad system gc; if the claim is still there after five minutes: docs/how-to/troubleshooting-nomad.md#stuck",
		Why:     "Nomad gives the volume to no other allocation before it has released the claim.",
	})
	PluginNotRegistered = row(Row{
		Word: "PluginNotRegistered", Link: "node", Actor: Operator,
		Verdict: "node {node} has no running plugin",
		Next:    "kubectl -n oxide-csi get pods -o wide, then kubectl -n oxide-csi logs --all-containers of its oxide-csi-node pod there",
		OnNomad: "nomad job status -namespace=oxide-csi oxide-csi-node; then nomad alloc logs -stderr of its allocation on client {node}",
		Why:     "The kubelet mounts volumes only after the plugin has registered. docs/how-to/registration.md has the ways to register.",
	})
	NodeNotReady = row(Row{
		Word: "NodeNotReady", Link: "node", Actor: Operator,
		Verdict: "the orchestrator does not hear from node {node}",
		Next:    "if its instance runs, repair the node; only if the instance is stopped or deleted: kubectl taint node {node} node.kubernetes.io/out-of-service=nodeshutdown:NoExecute",
		OnNomad: "if its instance runs, start the Nomad client there again; if it was stopped by mistake, start it; if it is gone for good, Nomad moves the allocation by itself",
		Why:     "The volume stays attached there until the node comes back, is deleted or gets the taint. Remove the taint when the node is back.",
	})
	PassphraseMissing = row(Row{
		Word: "PassphraseMissing", Code: codes.FailedPrecondition, Link: "device", Actor: Owner,
		Verdict: "volume {volume} is encrypted, and the node gets no passphrase for it",
		Next:    "create the Secret that the storage class names, with its old passphrase (key passphrase) if the volume was used before; else with a new one, and keep a copy",
		OnNomad: "nomad volume register of its file, with secrets { passphrase = … }: the old passphrase if the volume was used before; else a new one, and keep a copy",
		OnHosts: "--passphrase-file names its file: the old passphrase if the volume was used before; else a new one, and keep a copy",
		Why:     "The passphrase comes with each mount. docs/how-to/encrypt-volumes.md has the Secret and the class. A PersistentVolume that was made by hand names the Secret itself, in nodeStageSecretRef.",
	})
	WrongPassphrase = row(Row{
		Word: "WrongPassphrase", Code: codes.FailedPrecondition, Link: "device", Actor: Owner,
		Verdict: "the passphrase that the node gets does not open the encrypted volume {volume}",
		Next:    "save a copy of the present Secret, which other volumes may need; then put the first passphrase of this volume back; delete nothing",
		OnNomad: "nomad volume register of its file, with the first passphrase in secrets { passphrase = … }; delete nothing, the data are intact",
		OnHosts: "--passphrase-file names its file: the first passphrase of this volume; delete nothing",
		Why:     "The plugin never formats an encrypted disk again, so the data is still there.",
	})
	EncryptionUnavailable = row(Row{
		Word: "EncryptionUnavailable", Code: codes.FailedPrecondition, Link: "device", Actor: Operator,
		Verdict: "node {node} cannot open the encrypted volume {volume}: it lacks memory, or dm_mod and dm_crypt",
		Next:    "the messages below say which: modprobe -a dm_mod dm_crypt there, or a memory limit above --luks-memory for the plugin there",
		Why:     "To open an encrypted disk the kernel needs device-mapper, and cryptsetup needs memory for the key.",
	})
	ProgramMissing = row(Row{
		Word: "ProgramMissing", Code: codes.FailedPrecondition, Link: "node", Actor: Operator,
		Verdict: "a program that volume {volume} needs is not installed on node {node}",
		Next:    "install on {node} the package that the messages below name, or run the plugin from its container image",
		Why:     "The plugin runs mkfs, e2fsck, cryptsetup and others. The image has them; a bare host needs the packages.",
	})
	DiskNotResponding = row(Row{
		Word: "DiskNotResponding", Code: codes.Unavailable, Link: "device", Actor: RackOperator,
		Verdict: "disk {disk} does not answer on node {node}",
		Next:    "give the disk's ID, and the errors in the kernel log of the node, to the operator of the rack",
		Why:     "Reads wait without an end. The plugin waits a few seconds, and starts nothing that would hang too. The disk may answer again, and every orchestrator retries.",
	})
	DiskInUse = row(Row{
		Word: "DiskInUse", Code: codes.FailedPrecondition, Link: "device", Actor: Operator,
		Verdict: "another program on node {node} uses the disk of volume {volume}",
		Next:    "the messages below name who; if its owner agrees, unmount it, stop the container, or vgchange -an the LVM group; wipe and remove nothing",
		Why:     "The plugin mounts a disk only if no other program holds it: two users would destroy the filesystem.",
	})
	ForeignFilesystem = row(Row{
		Word: "ForeignFilesystem", Code: codes.FailedPrecondition, Link: "filesystem", Actor: Owner,
		Verdict: "the disk of volume {volume} holds something that the plugin has not made",
		Next:    "the messages below name what; ask the owner of the data. If it must stay, keep this volume and its claim, and use another; nothing was changed",
		OnNomad: "the messages below name what; ask the owner of the data. If it must stay, keep this volume, and use another; nothing was changed",
		Why:     "Mounting another volume's filesystem, or formatting over it, would lose data.",
	})
	DiskNotBlank = row(Row{
		Word: "DiskNotBlank", Code: codes.FailedPrecondition, Link: "filesystem", Actor: Owner,
		Verdict: "the disk of volume {volume} may hold data, but no filesystem, so it was not formatted",
		Next:    "ask the owner of the data; if nothing of it is needed, delete the volume and create a new one; else keep it and its claim, and use another",
		OnHosts: "ask the owner of the data; if nothing of it is needed, delete the volume and create a new one",
		Why:     "The plugin formats only a disk that it has read and found empty.",
	})
	FilesystemUnclean = row(Row{
		Word: "FilesystemUnclean", Code: codes.FailedPrecondition, Link: "filesystem", Actor: Owner,
		Verdict: "the filesystem of volume {volume} is damaged beyond an automatic repair",
		Next:    "end the workload and make a snapshot; then repair it as the messages below say, or restore an older snapshot into a new volume",
		Why:     "Before a writable mount the kernel replays the journal, and the plugin runs e2fsck -p, which repairs only what loses no data.",
	})
	FilesystemChecked = row(Row{
		Word: "FilesystemChecked", Code: codes.Aborted, Link: "filesystem", Actor: Nobody,
		Verdict: "the filesystem of volume {volume} is being checked or grown",
		Next:    "wait: the orchestrator tries again",
		Why:     "After a power cut a large filesystem takes minutes. The check continues when the call that began it has ended. The orchestrator repeats the call, which then waits for the check.",
	})
	ExpansionWaits = row(Row{
		Word: "ExpansionWaits", Code: codes.FailedPrecondition, Link: "volume", Actor: Owner,
		Verdict: "volume {volume} gets its new size when no workload uses it",
		Next:    "scale the workload of claim {claim} to 0, and keep the claim; on a rack without hot-plug also stop the instance; go back when kubectl get pvc shows the new capacity",
		OnNomad: "stop the job, and keep the volume; on a rack without hot-plug also stop the instance; start it again when the volume has its new size",
		OnHosts: "unmount and detach the volume, and expand it again",
		Why:     "A rack cannot change the size of a disk. Its disk is replaced by a larger copy while it is detached. Kubernetes' external-resizer tries again until no pod uses the volume.",
	})
	StateUnknown = row(Row{
		Word: "StateUnknown", Code: codes.FailedPrecondition, Link: "disk", Actor: Operator,
		Verdict: "the rack shows the disk or snapshot of volume {volume} in a state that the plugin does not know, and leaves it alone",
		Next:    "upgrade the plugin; the message has the state: if the newest version does not know it either, report it, and let the rack's operator look",
		Why:     "A later release of the rack may have states that this version of the plugin does not know. What may be done with such a disk or snapshot is unknown: it is neither attached nor detached, deleted or expanded. All others work. A create answers UNAVAILABLE instead.",
	})
	ProxyAnswered = row(Row{
		Word: "ProxyAnswered", Code: codes.Unavailable, Link: "rack", Actor: Operator,
		Verdict: "a proxy or another server answers the plugin's calls, and not the rack",
		Next:    "look at the proxies and load balancers before the rack, at the plugin's OXIDE_HOST, and at HTTPS_PROXY and NO_PROXY of the controller",
		Why:     "Every answer of a rack has an ID of its request. What a proxy answers says nothing about volumes, token or project. The orchestrator repeats its calls, and nothing is lost.",
	})
	RackUnavailable = row(Row{
		Word: "RackUnavailable", Code: codes.Unavailable, Link: "rack", Actor: RackOperator,
		Verdict: "the rack does not answer, or fails",
		Next:    "kubectl -n oxide-csi exec deploy/oxide-csi-controller -c oxide-plugin -- /oxide-csi doctor; then the rack's operator",
		OnNomad: "nomad alloc exec -namespace=oxide-csi -job oxide-csi-controller /usr/local/bin/oxide-csi doctor; then the rack's operator",
		OnHosts: "oxide-csi doctor, on the controller's host, shows what can be reached; then the rack's operator",
		Why:     "The orchestrator repeats its calls, and nothing is lost. What the call was to change may be done or not: a provisioner retries and does not drop the volume.",
	})
	RackFailed = row(Row{
		Word: "RackFailed", Code: codes.Internal, Link: "rack", Actor: RackOperator,
		Verdict: "the rack failed in a call",
		Next:    "kubectl -n oxide-csi exec deploy/oxide-csi-controller -c oxide-plugin -- /oxide-csi doctor; then the rack's operator",
		OnNomad: "nomad alloc exec -namespace=oxide-csi -job oxide-csi-controller /usr/local/bin/oxide-csi doctor; then the rack's operator",
		OnHosts: "oxide-csi doctor, on the controller's host, shows what can be reached; then the rack's operator",
		Why:     "The rack answered with an error of its own. A create answers UNAVAILABLE instead, because a disk may exist.",
	})
	ClaimTerminating = row(Row{
		Word: "ClaimTerminating", Link: "claim", Actor: Owner,
		Verdict: "claim {claim} is being deleted, and something still holds it",
		Next:    "kubectl describe pvc -n {namespace}: Used By has the pods that use it, Finalizers who else holds it; when these end, the claim goes. Remove no finalizer",
		OnNomad: "end what uses the volume",
		OnHosts: "end what uses the volume",
		Why:     "Kubernetes deletes a claim only when no pod uses it, and when each finalizer was removed by who has set it. No new pod starts with it.",
	})
	NotStartedYet = row(Row{
		Word: "NotStartedYet", Actor: Nobody,
		Verdict: "nothing is wrong with volume {volume} as far as can be seen, and its workload has not started",
		Next:    "ask again in a minute; kubectl describe {pod} shows what else it waits for",
		OnNomad: "ask again in a minute; nomad alloc status {allocation} shows what else it waits for",
		Why:     "Neither the plugin nor the orchestrator has said why. A workload also waits for its images and for room on a node.",
	})
	NotFound = row(Row{
		Word: "NotFound", Code: codes.NotFound, Link: "disk", Actor: Operator,
		Verdict: "the rack does not have what the message names",
		Next:    "see the message; oxide-csi orphans lists volumes without a disk",
		OnHosts: "oxide-csi volume list --all shows volumes and instances, oxide-csi snapshot list shows snapshots",
		Why:     "The plugin answers so only after it has seen that the token has access to the project. Without a role every look-up answers 404.",
	})
	SizeUnsupported = row(Row{
		Word: "SizeUnsupported", Code: codes.OutOfRange, Link: "claim", Actor: Owner,
		Verdict: "the rack makes no disk of this size",
		Next:    "ask for a size that the rack makes: docs/reference/limits.md",
		OnHosts: "docs/reference/limits.md has the sizes that racks make",
		Why:     "The code is final for a provisioner, and nothing was created.",
	})
	FormatNewer = row(Row{
		Word: "FormatNewer", Code: codes.FailedPrecondition, Link: "volume", Actor: Operator,
		Verdict: "a newer version of the plugin has written what this one reads",
		Next:    "upgrade the plugin again: docs/how-to/upgrade.md",
		Why:     "It happens after a rollback. Other volumes and instances are not concerned.",
	})
	NoRecord = row(Row{
		Word: "NoRecord", Code: codes.FailedPrecondition, Link: "volume", Actor: Operator,
		Verdict: "an anti-affinity group of the project has a name that the plugin needs for a record",
		Next:    "delete the group that the messages below name, unless somebody else needs it",
		Why:     "The group was made or changed by hand. Nothing else is refused because of it.",
	})
	ChangedMeanwhile = row(Row{
		Word: "ChangedMeanwhile", Code: codes.Unavailable, Link: "rack", Actor: Nobody,
		Verdict: "another change on the rack came first",
		Next:    "wait: the orchestrator repeats the call",
		OnHosts: "repeat the command",
		Why:     "A repeated call succeeds.",
	})
	DiskBusy = row(Row{
		Word: "DiskBusy", Code: codes.Aborted, Link: "disk", Actor: Nobody,
		Verdict: "the disk is still changing its state",
		Next:    "wait: the orchestrator repeats the call. If the disk stays in this state, tell the operator of the rack its ID",
		OnHosts: "repeat the command",
		Why:     "The call has waited as long as it may. Every orchestrator retries.",
	})
	RackRefused = row(Row{
		Word: "RackRefused", Code: codes.Internal, Link: "rack", Actor: RackOperator,
		Verdict: "the rack rejects the call, and the states of disk and instance do not explain why",
		Next:    "tell the rack's own words, which follow in the message, to the operator of the rack",
		Why:     "Nothing was changed.",
	})
	ExpansionUnderWay = row(Row{
		Word: "ExpansionUnderWay", Code: codes.Aborted, Link: "volume", Actor: Nobody,
		Verdict: "another process is expanding volume {volume}",
		Next:    "wait: the orchestrator repeats the call",
		OnHosts: "repeat the command",
		Why:     "One process at a time replaces the disk.",
	})
	VolumeDeleted = row(Row{
		Word: "VolumeDeleted", Code: codes.NotFound, Link: "volume", Actor: Nobody,
		Verdict: "volume {volume} was deleted while it was expanded",
		Next:    "nothing: the volume does not exist any more",
		Why:     "The deletion was asked for.",
	})
	DeviceNotFound = row(Row{
		Word: "DeviceNotFound", Code: codes.Unavailable, Link: "device", Actor: Nobody,
		Verdict: "the disk of volume {volume} is not visible in the guest of node {node}",
		Next:    "wait: the orchestrator repeats the call. If it lasts for minutes, run oxide-csi doctor on the node",
		OnHosts: "repeat the command; if it lasts for minutes: oxide-csi doctor",
		Why:     "NOT_FOUND would tell an orchestrator that the volume is deleted.",
	})
	DeviceMismatch = row(Row{
		Word: "DeviceMismatch", Code: codes.FailedPrecondition, Link: "device", Actor: Operator,
		Verdict: "a device of node {node} is not the disk of volume {volume}, although its serial says so",
		Next:    "let the orchestrator detach and attach the volume; if it comes back, report it",
		OnHosts: "detach the volume and attach it again; if it comes back, report it",
		Why:     "Nothing was changed.",
	})
	DeviceUnreadable = row(Row{
		Word: "DeviceUnreadable", Code: codes.FailedPrecondition, Link: "device", Actor: RackOperator,
		Verdict: "the disk of volume {volume} cannot be read on node {node}",
		Next:    "read the kernel's log of the node, and ask the operator of the rack about the disk",
		Why:     "A device that cannot be read may hold data, so it is not formatted.",
	})
	OptionNotAllowed = row(Row{
		Word: "OptionNotAllowed", Code: codes.InvalidArgument, Link: "claim", Actor: Owner,
		Verdict: "an option of mkfs or a mount flag is not allowed",
		Next:    "correct the storage class: docs/reference/parameters.md, docs/reference/mount-flags.md",
		OnHosts: "correct the option: docs/reference/parameters.md, docs/reference/mount-flags.md",
		Why:     "The plugin knows the options that can lose data or leave the container.",
	})
	AccessModeUnsupported = row(Row{
		Word: "AccessModeUnsupported", Code: codes.InvalidArgument, Link: "claim", Actor: Owner,
		Verdict: "the access mode lets several nodes use the volume at once, and a disk is attached to one instance at a time",
		Next:    "delete the claim, which has no volume, and create it with ReadWriteOnce or ReadWriteOncePod",
		OnNomad: "use single-node-writer, or single-node-reader-only",
		OnHosts: "use a mode SINGLE_NODE_…",
		Why:     "It is the rack's limit. What several nodes must share needs a file server on a volume, or buckets.",
	})
	FilesystemUnsupported = row(Row{
		Word: "FilesystemUnsupported", Code: codes.InvalidArgument, Link: "claim", Actor: Owner,
		Verdict: "the plugin does not support this filesystem",
		Next:    "use ext4, ext3, xfs or btrfs: docs/reference/parameters.md",
		OnHosts: "docs/reference/parameters.md has the filesystems",
		Why:     "The kernel of a node may know others, which the plugin neither makes nor checks.",
	})
	FormatFailed = row(Row{
		Word: "FormatFailed", Code: codes.Internal, Link: "filesystem", Actor: Operator,
		Verdict: "making the filesystem of volume {volume} failed",
		Next:    "the message has the words of mkfs: correct mkfsOptions if they are the cause",
		Why:     "The disk was blank. A repeated call formats it again.",
	})
	MountFailed = row(Row{
		Word: "MountFailed", Code: codes.Internal, Link: "filesystem", Actor: Operator,
		Verdict: "the kernel rejects the mount of volume {volume}",
		Next:    "the message has the kernel's words: correct the mount flags if they are the cause",
		Why:     "Nothing was changed.",
	})
	KernelTooOld = row(Row{
		Word: "KernelTooOld", Code: codes.FailedPrecondition, Link: "filesystem", Actor: Operator,
		Verdict: "the kernel of node {node} lacks a feature of the filesystem of volume {volume}",
		Next:    "use the volume on a node with a newer kernel, or load the module that the message names: docs/reference/compatibility.md has the oldest kernel for each filesystem",
		Why:     "A filesystem that other tools made can have newer features than this kernel. Nothing was changed.",
	})
	GrowFailed = row(Row{
		Word: "GrowFailed", Code: codes.Internal, Link: "filesystem", Actor: Operator,
		Verdict: "the filesystem of volume {volume} did not grow",
		Next:    "the message has the program's words. The volume works with its old size, and growing is tried again",
		Why:     "A stage succeeds with the old size. The volume's health reports it.",
	})
	StateFolderUnusable = row(Row{
		Word: "StateFolderUnusable", Code: codes.FailedPrecondition, Link: "node", Actor: Operator,
		Verdict: "node {node} cannot use its folder --state-dir",
		Next:    "repair the folder: it must be writable, and its disk must have room",
		Why:     "The node keeps there which disks it may hold.",
	})
	MountInUse = row(Row{
		Word: "MountInUse", Code: codes.FailedPrecondition, Link: "filesystem", Actor: Operator,
		Verdict: "a process still uses a mount of volume {volume}",
		Next:    "end the process, or unmount the mount, that the message names",
		OnHosts: "end the process, or unmount the mount, that the message names; with --wait the command waits for it",
		Why:     "The kernel unmounts nothing that is in use.",
	})
	PathOccupied = row(Row{
		Word: "PathOccupied", Code: codes.FailedPrecondition, Link: "filesystem", Actor: Operator,
		Verdict: "a path holds something that this plugin did not put there",
		Next:    "look at the path that the message names, and remove what is there by hand",
		Why:     "The plugin removes only its own mounts and folders.",
	})
	HeaderDamaged = row(Row{
		Word: "HeaderDamaged", Code: codes.FailedPrecondition, Link: "device", Actor: Owner,
		Verdict: "the LUKS2 header of volume {volume} cannot be read",
		Next:    "restore the copy of the header: docs/how-to/encrypt-volumes.md#keep-the-header",
		Why:     "Without its header nothing can decrypt the disk.",
	})
	MappingInUse = row(Row{
		Word: "MappingInUse", Code: codes.FailedPrecondition, Link: "device", Actor: Operator,
		Verdict: "a process, or a device built on it, uses the mapping of the encrypted volume {volume}",
		Next:    "end the process, or the device, that the message names",
		OnHosts: "end the process, or the device, that the message names; with --wait the command waits for it",
		Why:     "The kernel closes no mapping that is in use.",
	})
	CryptsetupFailed = row(Row{
		Word: "CryptsetupFailed", Code: codes.Internal, Link: "device", Actor: Operator,
		Verdict: "cryptsetup failed on node {node}",
		Next:    "read the words of cryptsetup in the message",
		Why:     "A repeated call repeats the step.",
	})
	RecordUnreadable = row(Row{
		Word: "RecordUnreadable", Code: codes.FailedPrecondition, Link: "node", Actor: Operator,
		Verdict: "the record of volume {volume} on node {node} cannot be read",
		Next:    "the message names the file: keep a copy of it, and report it, because the node may hold the volume",
		Why:     "The volume may be on any disk of the node.",
	})
	ProgramRunning = row(Row{
		Word: "ProgramRunning", Code: codes.Aborted, Link: "device", Actor: Nobody,
		Verdict: "a program of an earlier call still works on the disk of volume {volume}",
		Next:    "wait: the orchestrator repeats the call",
		OnHosts: "repeat the command",
		Why:     "It is an mkfs or e2fsck that must not be interrupted.",
	})
	KeyDerivationBusy = row(Row{
		Word: "KeyDerivationBusy", Code: codes.Aborted, Link: "device", Actor: Nobody,
		Verdict: "the key of another volume is being derived on node {node}",
		Next:    "wait: the orchestrator repeats the call",
		OnHosts: "repeat the command",
		Why:     "One key at a time is derived on a node, because it takes much memory.",
	})
	IdentityNotReady = row(Row{
		Word: "IdentityNotReady", Code: codes.Unavailable, err: metadata.ErrNotReady, Link: "node", Actor: Nobody,
		Verdict: "node {node} does not know yet which instance it is",
		Next:    "wait: the orchestrator repeats the call. If it lasts: docs/how-to/identity.md#what-each-failure-looks-like",
		Why:     "The source of its identity does not answer yet.",
	})
	IdentityConflict = row(Row{
		Word: "IdentityConflict", Code: codes.FailedPrecondition, err: metadata.ErrConflict, Link: "node", Actor: Operator,
		Verdict: "two sources of the identity of node {node} contradict each other",
		Next:    "docs/how-to/identity.md#what-each-failure-looks-like has each message",
		Why:     "On the wrong instance the plugin would attach disks to another node.",
	})
	IdentityInvalid = row(Row{
		Word: "IdentityInvalid", Code: codes.FailedPrecondition, err: metadata.ErrInvalid, Link: "node", Actor: Operator,
		Verdict: "the identity of node {node} is wrong",
		Next:    "docs/how-to/identity.md#what-each-failure-looks-like has each message",
		Why:     "On the wrong instance the plugin would attach disks to another node.",
	})
)
