// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package kubernetes

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/kubernetes"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

const (
	csiDrivers = "/apis/storage.k8s.io/v1/csidrivers"
	leases     = "/apis/coordination.k8s.io/v1/leases"
	// stuckAfter is longer than an attach takes on a rack with hot-plug.
	stuckAfter = 5 * time.Minute
)

// examination collects findings.
type examination struct {
	client
	findings []orchestrator.Finding
	// nodeIDs are the IDs of the node plugins, by Node.
	nodeIDs map[string]string
}

func (e *examination) add(status orchestrator.Status, looked, found, next string) {
	e.findings = append(
		e.findings,
		orchestrator.Finding{Area: "kubernetes", Status: status, Looked: looked, Found: found, Next: next},
	)
}

// unreadable adds the failure of a list. Rights are those of the plugin, or of the caller's kubeconfig.
func (e *examination) unreadable(looked string, err error) {
	found, next := err.Error(), "repeat the command with a kubeconfig that may read this"
	if known, ok := errors.AsType[*metadata.Error](err); ok && errors.Is(err, metadata.ErrNotReady) {
		found, next = known.Fact(), known.Next
	}
	e.add(orchestrator.StatusWarning, looked, found, next)
}

// Examine implements [orchestrator.Examiner]. It needs the verb "get" on "csidrivers", and "list" on "nodes",
// "csinodes", "pods", "leases", "volumeattachments", "persistentvolumes" and, in the namespace default, "events". For
// the rights of the plugin it needs "create" on "subjectaccessreviews", which stores nothing. If it may list "buckets",
// "bucketclaims" and "bucketaccesses", it looks at them, too. It reads each list once.
func (o *Operator) Examine(ctx context.Context) ([]orchestrator.Finding, []orchestrator.Attachment) {
	e := &examination{client: o.client, nodeIDs: map[string]string{}}
	e.version(ctx)
	e.driver(ctx)
	e.nodes(ctx)
	e.rights(ctx, e.sidecars(ctx))
	e.versions(ctx)
	attachments := e.attachments(ctx)
	e.snapshots(ctx)
	e.reports(ctx)
	e.buckets(ctx)
	return e.findings, attachments
}

// oldestMinor is the oldest release 1.x of Kubernetes for which the manifests are made (docs/how-to/kubernetes.md).
const oldestMinor = 33

// version compares the release of the API server with the oldest that the manifests are made for.
func (e *examination) version(ctx context.Context) {
	const looked = "release"
	var found struct{ Major, Minor, GitVersion string }
	_, err := e.Do(ctx, kubernetes.Request{
		Method: http.MethodGet, Path: "/version", What: "read the release", Verb: "get", Resource: "/version",
	}, &found)
	if err != nil {
		e.unreadable(looked, err)
		return
	}
	minor, err := strconv.Atoi(strings.TrimRight(found.Minor, "+"))
	if err != nil || found.Major != "1" || minor < oldestMinor {
		e.add(
			orchestrator.StatusWarning,
			looked,
			found.GitVersion,
			fmt.Sprintf("the manifests are made for Kubernetes 1.%d and later: upgrade the cluster", oldestMinor),
		)
		return
	}
	e.add(orchestrator.StatusOK, looked, found.GitVersion, "")
}

func (e *examination) driver(ctx context.Context) {
	const looked = "CSIDriver"
	var found struct {
		object
		Spec struct{ AttachRequired *bool }
	}
	status, err := e.Do(ctx, kubernetes.Request{
		Method: http.MethodGet, Path: csiDrivers + "/" + driver, What: "get CSIDriver", Verb: "get", Resource: "csidrivers",
	}, &found, http.StatusNotFound)
	switch {
	case err != nil:
		e.unreadable(looked, err)
	case status == http.StatusNotFound:
		e.add(orchestrator.StatusFailure, looked, driver+" does not exist", "install the plugin: docs/how-to/kubernetes.md")
	case found.Spec.AttachRequired != nil && !*found.Spec.AttachRequired:
		e.add(
			orchestrator.StatusFailure,
			looked,
			"attachRequired is false, so no disk is ever attached",
			"delete the CSIDriver and apply deploy/k8s again",
		)
	default:
		e.add(orchestrator.StatusOK, looked, driver, "")
	}
}

