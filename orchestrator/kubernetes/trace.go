// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package kubernetes

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata/kubernetes"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

const storageClasses = "/apis/storage.k8s.io/v1/storageclasses"

// namespaced is the path of a list of a namespace.
func namespaced(namespace, resource string) string {
	return "/api/v1/namespaces/" + url.PathEscape(namespace) + "/" + resource
}

// tracer collects a trace.
type tracer struct {
	client
	trace orchestrator.Trace
}

// Trace implements [orchestrator.Tracer]. It needs the verb "get" on "persistentvolumeclaims", "persistentvolumes",
// "pods", "nodes", "storageclasses", "csinodes" and "volumesnapshots", and "list" on "persistentvolumes", "pods",
// "events" and "volumeattachments".
func (o *Operator) Trace(ctx context.Context, subject orchestrator.Subject) (orchestrator.Trace, error) {
	t := &tracer{client: o.client, trace: orchestrator.Trace{Orchestrator: orchestrator.Kubernetes}}
	claimKey, err := t.findClaim(ctx, subject)
	if err != nil {
		return orchestrator.Trace{}, err
	}
	var pod *tracedPod
	if subject.Pod != "" {
		pod, err = t.pod(ctx, subject.Pod)
	} else if claimKey != "" {
		pod, err = t.podOf(ctx, claimKey)
	}
	if err != nil {
		return orchestrator.Trace{}, err
	}
	volumeName := subject.Name
	if claimKey != "" {
		if volumeName, err = t.claim(ctx, claimKey, pod != nil); err != nil {
			return orchestrator.Trace{}, err
		}
	}
	if volumeName != "" {
		if err := t.volume(ctx, volumeName); err != nil {
			return orchestrator.Trace{}, err
		}
	}
	if pod != nil && pod.Spec.NodeName != "" {
		t.trace.Node = pod.Spec.NodeName
	}
	if volumeName != "" {
		if err := t.attachment(ctx, volumeName); err != nil {
			return orchestrator.Trace{}, err
		}
	}
	if t.trace.Node != "" {
		if err := t.node(ctx, t.trace.Node); err != nil {
			return orchestrator.Trace{}, err
		}
	}
	if pod != nil {
		err = t.workload(ctx, *pod)
	}
	return t.trace, err
}

// notThere is the error for a subject that does not exist.
func notThere(what string) error {
	return fmt.Errorf("%s %w: check the name, the namespace and the kubeconfig", what, orchestrator.ErrNotFound)
}

// findClaim returns namespace/name of the subject's claim, or "" for a volume without one.
func (t *tracer) findClaim(ctx context.Context, subject orchestrator.Subject) (string, error) {
	switch {
	case subject.Claim != "":
		return subject.Claim, nil
	case subject.Pod != "":
		pod, err := t.pod(ctx, subject.Pod)
		if err != nil {
			return "", err
		}
		return t.claimOfPlugin(ctx, *pod)
	}
	volumes, err := listAll[persistentVolume](ctx, t.client, persistentVolumes, "persistentvolumes")
	if err != nil {
		return "", err
	}
	i := slices.IndexFunc(volumes, func(v persistentVolume) bool {
		return v.Name == subject.Name ||
			subject.VolumeID != "" && v.Spec.CSI != nil && v.Spec.CSI.Driver == driver &&
				v.Spec.CSI.VolumeHandle == subject.VolumeID
	})
	if i < 0 {
		return "", notThere("PersistentVolume " + cmp.Or(subject.Name, "of "+subject.VolumeID))
	}
	t.trace.VolumeID = subject.VolumeID
	if claim := volumes[i].Spec.ClaimRef.claim(); claim != "" && !volumes[i].released() {
		return claim, nil
	}
	return "", t.volume(ctx, volumes[i].Name)
}

// claimOfPlugin returns the first claim of a pod that has no volume of another driver.
func (t *tracer) claimOfPlugin(ctx context.Context, pod tracedPod) (string, error) {
	names := pod.claims()
	if len(names) == 0 {
		return "", notThere("a claim of pod " + pod.key())
	}
	for _, name := range names {
		var c claim
		status, err := t.Do(ctx, t.getClaim(pod.Namespace+"/"+name), &c, http.StatusNotFound)
		if err != nil {
			return "", err
		}
		if status != http.StatusOK || c.Spec.VolumeName == "" {
			return pod.Namespace + "/" + name, nil
		}
		var v persistentVolume
		if _, err := t.Do(
			ctx,
			t.get(persistentVolumes+"/"+url.PathEscape(c.Spec.VolumeName), "persistentvolumes"),
			&v,
			http.StatusNotFound,
		); err != nil {
			return "", err
		}
		if v.Spec.CSI != nil && v.Spec.CSI.Driver == driver {
			return c.key(), nil
		}
	}
	return pod.Namespace + "/" + names[0], nil
}

