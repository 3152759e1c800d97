// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package diagnose

import (
	"regexp"

	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
)

// said has the texts of Kubernetes and its sidecars that show a fault. What the plugin itself says ends with a word.
// They are those of Kubernetes 1.37, provisioner 6, attacher 4, resizer 2 and snapshotter 8. Each line of a
// text is of one source: scheduler, attach-detach and persistent-volume controller, kubelet, sidecars.
var said = map[*fault.Row]*regexp.Regexp{
	fault.OtherDriver: anyOf(`PersistentVolumeClaim had no pv name and storageClass name`,
		`no persistent volumes available for this claim and no storage class is set`,
		`storageclass\.storage\.k8s\.io ".*" not found`, `(no class for claim|failed to find storage class)`),
	fault.SnapshotNotReady: anyOf(`snapshot \S+ is not Ready`, `snapshot handle \S+ is not available`),
	fault.SourceUnfit: anyOf(`error getting handle for DataSource`, `must have the same volume mode for cloning`,
		`modifies the mode of the source volume`, `size must be greater than or equal to the source`),
	fault.ClaimMissing: anyOf(`persistentvolumeclaim "[^"]*" not found`,
		`waiting for ephemeral volume controller to create the persistentvolumeclaim`),
	fault.ClaimTerminating: anyOf(`persistentvolumeclaim "[^"]*" is being deleted`, `PVC is being deleted`),
	fault.ClaimLost: anyOf(`bound to non-existent (persistentvolume|pv)`,
		`claim has lost (its|reference to) PersistentVolume`, `this one is bound incorrectly`,
		`but its pv\.Spec\.ClaimRef\.UID`),
	fault.ClaimNotBound: anyOf(`didn't find available persistent volumes to bind`,
		`Cannot bind (to requested volume|PersistentVolume)`, `already bound to a different claim`),
	fault.FeatureUnsupported: anyOf(`claim Selector is not supported`, `capability is not reported`,
		`VolumeAttributesClass|get VAC with vac name`, `CrossNamespaceVolumeDataSource feature is disabled`),
	fault.VolumeModeDiffers: anyOf(`but is specified in volume(Mounts|Devices)`),
	fault.OptionNotAllowed: anyOf(`found unknown parameter key`, `is not a valid secret name`,
		`secrets? specified in parameters`, `fstype specified in parameters`, `invalid tokens`),
	fault.NodesFull:      anyOf(`exceed max volume count`),
	fault.QuotaExhausted: anyOf(`did not have enough free storage`),
	fault.NoNodeOnItsRack: anyOf(`volume node affinity conflict`, `match PersistentVolume's node affinity`,
		`no available volume zone`, `NodeAffinity check failed`, `node affinity doesn't match node`,
		`is not in (requisite|allowed topologies)`),
	fault.UsedByAnotherPod: anyOf(`ReadWriteOncePod access mode already in-use`),
	fault.AttachedElsewhere: anyOf(`Multi-Attach error`, `waiting on detach before it can be attached`,
		`Volume is already used by`, `is still attached to node`),
	fault.PluginNotRegistered: anyOf(`CSI driver is not installed on the node`, `CSINode \S+ does not contain driver`,
		`not found in the list of registered CSI drivers`, `no topology key found`, `no available topology found`,
		`CSINode for selected node`, `topologyKeys .* were not found on any nodes`,
		`does not match topology keys from CSINode`),
	fault.ControllerNotRunning: anyOf(`timed out waiting for external-attacher`, `attachdetachment timeout`),
	fault.PluginNotAnswering: anyOf(`dial unix`, `error reading from server: EOF`, `transport is closing`,
		`code = (DeadlineExceeded|Canceled)`),
	fault.RightsMissing:     anyOf(`is forbidden: User`),
	fault.PassphraseMissing: anyOf(`fetching Node\w+SecretRef`, `error getting secret`, `failed to find the secret`),
	fault.ExpansionWaits:    anyOf(`only supports offline expansion and volume is currently in-use`),
	fault.MountFailed:       anyOf(`applyFSGroup failed`),
	fault.DiskBusy: anyOf(`volume attachment is being deleted`, `Volume not attached according to node status`,
		`list of VolumesInUse`),
	fault.WaitsForOther: anyOf(`Insufficient `, `untolerated taint`, `node affinity/selector`, `were unschedulable`,
		`match pod (anti-)?affinity`, `topology spread constraints`, `free ports for the requested`,
		`ErrImagePull|ImagePullBackOff|Failed to pull image`, `CreateContainerConfigError|CrashLoopBackOff`,
		`(configmap|secret|serviceaccount) "[^"]*" not found`, `no nodes available to schedule pods`,
		`FailedCreatePodSandBox|failed to create pod sandbox`),
}

// anyOf matches a text with any of the expressions.
func anyOf(expressions ...string) *regexp.Regexp {
	all := expressions[0]
	for _, e := range expressions[1:] {
		all += "|" + e
	}
	return regexp.MustCompile(all)
}