// nodes compares Nodes with their CSINodes.
func (e *examination) nodes(ctx context.Context) {
	const looked = "node plugins"
	all, err := listAll[object](ctx, e.client, kubernetes.Nodes, "nodes")
	if err != nil {
		e.unreadable(looked, err)
		return
	}
	registered, err := listAll[csiNode](ctx, e.client, csiNodes, "csinodes")
	if err != nil {
		e.unreadable(looked, err)
		return
	}
	with, instances := map[string]bool{}, map[string]string{}
	for _, n := range registered {
		for _, d := range n.Spec.Drivers {
			if d.Name != driver {
				continue
			}
			with[n.Name] = true
			if other, twice := instances[d.NodeID]; twice {
				e.add(
					orchestrator.StatusFailure,
					"node IDs",
					fmt.Sprintf("Nodes %s and %s both say that they are instance %s", other, n.Name, d.NodeID),
					"correct the identity of one of them: docs/how-to/identity.md",
				)
			}
			instances[d.NodeID], e.nodeIDs[n.Name] = n.Name, d.NodeID
		}
	}
	var without []string
	for _, n := range all {
		if !with[n.Name] {
			without = append(without, n.Name)
		}
	}
	e.add(orchestrator.StatusOK, looked, fmt.Sprintf("on %d of %d Nodes", len(with), len(all)), "")
	switch {
	case len(with) == 0:
		e.add(
			orchestrator.StatusFailure,
			looked,
			"no Node has the plugin",
			"kubectl -n oxide-csi get pods -o wide: the DaemonSet's pods must run",
		)
	case len(without) > 0:
		e.add(
			orchestrator.StatusWarning,
			looked,
			"not on "+orchestrator.Some(without),
			"check the DaemonSet's node selector and tolerations, and its pods on these Nodes",
		)
	}
}

// sidecarLeases are the leases of the sidecars: external-provisioner v6.4.0, external-attacher v4.13.0,
// external-resizer v2.3.0 and external-snapshotter v8.7.0, cmd.
var sidecarLeases = map[string]string{
	"csi-oxide-computer":                             "csi-provisioner",
	"external-attacher-leader-csi-oxide-computer":    "csi-attacher",
	"external-resizer-csi-oxide-computer":            "csi-resizer",
	"external-snapshotter-leader-csi-oxide-computer": "csi-snapshotter",
}

// sidecars looks whether a sidecar of each kind has renewed its lease. It returns the namespace of the leases.
func (e *examination) sidecars(ctx context.Context) (namespace string) {
	const looked = "sidecars"
	type lease struct {
		object
		Spec struct {
			RenewTime            time.Time
			HolderIdentity       string
			LeaseDurationSeconds int
		}
	}
	all, err := listAll[lease](ctx, e.client, leases, "leases")
	if err != nil {
		e.unreadable(looked, err)
		return ""
	}
	fresh, installed := map[string]bool{}, map[string]bool{}
	for _, l := range all {
		sidecar := sidecarLeases[l.Name]
		if sidecar != "" {
			namespace, installed[sidecar] = l.Namespace, true
		}
		// Twice the duration: the clocks of this host and of the leader may differ a little.
		if limit := 2 * time.Duration(
			l.Spec.LeaseDurationSeconds,
		) * time.Second; sidecar != "" &&
			time.Since(l.Spec.RenewTime) < limit {
			fresh[sidecar] = true
			e.add(orchestrator.StatusOK, looked, sidecar+" is led by "+l.Spec.HolderIdentity, "")
		}
	}
	for _, sidecar := range []string{"csi-provisioner", "csi-attacher", "csi-resizer", "csi-snapshotter"} {
		status := orchestrator.StatusFailure
		switch {
		case fresh[sidecar], sidecar == "csi-snapshotter" && !installed[sidecar]: // a component of its own
			continue
		case sidecar == "csi-resizer", sidecar == "csi-snapshotter":
			status = orchestrator.StatusWarning // volumes are made and attached all the same
		}
		e.add(status, looked, "no "+sidecar+" has renewed its lease",
			"kubectl -n oxide-csi get pods: the controller's pods must run; then see the sidecar's log")
	}
	return namespace
}

