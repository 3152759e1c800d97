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

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// Drain implements [metadata.Drainer]: it cordons the Node and asks for the eviction of its pods, which
// PodDisruptionBudgets can refuse for a while.
//
// Pods of a DaemonSet and mirror pods belong to the node. A pod that has claims and none of whose containers has ever
// started waits for its volumes, as far as one can tell: evicted, it would take its wish to another node, which would
// be restarted next. A pod without a controller is not evicted, since nothing would make it again, and so keeps the
// Node from being drained.
func (r *Restarts) Drain(ctx context.Context, instanceID, restartID string) (left []string, err error) {
	name, err := r.nodeName(ctx, instanceID)
	if err != nil {
		return nil, err
	}
	if err := r.cordon(ctx, name, restartID); err != nil {
		return nil, err
	}
	query := url.Values{"fieldSelector": {"spec.nodeName=" + name}}
	var pods struct{ Items []pod }
	if _, err := r.do(ctx, request{
		method:   http.MethodGet,
		path:     "/api/v1/pods",
		query:    query,
		what:     "list the pods of Node " + name,
		verb:     "list",
		resource: "pods",
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
			left = append(left, fmt.Sprintf("pod %s/%s %s", p.Metadata.Namespace, p.Metadata.Name, why))
		}
	}
	slices.Sort(left)
	return left, nil
}

// Undrain implements [metadata.Drainer].
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

// cordon marks a Node as unschedulable and remembers for which restart, unless somebody else has marked it.
func (r *Restarts) cordon(ctx context.Context, name, restartID string) error {
	return r.patchUnchanged(ctx, "cordon Node "+name, name, func(n node) map[string]any {
		by, ours := n.Metadata.Annotations[cordonAnnotation]
		if n.Spec.Unschedulable && (!ours || by == restartID) {
			return nil
		}
		return cordonPatch(n, restartID, true)
	})
}

// cordonPatch is the patch by which a Node, as it was read, is cordonPatch or no longer so.
func cordonPatch(n node, by, unschedulable any) map[string]any {
	patch := annotations{cordonAnnotation: by}.patch(n.Metadata.ResourceVersion)
	patch["spec"] = map[string]any{"unschedulable": unschedulable}
	return patch
}

// pod is what is read of a Pod.
type pod struct {
	Metadata struct {
		Name, Namespace, UID, DeletionTimestamp string
		Annotations                             map[string]string
		OwnerReferences                         []struct {
			Kind       string
			Controller bool
		}
	}
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

// exemptFromDrain reports whether a pod has nothing to do with a drain.
func (p pod) exemptFromDrain() bool {
	_, mirror := p.Metadata.Annotations["kubernetes.io/config.mirror"]
	over := p.Status.Phase == "Succeeded" || p.Status.Phase == "Failed"
	return mirror || over || p.controller() == "DaemonSet" || p.awaitsVolumes()
}

// controller is the kind of what would make the pod again, or empty.
func (p pod) controller() string {
	for _, owner := range p.Metadata.OwnerReferences {
		if owner.Controller {
			return owner.Kind
		}
	}
	return ""
}

// awaitsVolumes reports whether the pod has claims and has not begun to work. The kubelet starts no container, init containers
// included, before all volumes are there.
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

// evict asks a pod to go, and says why it is still there, or nothing if it is not.
func (r *Restarts) evict(ctx context.Context, p pod) (why string, err error) {
	m := p.Metadata
	switch {
	case m.DeletionTimestamp != "":
		return "is ending", nil
	case p.controller() == "":
		return "has no controller that would make it again: delete it by hand", nil
	}
	path := "/api/v1/namespaces/" + m.Namespace + "/pods/" + m.Name + "/eviction"
	status, err := r.do(ctx, post("evict pod "+m.Namespace+"/"+m.Name, path, "pods/eviction", map[string]any{
		"apiVersion": "policy/v1",
		"kind":       "Eviction",
		"metadata":   map[string]any{"namespace": m.Namespace, "name": m.Name},
		// A StatefulSet's next pod has the same name, and may be elsewhere.
		"deleteOptions": map[string]any{"preconditions": map[string]any{"uid": m.UID}},
	}), nil, http.StatusNotFound, http.StatusConflict, http.StatusTooManyRequests, http.StatusInternalServerError)
	switch {
	case err != nil:
		return "", err
	case status == http.StatusNotFound, status == http.StatusConflict:
		return "", nil // that one is gone
	case status == http.StatusTooManyRequests:
		return "must not be evicted yet: a PodDisruptionBudget allows no disruption", nil
	case status == http.StatusInternalServerError:
		return "cannot be evicted: more than one PodDisruptionBudget covers it, or the API server fails", nil
	}
	return "is ending", nil
}

var _ interface {
	metadata.RestartRequester
	metadata.Drainer
} = (*Restarts)(nil)

var _ metadata.RestartListener = (*Listener)(nil)