// get is the request that reads one object.
func (t *tracer) get(path, resource string) kubernetes.Request {
	return kubernetes.Request{Method: http.MethodGet, Path: path, What: "get " + resource, Verb: "get", Resource: resource}
}

func (t *tracer) getClaim(key string) kubernetes.Request {
	namespace, name, _ := strings.Cut(key, "/")
	return t.get(namespaced(namespace, "persistentvolumeclaims")+"/"+url.PathEscape(name), "persistentvolumeclaims")
}

func (t *tracer) pod(ctx context.Context, key string) (*tracedPod, error) {
	namespace, name, _ := strings.Cut(key, "/")
	var p tracedPod
	status, err := t.Do(
		ctx,
		t.get(namespaced(namespace, "pods")+"/"+url.PathEscape(name), "pods"),
		&p,
		http.StatusNotFound,
	)
	if status == http.StatusNotFound {
		err = notThere("pod " + key)
	}
	return &p, err
}

// podOf returns the pod that uses a claim, first one that does not run. It returns nil if there is none.
func (t *tracer) podOf(ctx context.Context, claimKey string) (*tracedPod, error) {
	namespace, name, _ := strings.Cut(claimKey, "/")
	pods, err := listAll[tracedPod](ctx, t.client, namespaced(namespace, "pods"), "pods")
	if err != nil {
		return nil, err
	}
	var found *tracedPod
	for i, p := range pods {
		ended := p.Status.Phase == "Succeeded" || p.Status.Phase == "Failed"
		if !ended && slices.Contains(p.claims(), name) && (found == nil || found.Status.Phase == "Running") {
			found = &pods[i]
		}
	}
	return found, nil
}

// claim adds a claim, its class and its snapshot. It returns the name of its volume, or "". used says that a pod uses
// the claim.
func (t *tracer) claim(ctx context.Context, key string, used bool) (volumeName string, err error) {
	var c claim
	t.trace.Claim = key
	status, err := t.Do(ctx, t.getClaim(key), &c, http.StatusNotFound)
	if status == http.StatusNotFound && used {
		t.step("claim", "PersistentVolumeClaim "+key, "does not exist", time.Time{})
		t.trace.Conditions = append(t.trace.Conditions, orchestrator.ClaimMissing)
		return "", nil
	}
	if status == http.StatusNotFound {
		err = notThere("claim " + key)
	}
	if err != nil {
		return "", err
	}
	state := c.Status.Phase
	if c.DeletionTimestamp != nil {
		state = "Terminating, held by " + strings.Join(c.Finalizers, ", ")
		t.trace.Conditions = append(t.trace.Conditions, orchestrator.Terminating)
	}
	t.step("claim", "PersistentVolumeClaim "+key, state, c.CreationTimestamp.Time)
	if c.grows() {
		t.trace.Conditions = append(t.trace.Conditions, orchestrator.ExpansionPending)
	}
	if c.Spec.VolumeName != "" {
		if c.grows() || c.Status.Phase != "Bound" {
			err = t.events(ctx, "claim", "PersistentVolumeClaim", c.object, "ProvisioningFailed")
		}
		return c.Spec.VolumeName, err
	}
	t.trace.CSIName = "pvc-" + string(c.UID)
	if err := t.class(ctx, c, used); err != nil {
		return "", err
	}
	if err := t.source(ctx, c); err != nil {
		return "", err
	}
	return "", t.events(ctx, "claim", "PersistentVolumeClaim", c.object)
}

// byHand is the provisioner of a class whose volumes somebody makes, perhaps of this driver.
const byHand = "kubernetes.io/no-provisioner"

// class looks at the storage class of a claim without a volume. used says that a pod uses the claim.
func (t *tracer) class(ctx context.Context, c claim, used bool) error {
	if c.Spec.StorageClassName == nil || *c.Spec.StorageClassName == "" {
		t.trace.Conditions = append(t.trace.Conditions, orchestrator.OtherDriver)
		return nil
	}
	var class struct {
		object
		Provisioner, VolumeBindingMode string
	}
	name := *c.Spec.StorageClassName
	status, err := t.Do(ctx, t.get(storageClasses+"/"+url.PathEscape(name), "storageclasses"), &class, http.StatusNotFound)
	if err != nil {
		return err
	}
	state := "of driver " + class.Provisioner
	if status == http.StatusNotFound {
		state = "does not exist"
	}
	switch {
	case class.Provisioner != driver && class.Provisioner != byHand:
		t.trace.Conditions = append(t.trace.Conditions, orchestrator.OtherDriver)
	case class.VolumeBindingMode == "WaitForFirstConsumer" && !used:
		t.trace.Conditions = append(t.trace.Conditions, orchestrator.NoConsumer)
	}
	t.step("claim", "StorageClass "+name, state, time.Time{})
	return nil
}

