// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package kubernetes

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata/kubernetes"
)

// Drain implements [orchestrator.Drainer]. It cordons the Node and requests the eviction of its pods. A
// PodDisruptionBudget can delay an eviction.
//
// Pods of a DaemonSet and mirror pods belong to the node and are not evicted. Neither is a pod with claims whose
// containers have never started: it probably waits for its volumes. Evicted, it would request an attach on another
// node, which would be restarted next. A pod without a controller is not evicted either, because nothing would create
// it again. Such a pod blocks the drain.
func (r *Restarts) Drain(ctx context.Context, instanceID, restartID string) (left []string, err error) {
	name, err := r.onlyNodeName(ctx, instanceID)
	if err != nil {
		return nil, err
	}
	if err := r.cordon(ctx, name, restartID); err != nil {
		return nil, err
	}
	query := url.Values{"fieldSelector": {"spec.nodeName=" + name}}
	var pods kubernetes.List[pod]
	if _, err := r.Do(ctx, kubernetes.Request{
		Method:   http.MethodGet,
		Path:     "/api/v1/pods",
		Query:    query,
		What:     "list the pods of Node " + name,
		Verb:     "list",
		Resource: "pods",
	}, &pods); err != nil {
		return nil, err
	}
	for _, p := range pods.Items {
		if p.exemptFromDrain() {
			continue
		}
		why, err := r.evict(ctx, p)
		if err != nil {
			return nil, err
		}
		if why != "" {
			left = append(left, fmt.Sprintf("pod %s/%s %s", p.Namespace, p.Name, why))
		}
	}
	slices.Sort(left)
	return left, nil
}

// Undrain implements [orchestrator.Drainer].
func (r *Restarts) Undrain(ctx context.Context, instanceID, restartID string) error {
	return r.patchMarked(
		ctx,
		"uncordon Node ",
		instanceID,
		cordonAnnotation,
		restartID,
		func(n node) map[string]any { return cordonPatch(n, nil, nil) },
	)
}

// cordon marks a Node as unschedulable and records the restart. A Node that another client has cordoned stays as it is.
func (r *Restarts) cordon(ctx context.Context, name, restartID string) error {
	return r.patchUnchanged(ctx, "cordon Node "+name, name, func(n node) map[string]any {
		by, ours := n.Annotations[cordonAnnotation]
		if n.Spec.Unschedulable && (!ours || by == restartID) {
			return nil
		}
		return cordonPatch(n, restartID, true)
	})
}

// cordonPatch is the patch that cordons or uncordons a Node. The API server rejects the patch if the Node has changed.
func cordonPatch(n node, by, unschedulable any) map[string]any {
	patch := annotations{cordonAnnotation: by}.patch(n.ResourceVersion)
	patch["spec"] = map[string]any{"unschedulable": unschedulable}
	return patch
}

// pod has the fields of a Pod that are read.
type pod struct {
	object
	Spec struct {
		Volumes []struct {
			PersistentVolumeClaim *struct{}
			Ephemeral             *struct{}
		}
	}
	Status struct {
		Phase                                    string
		InitContainerStatuses, ContainerStatuses []containerStatus
	}
}

type containerStatus struct {
	RestartCount     int
	State, LastState struct{ Running, Terminated *struct{} }
}

// exemptFromDrain reports whether a drain leaves the pod where it is.
func (p pod) exemptFromDrain() bool {
	_, mirror := p.Annotations["kubernetes.io/config.mirror"]
	over := p.Status.Phase == "Succeeded" || p.Status.Phase == "Failed"
	owner := metav1.GetControllerOf(&p)
	return mirror || over || owner != nil && owner.Kind == "DaemonSet" || p.awaitsVolumes()
}

// awaitsVolumes reports whether the pod has claims and none of its containers has started. The kubelet starts no
// container, not even an init container, before all volumes are mounted.
func (p pod) awaitsVolumes() bool {
	for _, c := range slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses) {
		if c.RestartCount > 0 || c.State.Running != nil || c.State.Terminated != nil || c.LastState.Terminated != nil {
			return false
		}
	}
	if p.Status.Phase != "Pending" {
		return false
	}
	for _, v := range p.Spec.Volumes {
		if v.PersistentVolumeClaim != nil || v.Ephemeral != nil {
			return true
		}
	}
	return false
}

// evict requests the eviction of a pod. It says why the pod is still there, or returns "" if the pod has gone.
func (r *Restarts) evict(ctx context.Context, p pod) (why string, err error) {
	switch {
	case p.DeletionTimestamp != nil:
		return "is ending", nil
	case metav1.GetControllerOf(&p) == nil:
		return "has no controller that would create it again: delete it manually", nil
	}
	path := "/api/v1/namespaces/" + p.Namespace + "/pods/" + p.Name + "/eviction"
	status, err := r.Do(ctx, post("evict pod "+p.Namespace+"/"+p.Name, path, "pods/eviction", map[string]any{
		"apiVersion": "policy/v1",
		"kind":       "Eviction",
		"metadata":   map[string]any{"namespace": p.Namespace, "name": p.Name},
		// The UID, because a StatefulSet's next pod has the same name and may run elsewhere.
		"deleteOptions": map[string]any{"preconditions": map[string]any{"uid": p.UID}},
	}), nil, http.StatusNotFound, http.StatusConflict, http.StatusTooManyRequests, http.StatusInternalServerError)
	switch {
	case err != nil:
		return "", err
	case status == http.StatusNotFound, status == http.StatusConflict:
		return "", nil // the pod has gone
	case status == http.StatusTooManyRequests:
		return "cannot be evicted yet: a PodDisruptionBudget allows no disruption", nil
	case status == http.StatusInternalServerError:
		return "cannot be evicted: more than one PodDisruptionBudget covers it, or the API server fails", nil
	}
	return "is ending", nil
}
