// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package fault

import (
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// The rows after those of table.go: what a node finds on a disk, what lasts for a while, and what only an RPC's error
// says.
var (
	PassphraseMissing = row(Row{
		Word: "PassphraseMissing", Code: codes.FailedPrecondition, Link: "device", Actor: Owner,
		Verdict: "volume {volume} is encrypted, and the node gets no passphrase for it",
		Next:    "create the Secret that the storage class names, with its old passphrase (key passphrase) if the volume was used before; else with a new one, and keep a copy",
		OnNomad: "nomad volume register of its file, with secrets { passphrase = … }: the old passphrase if the volume was used before; else a new one, and keep a copy",
		OnHosts: "--passphrase-file names its file: the old passphrase if the volume was used before; else a new one, and keep a copy",
		Why:     "The passphrase comes with each mount. docs/how-to/encrypt-volumes.md has the Secret and the class. A PersistentVolume that was made manually names the Secret itself, in nodeStageSecretRef.",
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
		Verdict: "a tool that volume {volume} needs is not installed on node {node}",
		Next:    "install on {node} the package that the messages below name, or run the plugin from its container image",
		Why:     "The plugin runs mkfs, e2fsck, cryptsetup and others. The image has them; a bare host needs the packages.",
	})
	DiskNotResponding = row(Row{
		Word: "DiskNotResponding", Code: codes.Unavailable, Link: "device", Actor: RackOperator,
		Verdict: "disk {disk} does not respond on node {node}",
		Next:    "give the disk's ID, and the errors in the kernel log of the node, to the operator of the rack",
		Why:     "Reads wait for ever. The plugin starts nothing that would hang too. Every orchestrator retries.",
	})
	DiskInUse = row(Row{
		Word: "DiskInUse", Code: codes.FailedPrecondition, Link: "device", Actor: Operator,
		Verdict: "another process on node {node} uses the disk of volume {volume}",
		Next:    "the messages below name who; if its owner agrees, unmount it, stop the container, or vgchange -an the LVM group; wipe and remove nothing",
		Why:     "The plugin mounts a disk only if no other process holds it: two users would destroy the filesystem.",
	})
	ForeignFilesystem = row(Row{
		Word: "ForeignFilesystem", Code: codes.FailedPrecondition, Link: "filesystem", Actor: Owner,
		Verdict: "the disk of volume {volume} holds something that the plugin has not made",
		Next:    "the messages below name what; ask the owner of the data. If it must stay, keep this volume and its claim, and use another; nothing was changed",
		Why:     "Mounting another volume's filesystem, or formatting over it, would lose data.",
	})
	DiskNotBlank = row(Row{
		Word: "DiskNotBlank", Code: codes.FailedPrecondition, Link: "filesystem", Actor: Owner,
		Verdict: "the disk of volume {volume} may hold data, but no filesystem, so it was not formatted",
		Next:    "ask the owner of the data; if the data is not needed, delete the volume and create a new one; else keep it, and use another",
		OnHosts: "ask the owner of the data; if the data is not needed, delete the volume and create a new one; else keep it, and use another",
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
		Why:     "After a power cut a large filesystem takes minutes. The check outlives the call that began it.",
	})
	ExpansionWaits = row(Row{
		Word: "ExpansionWaits", Code: codes.FailedPrecondition, Link: "volume", Actor: Owner,
		Verdict: "volume {volume} gets its new size when no workload uses it",
		Next:    "scale the workload of claim {claim} to 0, and keep the claim; on a rack without hot-plug also stop the instance; scale up when kubectl get pvc shows the new capacity",
		OnNomad: "stop the job, and keep the volume; on a rack without hot-plug also stop the instance; start it again when the volume has its new size",
		OnHosts: "unmount and detach the volume, and expand it again",
		Why:     "The disk is replaced by a larger copy while it is detached. Kubernetes' external-resizer tries again until no pod uses the volume.",
	})
	StateUnknown = row(Row{
		Word: "StateUnknown", Code: codes.FailedPrecondition, Link: "disk", Actor: Operator,
		Verdict: "the plugin leaves the disk or snapshot of volume {volume} alone, because it does not know its state on the rack",
		Next:    "upgrade the plugin; the message has the state: if the newest version does not know it either, report it, and let the rack's operator look",
		Why:     "A later release of the rack may have such states. The object is neither attached nor detached, deleted or expanded; all others work. A create returns UNAVAILABLE, not this code.",
	})
	ProxyAnswered = row(Row{
		Word: "ProxyAnswered", Code: codes.Unavailable, Link: "rack", Actor: Operator,
		Verdict: "a proxy or another server, not the rack, responds to the plugin's calls",
		Next:    "check proxies and load balancers in front of the rack, the plugin's OXIDE_HOST, and the controller's HTTPS_PROXY and NO_PROXY",
		OnHosts: "check proxies and load balancers in front of the rack, the plugin's OXIDE_HOST, and the controller's HTTPS_PROXY and NO_PROXY",
		Why:     "Every response of a rack has an ID of its request. What a proxy returns says nothing about volumes, token or project. The orchestrator repeats its calls, and nothing is lost.",
	})
	RackUnavailable = row(Row{
		Word: "RackUnavailable", Code: codes.Unavailable, Link: "rack", Actor: RackOperator,
		Verdict: "the rack does not respond, or fails",
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
		Why:     "A create returns UNAVAILABLE, not this code, because a disk may exist.",
	})
	ClaimTerminating = row(Row{
		Word: "ClaimTerminating", Link: "claim", Actor: Owner,
		Verdict: "claim {claim} is being deleted, and something still holds it",
		Next:    "kubectl describe pvc -n {namespace} shows the pods in Used By, other holders in Finalizers; when these end, the claim goes. Remove no finalizer",
		OnNomad: "end what uses the volume",
		OnHosts: "end what uses the volume",
		Why:     "Kubernetes deletes a claim only when no pod uses it, and the owners have removed all finalizers. No new pod starts with it.",
	})
	NoConsumer = row(Row{
		Word: "NoConsumer", Link: "claim", Actor: Owner,
		Verdict: "no pod uses claim {claim}, which gets its volume when such a pod is placed on a node",
		Next:    "start the pod; or use a class with volumeBindingMode Immediate, which makes the volume at once",
		Why:     "With WaitForFirstConsumer the volume is made on the rack of the node that the scheduler chooses.",
	})
	VolumeReleased = row(Row{
		Word: "VolumeReleased", Link: "volume", Actor: Operator,
		Verdict: "the claim of volume {volume} is gone, and its PersistentVolume is still there",
		Next:    "kubectl describe pv shows the reclaim policy: Retain keeps volume and data for you (docs/how-to/existing-disk.md uses it again), Delete waits for what the messages below say",
		Why:     "A Released or Failed PersistentVolume does not bind to another claim by itself.",
	})
	WaitsForOther = row(Row{
		Word: "WaitsForOther", Link: "workload", Actor: Owner,
		Verdict: "nothing is wrong with volume {volume} as far as can be seen: {pod} waits for something else",
		Next:    "the messages below have the reason: kubectl describe {pod}",
		Why:     "For instance a node with room, a taint, an image, or an object that the pod names.",
	})
	WorkloadTerminating = row(Row{
		Word: "WorkloadTerminating", Link: "workload", Actor: Operator,
		Verdict: "the workload of claim {claim} is being deleted, and is still there",
		Next:    "kubectl describe {pod}: after its grace period its events, Finalizers and Node say what it waits for. Do not delete it by force: its volume may still be mounted",
		OnNomad: "nomad alloc status {allocation}: it may run for its shutdown_delay and its kill_timeout",
		OnHosts: "end what uses the volume",
		Why:     "Until its tasks have ended and its volumes are unmounted, the volume stays attached to its node.",
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
		Why:     "The plugin says so only after it has seen that the token has access to the project. Without a role every look-up returns 404.",
	})
	SizeUnsupported = row(Row{
		Word: "SizeUnsupported", Code: codes.OutOfRange, Link: "claim", Actor: Owner,
		Verdict: "the rack makes no disk of this size",
		Next:    "ask for a size that the rack makes: docs/reference/limits.md",
		OnHosts: "ask for a size that the rack makes: docs/reference/limits.md",
		Why:     "The code is final for a provisioner, and nothing was created.",
	})
	FormatNewer = row(Row{
		Word: "FormatNewer", Code: codes.FailedPrecondition, Link: "volume", Actor: Operator,
		Verdict: "a newer version of the plugin has written what this one reads",
		Next:    "upgrade the plugin again: docs/how-to/upgrade.md",
		Why:     "It happens after a rollback. Other volumes and instances are not affected.",
	})
	NoRecord = row(Row{
		Word: "NoRecord", Code: codes.FailedPrecondition, Link: "volume", Actor: Operator,
		Verdict: "an anti-affinity group of the project has a name that the plugin needs for a record",
		Next:    "delete the group that the messages below name, unless somebody else needs it",
		Why:     "The group was made or changed manually. Only calls that need that record fail.",
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
		Next:    "wait: the orchestrator repeats the call. If the disk stays in this state, tell the rack's operator the disk's ID",
		OnHosts: "repeat the command",
		Why:     "The call has waited as long as it may. Every orchestrator retries.",
	})
	RackRefused = row(Row{
		Word: "RackRefused", Code: codes.FailedPrecondition, Link: "rack", Actor: RackOperator,
		Verdict: "the rack rejects the call, and the states of disk and instance do not explain why",
		Next:    "tell the rack's own words in the message to the operator of the rack",
		OnHosts: "tell the rack's own words in the message to the operator of the rack",
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
		Next:    "wait: the orchestrator repeats the call. If it lasts for 5 minutes, shut the guest of node {node} down and start its instance: it gets all attached disks",
		OnHosts: "repeat the command; if it lasts for 5 minutes, shut the guest down and start its instance: it gets all attached disks",
		Why:     "The rack shows the disk as attached. A rack with hot-plug may do so before the guest has the disk, or fail to plug it in.",
	})
	DeviceMismatch = row(Row{
		Word: "DeviceMismatch", Code: codes.FailedPrecondition, Link: "device", Actor: Operator,
		Verdict: "a device of node {node} is not the disk of volume {volume}, although its serial says so",
		Next:    "let the orchestrator detach and attach the volume; if the error returns, report it",
		OnHosts: "detach the volume and attach it again; if the error returns, report it",
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
		Why:     "Only options that neither lose data nor leave the container are listed there.",
	})
	AccessModeUnsupported = row(Row{
		Word: "AccessModeUnsupported", Code: codes.InvalidArgument, Link: "claim", Actor: Owner,
		Verdict: "the access mode lets several nodes use the volume at once, and a disk is attached to one instance at a time",
		Next:    "delete the claim, which has no volume, and create it with ReadWriteOnce or ReadWriteOncePod",
		OnNomad: "use single-node-writer, or single-node-reader-only",
		OnHosts: "use a mode SINGLE_NODE_…",
		Why:     "What several nodes must share needs a file server on a volume, or buckets.",
	})
	FilesystemUnsupported = row(Row{
		Word: "FilesystemUnsupported", Code: codes.InvalidArgument, Link: "claim", Actor: Owner,
		Verdict: "the plugin does not support this filesystem",
		Next:    "use ext4, ext3, xfs or btrfs: docs/reference/parameters.md",
		OnHosts: "use ext4, ext3, xfs or btrfs: docs/reference/parameters.md",
		Why:     "The kernel of a node may know others, which the plugin neither makes nor checks.",
	})
	FormatFailed = row(Row{
		Word: "FormatFailed", Code: codes.Internal, Link: "filesystem", Actor: Operator,
		Verdict: "making the filesystem of volume {volume} failed",
		Next:    "the message has the words of mkfs: if it rejects an option, create a class with other mkfsOptions, and another claim",
		OnNomad: "the message has the words of mkfs: if it rejects an option, create another volume with other mkfsOptions",
		OnHosts: "the message has the words of mkfs: if it rejects an option, choose others: --volume-context=mkfsOptions=...",
		Why:     "The disk was blank. A repeated call formats it again.",
	})
	MountFailed = row(Row{
		Word: "MountFailed", Code: codes.Internal, Link: "filesystem", Actor: Operator,
		Verdict: "the kernel rejects the mount of volume {volume}",
		Next:    "correct the mount flags if they are the cause; the kernel's log says more",
		OnHosts: "correct the mount flags if they are the cause; the kernel's log says more",
		Why:     "The message has the kernel's words. Nothing was changed.",
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
		Next:    "the message has the tool's words. The volume works with its old size, and growing is tried again",
		Why:     "A stage succeeds with the old size. The volume's health reports it.",
	})
	StateFolderUnusable = row(Row{
		Word: "StateFolderUnusable", Code: codes.FailedPrecondition, Link: "node", Actor: Operator,
		Verdict: "node {node} cannot use its directory --state-dir",
		Next:    "repair the directory: it must be writable, and its disk must have room",
		Why:     "The node records there which disks it may hold.",
	})
	MountInUse = row(Row{
		Word: "MountInUse", Code: codes.FailedPrecondition, Link: "filesystem", Actor: Operator,
		Verdict: "a process still uses a mount of volume {volume}",
		Next:    "end the process, or unmount the mount, that the message names",
		OnHosts: "end the process, or unmount the mount, that the message names; a command with --wait waits for that",
		Why:     "The kernel unmounts nothing that is in use.",
	})
	PathOccupied = row(Row{
		Word: "PathOccupied", Code: codes.FailedPrecondition, Link: "filesystem", Actor: Operator,
		Verdict: "a path holds something that this plugin did not put there",
		Next:    "use another path, or move away what is at the one that the message names",
		Why:     "The plugin removes only its own mounts and directories.",
	})
	HeaderDamaged = row(Row{
		Word: "HeaderDamaged", Code: codes.FailedPrecondition, Link: "device", Actor: Owner,
		Verdict: "the LUKS2 header of volume {volume} cannot be read",
		Next:    "restore the copy of the header: docs/how-to/encrypt-volumes.md#keep-the-header",
		OnHosts: "restore the copy of the header: docs/how-to/encrypt-volumes.md#keep-the-header",
		Why:     "Without its header nothing can decrypt the disk.",
	})
	MappingInUse = row(Row{
		Word: "MappingInUse", Code: codes.FailedPrecondition, Link: "device", Actor: Operator,
		Verdict: "a process, or a device on top, uses the mapping of the encrypted volume {volume}",
		Next:    "end the process, or the device, that the message names",
		OnHosts: "end the process, or the device, that the message names; a command with --wait waits for that",
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
		Next:    "the message names the record's file and a disk: keep a copy of the file, report it, and end the use of that disk there",
		Why:     "The volume may be on any disk of the node.",
	})
	ProgramRunning = row(Row{
		Word: "ProgramRunning", Code: codes.Aborted, Link: "device", Actor: Nobody,
		Verdict: "a process of an earlier call still works on the disk of volume {volume}",
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
		Why:     "The source of its identity does not respond yet.",
	})
	IdentityConflict = row(Row{
		Word: "IdentityConflict", Code: codes.FailedPrecondition, err: metadata.ErrConflict, Link: "node", Actor: Operator,
		Verdict: "two sources of the identity of node {node} contradict each other",
		Next:    "docs/how-to/identity.md#what-each-failure-looks-like has each message",
		Why:     "With a wrong identity the plugin would attach disks to another node.",
	})
	IdentityInvalid = row(Row{
		Word: "IdentityInvalid", Code: codes.FailedPrecondition, err: metadata.ErrInvalid, Link: "node", Actor: Operator,
		Verdict: "the identity of node {node} is wrong",
		Next:    "docs/how-to/identity.md#what-each-failure-looks-like has each message",
		Why:     "With a wrong identity the plugin would attach disks to another node.",
	})
)