// source looks at the snapshot from which a claim is made.
func (t *tracer) source(ctx context.Context, c claim) error {
	if c.Spec.DataSource == nil || c.Spec.DataSource.Kind != "VolumeSnapshot" {
		return nil
	}
	var snapshot struct {
		object
		Status *struct {
			ReadyToUse bool
			Error      *struct{ Message string }
		}
	}
	path := "/apis/snapshot.storage.k8s.io/v1/namespaces/" + url.PathEscape(c.Namespace) + "/volumesnapshots/" +
		url.PathEscape(c.Spec.DataSource.Name)
	if _, err := t.Do(ctx, t.get(path, "volumesnapshots"), &snapshot, http.StatusNotFound); err != nil {
		return err
	}
	if snapshot.Status != nil && snapshot.Status.Error != nil {
		t.say("claim", snapshot.Status.Error.Message, time.Time{})
	}
	if snapshot.Status == nil || !snapshot.Status.ReadyToUse {
		t.step("claim", "VolumeSnapshot "+c.Spec.DataSource.Name, "not ready", snapshot.CreationTimestamp.Time)
		t.trace.Conditions = append(t.trace.Conditions, orchestrator.SnapshotNotReady)
	}
	return nil
}

// volume adds a PersistentVolume.
func (t *tracer) volume(ctx context.Context, name string) error {
	var v persistentVolume
	status, err := t.Do(
		ctx,
		t.get(persistentVolumes+"/"+url.PathEscape(name), "persistentvolumes"),
		&v,
		http.StatusNotFound,
	)
	if err != nil {
		return err
	}
	switch {
	case status == http.StatusNotFound:
		t.step("volume", "PersistentVolume "+name, "does not exist", time.Time{})
	case v.Spec.CSI == nil || v.Spec.CSI.Driver != driver:
		t.step("volume", "PersistentVolume "+name, "of another driver", v.CreationTimestamp.Time)
		t.trace.Conditions = append(t.trace.Conditions, orchestrator.OtherDriver)
	default:
		t.trace.VolumeID = v.Spec.CSI.VolumeHandle
		t.step("volume", "PersistentVolume "+name, v.Status.Phase, v.CreationTimestamp.Time)
	}
	if v.released() {
		t.trace.Conditions = append(t.trace.Conditions, orchestrator.Released)
		v.Namespace = "default" // that of events about objects without one
		return t.events(ctx, "volume", "PersistentVolume", v.object)
	}
	return nil
}

// attachment adds the VolumeAttachments of a volume. There can be two while a volume moves.
func (t *tracer) attachment(ctx context.Context, volumeName string) error {
	all, err := listAll[tracedAttachment](ctx, t.client, volumeAttachments, "volumeattachments")
	if err != nil {
		return err
	}
	for _, a := range all {
		if a.Spec.Source.PersistentVolumeName != volumeName || a.Spec.Attacher != driver {
			continue
		}
		t.trace.Node = cmp.Or(t.trace.Node, a.Spec.NodeName)
		state := "not attached to Node " + a.Spec.NodeName
		if a.Status.Attached {
			state = "attached to Node " + a.Spec.NodeName
			if a.Spec.NodeName == t.trace.Node {
				t.trace.Conditions = append(t.trace.Conditions, orchestrator.Attached)
			}
		} else if e := a.Status.AttachError; e != nil {
			t.say("attachment", e.Message, e.Time)
		}
		if e := a.Status.DetachError; e != nil && a.DeletionTimestamp != nil {
			t.say("attachment", e.Message, e.Time)
		}
		t.step("attachment", "VolumeAttachment "+a.Name, state, a.CreationTimestamp.Time)
	}
	return nil
}

// node adds a Node and the registration of the plugin there.
func (t *tracer) node(ctx context.Context, name string) error {
	var n struct {
		object
		Status struct{ Conditions []condition }
	}
	status, err := t.Do(ctx, kubernetes.GetNode("get Node "+name, url.PathEscape(name)), &n, http.StatusNotFound)
	if err != nil {
		return err
	}
	ready := slices.ContainsFunc(
		n.Status.Conditions,
		func(c condition) bool { return c.Type == "Ready" && c.Status == "True" },
	)
	state := "ready"
	switch {
	case status == http.StatusNotFound:
		state = "does not exist"
	case !ready:
		state = "not ready"
	}
	t.step("node", "Node "+name, state, n.CreationTimestamp.Time)
	if state != "ready" {
		t.trace.Conditions = append(t.trace.Conditions, orchestrator.NodeNotReady)
	}
	var registered csiNode
	if _, err := t.Do(ctx, getCSINode(url.PathEscape(name)), &registered, http.StatusNotFound); err != nil {
		return err
	}
	for _, d := range registered.Spec.Drivers {
		if d.Name == driver {
			t.trace.NodeID = d.NodeID
			return nil
		}
	}
	if state == "ready" {
		t.step("node", "CSINode "+name, "without the plugin", time.Time{})
		t.trace.Conditions = append(t.trace.Conditions, orchestrator.NotRegistered)
	}
	return nil
}