// attachments looks for attaches and detaches that take too long. It returns the volumes whose attach or detach has
// ended.
func (e *examination) attachments(ctx context.Context) []orchestrator.Attachment {
	const looked = "VolumeAttachments"
	// Volumes come first: one that is attached meanwhile is then not taken for one that is attached nowhere.
	volumes, err := listAll[persistentVolume](ctx, e.client, persistentVolumes, "persistentvolumes")
	if err != nil {
		e.unreadable(looked, err)
	}
	all, err := listAll[tracedAttachment](ctx, e.client, volumeAttachments, "volumeattachments")
	if err != nil {
		e.unreadable(looked, err)
		return nil
	}
	count, stuck := 0, 0
	of := map[string][]tracedAttachment{} // by PersistentVolume
	for _, a := range all {
		if a.Spec.Attacher != driver {
			continue
		}
		count++
		of[a.Spec.Source.PersistentVolumeName] = append(of[a.Spec.Source.PersistentVolumeName], a)
		what, since, failure := "attach", a.CreationTimestamp.Time, a.Status.AttachError
		if a.DeletionTimestamp != nil {
			what, since, failure = "detach", a.DeletionTimestamp.Time, a.Status.DetachError
		} else if a.Status.Attached {
			continue
		}
		if time.Since(since) < stuckAfter {
			continue
		}
		stuck++
		why := "no reason is given"
		if failure != nil {
			why = strings.Join(strings.Fields(failure.Message), " ")
		}
		e.add(
			orchestrator.StatusFailure,
			looked,
			fmt.Sprintf("%s of %s and Node %s waits since %s: %s", what, a.Spec.Source.PersistentVolumeName,
				a.Spec.NodeName, since.UTC().Format(time.RFC3339), why),
			"oxide-csi explain "+a.Spec.Source.PersistentVolumeName,
		)
	}
	if stuck == 0 {
		e.add(orchestrator.StatusOK, looked, fmt.Sprintf("%d, none is stuck", count), "")
	}
	return e.settled(volumes, of)
}

// settled returns where volumes are attached, without those that are being attached or detached. The argument has all
// VolumeAttachments by their PersistentVolume.
func (e *examination) settled(
	volumes []persistentVolume, all map[string][]tracedAttachment,
) (settled []orchestrator.Attachment) {
	for _, v := range volumes {
		if v.Spec.CSI == nil || v.Spec.CSI.Driver != driver {
			continue
		}
		one := orchestrator.Attachment{VolumeID: v.Spec.CSI.VolumeHandle, Claim: cmp.Or(v.Spec.ClaimRef.claim(), v.Name)}
		of := all[v.Name]
		if len(of) > 1 || len(of) == 1 && (of[0].DeletionTimestamp != nil || !of[0].Status.Attached) {
			continue
		}
		if len(of) == 1 {
			one.NodeID, one.By = e.nodeIDs[of[0].Spec.NodeName], "VolumeAttachment "+of[0].Name
		}
		settled = append(settled, one)
	}
	return settled
}

