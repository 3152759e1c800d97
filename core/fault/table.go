// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package fault

import "google.golang.org/grpc/codes"

// Table has all rows: those of this file, then those of table_node.go, in the order in which Go initialises variables.
// Causes come before their effects: the first row that matches is that of an error that wraps several errors, and the
// verdict of explain.
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
		OnHosts: "put a valid token of this silo into OXIDE_TOKEN_FILE, or into OXIDE_TOKEN and restart the controller",
		Why:     "The token is missing, wrong, expired or revoked, so every call to the rack fails. A create returns UNAVAILABLE, which is not final, not this code.",
	})
	ProjectUnusable = row(Row{
		Word: "ProjectUnusable", Code: codes.FailedPrecondition, Link: "rack", Actor: Operator,
		Verdict: "the project of the settings does not exist, or the token's user has no role on it",
		Next:    "correct the controller's OXIDE_PROJECT if misspelt; else have the silo's administrator give the token's user limited-collaborator on the project",
		OnHosts: "correct the controller's OXIDE_PROJECT if misspelt; else have the silo's administrator give the token's user limited-collaborator on the project",
		Why:     "A rack returns 404 for a project that a user may not see. So a wrong name and a missing role look the same. A create returns UNAVAILABLE, not this code.",
	})
	RoleTooLow = row(Row{
		Word: "RoleTooLow", Code: codes.PermissionDenied, Link: "rack", Actor: Operator,
		Verdict: "the token's role allows reads, but no changes",
		Next:    "have the silo's administrator give the user of the controller's token (OXIDE_TOKEN_FILE) the role limited-collaborator on the project",
		OnHosts: "have the silo's administrator give the user of the controller's token (OXIDE_TOKEN_FILE) the role limited-collaborator on the project",
		Why:     "Reads work, changes do not. A create returns UNAVAILABLE, not this code.",
	})
	OtherDriver = row(Row{
		Word: "OtherDriver", Link: "claim", Actor: Owner,
		Verdict: "claim {claim} has no volume, and its storage class is not this plugin's",
		Next:    "end its pod, delete the claim, and create it with a class of csi.oxide.computer (kubectl get storageclass)",
		Why:     "The class of a claim never changes. With another driver's class, or a missing one, it does not reach the plugin.",
	})
	SnapshotNotReady = row(Row{
		Word: "SnapshotNotReady", Link: "claim", Actor: Owner,
		Verdict: "claim {claim} waits for its snapshot, which is not ready",
		Next:    "kubectl describe volumesnapshot -n {namespace}: the status of the claim's VolumeSnapshot has the reason",
		Why:     "The provisioner creates the volume when the VolumeSnapshot has readyToUse: true.",
	})
	SourceUnfit = row(Row{
		Word: "SourceUnfit", Link: "claim", Actor: Owner,
		Verdict: "claim {claim} cannot be made from the snapshot or claim that it names as its source",
		Next:    "the messages below say why; a claim never changes its source: end its pod, and create another claim",
		Why:     "The source must exist in the same namespace, be bound or ready, have the same volumeMode, and not be larger than the claim.",
	})
	ClaimMissing = row(Row{
		Word: "ClaimMissing", Link: "claim", Actor: Owner,
		Verdict: "claim {claim}, which {pod} names, does not exist",
		Next:    "kubectl get pvc -n {namespace}: create the claim, or correct its name in the pod",
		Why:     "The scheduler places no pod before all its claims exist.",
	})
	ClaimLost = row(Row{
		Word: "ClaimLost", Link: "volume", Actor: Operator,
		Verdict: "claim {claim} has lost its PersistentVolume: the object was deleted",
		Next:    "the disk may still be there: oxide-csi volume list; then make a PersistentVolume and a claim for it: docs/how-to/existing-disk.md",
		Why:     "Kubernetes calls the data lost, but only the object is lost: only the plugin deletes a disk, with the reclaim policy Delete.",
	})
	ClaimNotBound = row(Row{
		Word: "ClaimNotBound", Link: "claim", Actor: Owner,
		Verdict: "no PersistentVolume fits claim {claim}, and its class makes none for it",
		Next:    "the messages below say what differs: correct the PersistentVolume, or create another claim",
		Why:     "A claim that names a volume, or a class without provisioner, waits for a PersistentVolume that somebody makes.",
	})
	FeatureUnsupported = row(Row{
		Word: "FeatureUnsupported", Link: "claim", Actor: Owner,
		Verdict: "claim {claim} asks for something that the plugin or the cluster does not offer",
		Next:    "the messages below name it: create the claim without it",
		Why:     "For instance a selector, a VolumeAttributesClass, or a source in another namespace.",
	})
	VolumeModeDiffers = row(Row{
		Word: "VolumeModeDiffers", Link: "workload", Actor: Owner,
		Verdict: "{pod} uses claim {claim} as a filesystem, but the claim is raw block, or the reverse",
		Next:    "a claim with volumeMode Block belongs in volumeDevices of the container, any other in volumeMounts: correct the pod",
		Why:     "kubelet compares the pod with the claim before it asks the plugin.",
	})
	OnlySnapshot = row(Row{
		Word: "OnlySnapshot", Code: codes.FailedPrecondition, Link: "disk", Actor: Operator,
		Verdict: "volume {volume} has no disk: its expansion was interrupted, and its data are on a snapshot csi-grow-…",
		Next:    "delete neither that snapshot nor the volume or its claim; ask the silo's administrator for quota if it is short: then the plugin makes the disk by itself",
		OnHosts: "delete neither that snapshot nor the volume or its claim; ask the silo's administrator for quota if it is short: then the plugin makes the disk by itself",
		Why:     "A volume grows by a new disk that is made from a snapshot of the old one. The old one is deleted already.",
	})
	VolumeBeingReplaced = row(Row{
		Word: "VolumeBeingReplaced", Code: codes.Aborted, Link: "disk", Actor: Nobody,
		Verdict: "volume {volume} has no disk until its expansion is finished",
		Next:    "wait: the plugin makes the disk by itself. Delete neither the snapshot csi-grow-… nor the volume, and ask for quota if it lasts",
		OnHosts: "oxide-csi volume expand again, or attach, makes the disk; delete neither the snapshot csi-grow-… nor the volume",
		Why:     "Its data are on a snapshot. Every orchestrator retries.",
	})
	ExpansionNeedsRoom = row(Row{
		Word: "ExpansionNeedsRoom", Code: codes.OutOfRange, Link: "volume", Actor: RackOperator,
		Verdict: "volume {volume} keeps its size: the quota has no room for the larger disk",
		Next:    "the volume still works; ask the silo's administrator for more quota",
		OnHosts: "the volume still works; ask the silo's administrator for more quota",
		Why:     "While a volume grows, the quota needs its new size and its old one. Unlike RESOURCE_EXHAUSTED, OUT_OF_RANGE is final for a resizer.",
	})
	NameTaken = row(Row{
		Word: "NameTaken", Code: codes.FailedPrecondition, Link: "disk", Actor: Operator,
		Verdict: "another disk took the name of volume {volume} while the volume grew",
		Next:    "keep the volume, its claim, and the snapshot csi-grow-…, which has the data; if the owner of the other disk agrees, delete that disk alone",
		Why:     "Another client created a disk of the same name while the name was free.",
	})
	VolumeDiffers = row(Row{
		Word: "VolumeDiffers", Code: codes.AlreadyExists, Link: "disk", Actor: Owner,
		Verdict: "a disk has the name of volume {volume} already, and is not what is asked for",
		Next:    "delete nothing: the message says what differs. Ask for the disk's own values, or make a new claim, which gets a new name",
		OnNomad: "delete nothing: the message says what differs. Ask for the disk's own values, or give the volume another name",
		OnHosts: "or ask for what it was made with; oxide-csi volume expand makes it larger",
		Why:     "A volume's name leads to its disk, so that a repeated create finds it. The size is the volume's first size, even after it has grown.",
	})
	QuotaExhausted = row(Row{
		Word: "QuotaExhausted", Code: codes.ResourceExhausted, Link: "disk", Actor: RackOperator,
		Verdict: "the silo's quota, or the rack's space, is too small for the volume",
		Next:    "ask the silo's administrator for more quota, or the rack's operator for space: the messages say which is full",
		OnHosts: "ask the silo's administrator for more quota, or the rack's operator for space: the messages say which is full",
		Why:     "Disks and snapshots of all projects of the silo count. A clone needs its size twice for a moment. A provisioner tries another topology segment.",
	})
	RackUnknown = row(Row{
		Word: "RackUnknown", Code: codes.ResourceExhausted, Link: "rack", Actor: Operator,
		Verdict: "the plugin serves no rack that the volume may be on",
		Next:    "give controller, nodes and the volume's topology the same rack names",
		OnHosts: "choose one of the racks that the message names",
		Why:     "A rack's name is a topology segment. With this code a provisioner chooses another node.",
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
	RestartPlanned = row(Row{
		Word: "RestartPlanned", Code: codes.FailedPrecondition, Link: "instance", Actor: Nobody,
		Verdict: "volume {volume} waits for a planned restart of node {node}",
		Next:    "oxide-csi volume show {volume} shows when it begins, and what it waits for",
		OnHosts: "oxide-csi volume attach with --wait waits for it; otherwise repeat attach at least every 10 minutes, or the request ends",
		Why:     "The rack attaches disks only while an instance is stopped. One restart serves all volumes that wait for the node. Nomad retries only this code, for a day; Kubernetes' external-attacher retries every code.",
	})
	InstanceFull = row(Row{
		Word: "InstanceFull", Code: codes.ResourceExhausted, Link: "instance", Actor: Operator,
		Verdict: "instance {instance} of node {node} has no room for another disk",
		Next:    "kubectl cordon {node}, then kubectl delete {pod}: it starts on another node; then kubectl uncordon {node}",
		OnNomad: "nomad node eligibility -disable of client {node}, then nomad alloc stop {allocation}: it starts on another client; then -enable",
		OnHosts: "use another instance, or detach a volume from this instance: oxide-csi volume list has them",
		Why:     "The boot disk and disks that were attached manually count. Racks of release 18 and later take `--max-disks=12`.",
	})
	SerialCollision = row(Row{
		Word: "SerialCollision", Code: codes.FailedPrecondition, Link: "device", Actor: Operator,
		Verdict: "the disk of volume {volume} cannot be told from another disk of node {node}",
		Next:    "kubectl cordon {node}, then kubectl delete {pod}: it starts on another node. Detach nothing that is mounted",
		OnNomad: "nomad node eligibility -disable of client {node}, then nomad alloc stop {allocation}: it starts on another client. Detach nothing that is mounted",
		OnHosts: "attach the volume to another instance; detach nothing that is mounted",
		Why:     "A guest knows a disk only by the first 20 bytes of its name. Of two disks with the same bytes it shows one.",
	})
	InstanceStopped = row(Row{
		Word: "InstanceStopped", Link: "instance", Actor: Operator,
		Verdict: "instance {instance} of node {node} is not running",
		Next:    "start it in the rack's console, unless its owner stopped it on purpose, or oxide-csi volume list shows a restart of it; its disks are still attached",
		OnHosts: "repeat the attach or detach that waits for its stop, if oxide-csi volume list has one; then start it, unless its owner stopped it on purpose",
		Why:     "Its owner has stopped it, or it failed. The plugin does not start an instance that it has not stopped.",
	})
	RunsWithoutDisk = row(Row{
		Word: "RunsWithoutDisk", Link: "disk", Actor: Operator,
		Verdict: "a workload runs with volume {volume}, and its disk {disk} is not attached to the instance {instance} where it runs",
		Next:    "let nothing else use the volume; kubectl delete {pod}: it starts again, and gets the disk. The last writes may be lost",
		OnNomad: "let nothing else use the volume; nomad alloc stop {allocation}: the next one gets the disk. The last writes may be lost",
		Why:     "The orchestrator takes the volume for attached, and the rack says otherwise: somebody detached the disk, or attached it to another instance. Reads and writes fail there.",
	})
	RunsWithoutMount = row(Row{
		Word: "RunsWithoutMount", Link: "mount", Actor: Operator,
		Verdict: "a workload runs with volume {volume} on node {node}, and the node has no mount of its disk",
		Next:    "kubectl delete {pod}: it starts again, and the volume is mounted. The last writes may be lost",
		OnNomad: "nomad alloc stop {allocation}: the next one gets the volume mounted. The last writes may be lost",
		Why:     "Somebody unmounted the volume manually, or the node lost its mounts while the orchestrator takes the workload for running. A container may still have its own mount.",
	})
	RunsWithoutClaim = row(Row{
		Word: "RunsWithoutClaim", Link: "attachment", Actor: Operator,
		Verdict: "a workload runs with volume {volume} on node {node}, but the orchestrator considers the volume unused there",
		Next:    "let nothing else use the volume; kubectl delete {pod}: it starts again, and the volume is attached for it",
		OnNomad: "let nothing else use the volume; nomad alloc stop {allocation}: the next one claims it",
		Why:     "The claim or the VolumeAttachment was released while the workload ran. So its disk may be detached, or another workload may get it.",
	})
	NodesFull = row(Row{
		Word: "NodesFull", Link: "workload", Actor: Operator,
		Verdict: "every node that could run the workload of claim {claim} has as many disks as it may have",
		Next:    "add a node, or end a pod with a volume; on racks from release 18 on set maxDisks to 12: docs/how-to/kubernetes.md#how-many-volumes-a-node-takes",
		OnNomad: "add a client, or stop a job with a volume; racks from release 18 on take 12 disks (OXIDE_CSI_MAX_DISKS)",
		OnHosts: "add an instance, or detach a volume",
		Why:     "The scheduler places no more volumes on a node than its CSINode allows: exceed max volume count.",
	})
	NoNodeOnItsRack = row(Row{
		Word: "NoNodeOnItsRack", Link: "workload", Actor: Operator,
		Verdict: "volume {volume} is on a rack without a node that can run the workload",
		Next:    "kubectl get nodes -L topology.csi.oxide.computer/rack, and describe the PersistentVolume: let the workload run on a node of the volume's rack, or add one",
		OnNomad: "nomad node status shows the clients: let the job run on one whose metadata oxide.rack names the volume's rack, or add one",
		OnHosts: "attach the volume to an instance of its rack",
		Why:     "A disk does not leave its rack. A snapshot cannot be restored on another rack either.",
	})
	UsedByAnotherPod = row(Row{
		Word: "UsedByAnotherPod", Link: "workload", Actor: Owner,
		Verdict: "another pod uses claim {claim}, whose access mode ReadWriteOncePod allows only one pod",
		Next:    "kubectl describe pvc -n {namespace}: Used By has that pod; end it, if it may end. A Deployment with such a claim needs the strategy Recreate",
		Why:     "The new pod of a rolling update waits for the old one, which waits for the new one.",
	})
	RackHasNoHotplug = row(Row{
		Word: "RackHasNoHotplug", Code: codes.FailedPrecondition, Link: "attachment", Actor: Operator,
		Verdict: "this rack attaches and detaches disks only while the instance is stopped, and node {node} runs",
		Next:    "if all that runs there may end, shut the guest of instance {instance} down; start it when oxide-csi volume show {volume} says attached, not before",
		OnNomad: "if all that runs there may end, shut the guest of instance {instance} down, attach the volume from a controller on another client, and start it: docs/how-to/planned-restarts.md#stop-an-instance-yourself",
		OnHosts: "on another host, oxide-csi volume attach and detach with --wait and --node wait until the instance is stopped; then start it again",
		Why:     "With `--attach-mode=restart` the plugin does that by itself: docs/explanation/racks-without-hotplug.md has the choices.",
	})
	ClaimsUnknown = row(Row{
		Word: "ClaimsUnknown", Code: codes.FailedPrecondition, Link: "attachment", Actor: Operator,
		Verdict: "the controller cannot find out whether the disk of an unpublished volume is in use, so the disk stays attached",
		Next:    "nomad alloc logs -namespace=oxide-csi -stderr of the controller's allocation has the reason: mostly the policy controller.policy.hcl is not applied",
		Why:     "Before the plugin detaches a disk later than Nomad asked, it asks Nomad for the claims on it, in all namespaces. Without a certain response the disk stays.",
	})
	ClaimedThere = row(Row{
		Word: "ClaimedThere", Code: codes.FailedPrecondition, Link: "attachment", Actor: Operator,
		Verdict: "the disk must leave, but an allocation on another client, or of another volume with this disk, has claimed it",
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
		Why:     "Kubernetes does not detach it from a node that is down until somebody acts: docs/how-to/drain-nodes.md.",
	})
	ControllerNotRunning = row(Row{
		Word: "ControllerNotRunning", Link: "attachment", Actor: Operator,
		Verdict: "no controller of the plugin is healthy, so nothing creates or attaches volume {volume}",
		Next:    "kubectl -n oxide-csi get pods -l app=oxide-csi-controller; then kubectl -n oxide-csi logs --all-containers of the pod",
		OnNomad: "nomad job status -namespace=oxide-csi oxide-csi-controller; then nomad alloc logs -stderr of its allocation",
		OnHosts: "systemctl status oxide-csi-controller, on the controller's host",
		Why:     "Only a controller calls the rack. Volumes that are mounted already stay usable.",
	})
	PluginNotAnswering = row(Row{
		Word: "PluginNotAnswering", Link: "attachment", Actor: Operator,
		Verdict: "the plugin did not respond to a call about volume {volume}: it is not running, or the call took too long",
		Next:    "kubectl -n oxide-csi get pods -o wide; then kubectl -n oxide-csi logs --previous --all-containers of the pod that restarts; oxide-csi doctor looks at the rack",
		OnNomad: "nomad plugin status oxide; then nomad alloc logs -namespace=oxide-csi -stderr of the allocation that is not healthy",
		OnHosts: "systemctl status oxide-csi-controller oxide-csi-node",
		Why:     "A sidecar or kubelet reached no process on the plugin's socket, or gave up waiting. It repeats the call, and the plugin goes on where it was.",
	})
	RightsMissing = row(Row{
		Word: "RightsMissing", Link: "attachment", Actor: Operator,
		Verdict: "a part of the plugin lacks rights in Kubernetes that volume {volume} needs",
		Next:    "oxide-csi doctor names the missing rights: apply the manifests or the chart of this version again",
		Why:     "The roles are older than the images, or somebody changed them.",
	})
	ClaimHeld = row(Row{
		Word: "ClaimHeld", Link: "attachment", Actor: Operator,
		Verdict: "another allocation has claimed volume {volume}, which has one writer at a time",
		Next:    "the chain below has the allocation with the claim: end it, if it may end. A canary of a job with a volume never starts beside its predecessor",
		OnNomad: "the chain below has the allocation with the claim: nomad alloc stop of it, if it may end; if no client runs it: docs/how-to/troubleshooting-nomad.md#stuck. A canary never starts beside its predecessor",
		Why:     "Nomad gives a volume with one writer to one allocation. A claim restored by nomad operator snapshot restore does not end by itself.",
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
)