// workload adds a pod, and what kubelet said about it unless it runs. What failed before it succeeded is no news.
func (t *tracer) workload(ctx context.Context, p tracedPod) error {
	t.trace.Workload = "pod " + p.key()
	state, since := p.Status.Phase, p.Status.StartTime
	if p.DeletionTimestamp != nil {
		state, since = "Terminating", p.DeletionTimestamp.Time
		t.trace.Conditions = append(t.trace.Conditions, orchestrator.WorkloadTerminating)
	}
	t.step("workload", "Pod "+p.key(), state, since)
	var over []string
	if p.Status.Phase == "Running" {
		t.trace.Conditions = append(t.trace.Conditions, orchestrator.Running)
		if p.DeletionTimestamp == nil {
			return nil
		}
		over = append(over, "FailedMount", "FailedMapVolume")
	}
	if slices.Contains(t.trace.Conditions, orchestrator.Attached) {
		over = append(over, "FailedAttachVolume")
	}
	if p.Spec.NodeName != "" {
		over = append(over, "FailedScheduling")
	}
	return t.events(ctx, "workload", "Pod", p.object, over...)
}

// events adds the warnings about an object, without those that have a reason that is over.
func (t *tracer) events(ctx context.Context, link, kind string, of object, over ...string) error {
	query := url.Values{"fieldSelector": {fmt.Sprintf("involvedObject.kind=%s,involvedObject.name=%s", kind, of.Name)}}
	all, err := listSelected[said](ctx, t.client, namespaced(of.Namespace, "events"), "events", query)
	if err != nil {
		return err
	}
	times := map[string]int{} // by reason
	// The scheduler says all each time, and so does who makes volumes: the last word counts.
	lastWords := []said{{Reason: "FailedScheduling"}, {Reason: "ProvisioningFailed"}}
	for _, e := range all {
		if !e.isAbout(kind, of) {
			continue
		}
		times[e.Reason] += e.Count
		// A provisioner that waits for a detach says so in a VolumeDelete.
		telling := e.Type == "Warning" || e.Reason == "FailedBinding" || e.Reason == "VolumeDelete"
		i := slices.IndexFunc(lastWords, func(last said) bool { return last.Reason == e.Reason })
		switch {
		case !telling || slices.Contains(over, e.Reason):
		case i < 0:
			t.say(link, e.Reason+": "+e.Message, e.last())
		case lastWords[i].Message == "" || e.last().After(lastWords[i].last()):
			lastWords[i] = e
		}
	}
	for _, last := range lastWords {
		if last.Message != "" {
			t.say(link, last.Reason+": "+last.Message, last.last())
		}
	}
	// Kubernetes asks again every 15 s for a provisioner, and each says when it begins.
	if times["ExternalProvisioning"] > 2 && times["Provisioning"] == 0 {
		t.trace.Conditions = append(t.trace.Conditions, orchestrator.NoController)
	}
	return nil
}

// said is an event, as far as it is read.
type said struct {
	object
	InvolvedObject struct{ Kind, Name, UID string }
	Type, Reason   string
	Message        string
	Count          int
	LastTimestamp  time.Time
	EventTime      time.Time
	Series         struct{ LastObservedTime time.Time }
}

func (e said) isAbout(kind string, of object) bool {
	return e.InvolvedObject.Kind == kind && e.InvolvedObject.Name == of.Name && e.InvolvedObject.UID == string(of.UID)
}

// last is when it was last said. Sidecars and kubelet write the first time, the scheduler the others.
func (e said) last() time.Time {
	return slices.MaxFunc([]time.Time{e.LastTimestamp, e.EventTime, e.Series.LastObservedTime}, time.Time.Compare)
}

func (t *tracer) step(link, object, state string, since time.Time) {
	t.trace.Steps = append(t.trace.Steps, orchestrator.TraceStep{Link: link, Object: object, State: state, Since: since})
}

func (t *tracer) say(link, text string, last time.Time) {
	t.trace.Messages = append(
		t.trace.Messages,
		orchestrator.TraceMessage{Link: link, Text: strings.Join(strings.Fields(text), " "), Last: last},
	)
}

var _ orchestrator.Tracer = (*Operator)(nil)