// snapshots asks which resources of VolumeSnapshots the API server has. Everybody may ask that.
func (e *examination) snapshots(ctx context.Context) {
	const looked, next = "snapshots", "apply all CRDs of external-snapshotter: docs/how-to/kubernetes.md"
	var group struct{ Resources []struct{ Name string } }
	status, err := e.Do(ctx, kubernetes.Request{
		Method: http.MethodGet, Path: "/apis/snapshot.storage.k8s.io/v1",
		What: "list the resources of snapshot.storage.k8s.io", Verb: "get", Resource: "/apis",
	}, &group, http.StatusNotFound)
	var missing []string
	for _, name := range []string{"volumesnapshotclasses", "volumesnapshotcontents", "volumesnapshots"} {
		if !slices.ContainsFunc(group.Resources, func(r struct{ Name string }) bool { return r.Name == name }) {
			missing = append(missing, name)
		}
	}
	switch {
	case err != nil:
		e.unreadable(looked, err)
	case status == http.StatusNotFound:
		e.add(
			orchestrator.StatusOK,
			looked,
			"the cluster has no VolumeSnapshots: docs/how-to/kubernetes.md says how to add them",
			"",
		)
	case len(missing) > 0:
		e.add(orchestrator.StatusFailure, looked, "the cluster lacks the CRD "+strings.Join(missing, ", "), next)
	default:
		e.add(orchestrator.StatusOK, looked, "the cluster has the three CRDs of VolumeSnapshots", "")
	}
}

// event has the fields of an Event that are read.
type event struct {
	object
	InvolvedObject        struct{ Kind, Name string }
	Type, Reason, Message string
	LastTimestamp         time.Time
	ReportingComponent    string
}

// events lists the events of all objects of a kind without namespaces. These events are in the namespace default.
func (e *examination) events(ctx context.Context, kind string) ([]event, error) {
	query := url.Values{"fieldSelector": {"involvedObject.kind=" + kind}}
	all, err := listSelected[event](ctx, e.client, namespaced("default", "events"), "events", query, http.StatusNotFound)
	return slices.DeleteFunc(all, func(found event) bool { return found.InvolvedObject.Kind != kind }), err
}

// reports shows the last report about each Node, which a controller has published as an event: what a planned restart
// waits for. The API server keeps events for an hour.
func (e *examination) reports(ctx context.Context) {
	const looked = "reports about Nodes"
	all, err := e.events(ctx, "Node")
	if err != nil {
		e.unreadable(looked, err)
		return
	}
	last := map[string]event{}
	for _, found := range all {
		node := found.InvolvedObject.Name
		if found.ReportingComponent == driver && !found.LastTimestamp.Before(last[node].LastTimestamp) {
			last[node] = found
		}
	}
	for _, node := range slices.Sorted(maps.Keys(last)) {
		status, next := orchestrator.StatusOK, ""
		if last[node].Type == "Warning" {
			status, next = orchestrator.StatusWarning, "kubectl describe node "+node+"; then do what the message says"
		}
		e.add(status, looked, fmt.Sprintf("Node %s, %s: %s: %s", node, last[node].LastTimestamp.UTC().Format(time.RFC3339),
			last[node].Reason, strings.Join(strings.Fields(last[node].Message), " ")), next)
	}
}

// StorageClasses implements [orchestrator.ClassLister]. It needs the verb "list" on "storageclasses".
func (o *Operator) StorageClasses(ctx context.Context) ([]orchestrator.StorageClass, error) {
	type class struct {
		object
		Provisioner  string
		MountOptions []string
		Parameters   map[string]string
	}
	all, err := listAll[class](ctx, o.client, storageClasses, "storageclasses")
	if err != nil {
		return nil, err
	}
	var ours []orchestrator.StorageClass
	for _, c := range all {
		if c.Provisioner != driver {
			continue
		}
		// The provisioner keeps the keys with its prefix, and passes the filesystem type in the capability.
		ours = append(ours, orchestrator.StorageClass{
			Name: c.Name, FSType: c.Parameters[fsTypeKey], MountFlags: c.MountOptions, Parameters: c.Parameters,
		})
		maps.DeleteFunc(c.Parameters, func(key, _ string) bool { return strings.HasPrefix(key, provisionerPrefix) })
	}
	return ours, nil
}

// Keys of a StorageClass' parameters that are for the external-provisioner.
const (
	provisionerPrefix = "csi.storage.k8s.io/"
	fsTypeKey         = provisionerPrefix + "fstype"
)

var (
	_ orchestrator.Examiner    = (*Operator)(nil)
	_ orchestrator.ClassLister = (*Operator)(nil)
)
