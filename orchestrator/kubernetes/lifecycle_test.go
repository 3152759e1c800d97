// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package kubernetes_test

import (
	"context"
	"fmt"
	"net/http"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/kubernetes/kubetest"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator/kubernetes"
)

const (
	driver      = "csi.example.com"
	taintKey    = "csi.example.com/agent-not-ready"
	patchNode   = "PATCH /api/v1/nodes/" + nodeName
	getCSINode  = "GET /apis/storage.k8s.io/v1/csinodes/" + nodeName
	attachments = "GET /apis/storage.k8s.io/v1/volumeattachments?%slimit=500"
)

func taints(list ...any) func(object) { return in("spec", "taints", list) }

// csiNode returns a CSINode with another driver and the plugin's driver. If limit is nil, the plugin's driver has no
// volume limit.
func csiNode(nodeID string, limit any) object {
	ours := object{"name": driver, "nodeID": nodeID, "topologyKeys": []any{"rack"}}
	if limit != nil {
		ours["allocatable"] = object{"count": limit}
	}
	return object{"kind": "CSINode", "metadata": object{"name": nodeName}, "spec": object{"drivers": []any{
		object{"name": "csi.example.org", "nodeID": nodeID, "allocatable": object{"count": 3}}, ours,
	}}}
}

func TestRemoveTaint(t *testing.T) {
	ours := object{"key": taintKey, "value": "true", "effect": "NoExecute", "timeAdded": "2026-01-02T03:04:05Z"}
	twice := object{"key": taintKey, "effect": "NoSchedule"}
	other := object{"key": "example.org/agent-not-ready", "effect": "NoExecute", "timeAdded": "2026-01-02T03:04:05Z"}
	const removed = `[{"op":"test","path":"/spec/taints","value":[%s]},{"op":"replace","path":"/spec/taints","value":[%s]}]`
	const oursJSON = `{"effect":"NoExecute","key":"csi.example.com/agent-not-ready","timeAdded":"2026-01-02T03:04:05Z","value":"true"}`
	const twiceJSON = `{"effect":"NoSchedule","key":"csi.example.com/agent-not-ready"}`
	const otherJSON = `{"effect":"NoExecute","key":"example.org/agent-not-ready","timeAdded":"2026-01-02T03:04:05Z"}`
	for name, tt := range map[string]struct {
		node    any
		csiNode any
		patched int // the status of the answer to a patch; 0 means 200
		had     bool
		kind    error
		says    string
		patch   string
	}{
		"the only taint":    {node: node(taints(ours)), csiNode: csiNode(idA, 7), had: true, patch: fmt.Sprintf(removed, oursJSON, "")},
		"among others":      {node: node(taints(other, ours)), csiNode: csiNode(idA, 7), had: true, patch: fmt.Sprintf(removed, otherJSON+","+oursJSON, otherJSON)},
		"with two effects":  {node: node(taints(ours, other, twice)), csiNode: csiNode(idA, 7), had: true, patch: fmt.Sprintf(removed, oursJSON+","+otherJSON+","+twiceJSON, otherJSON)},
		"no taints":         {node: node()},
		"another taint":     {node: node(taints(other)), csiNode: csiNode(idA, 7)},
		"no CSINode":        {node: node(taints(ours)), had: true, kind: metadata.ErrNotReady, says: "wait for the kubelet to write driver csi.example.com"},
		"no limit":          {node: node(taints(ours)), csiNode: csiNode(idA, nil), had: true, kind: metadata.ErrNotReady, says: "a volume limit into CSINode"},
		"another node ID":   {node: node(taints(ours)), csiNode: csiNode(idB, 7), had: true, kind: metadata.ErrNotReady, says: "node ID " + idA},
		"changed meanwhile": {node: node(taints(ours)), csiNode: csiNode(idA, 7), patched: http.StatusUnprocessableEntity, had: true, kind: metadata.ErrNotReady, says: "the object was changed meanwhile"},
		"no right to patch": {node: node(taints(ours)), csiNode: csiNode(idA, 7), patched: http.StatusForbidden, had: true, kind: metadata.ErrInvalid, says: `the verb "patch" on "nodes"`},
		"no Node":           {kind: metadata.ErrNotReady, says: "HTTP 404; check that --node-name"},
	} {
		t.Run(name, func(t *testing.T) {
			s := kubetest.NewServer(t)
			s.Object = tt.node
			patch := ""
			s.More = func(call, body string) (int, any) {
				switch {
				case call == getCSINode && tt.csiNode != nil:
					return http.StatusOK, tt.csiNode
				case call == patchNode && tt.patched != 0:
					return tt.patched, nil
				case call == patchNode:
					patch = body
					return http.StatusOK, tt.node
				}
				return http.StatusNotFound, nil
			}
			had, err := kubernetes.NewNode(s.Options()).
				RemoveTaint(context.Background(), taintKey, orchestrator.Registration{Driver: driver, NodeID: idA})
			kubetest.Judge(t, err, tt.kind, tt.says)
			if had != tt.had || patch != tt.patch {
				t.Errorf("had the taint: %v, want %v; patched with\n%s, want\n%s", had, tt.had, patch, tt.patch)
			}
		})
	}
}

func TestLeaving(t *testing.T) {
	taint := func(key string) func(object) { return taints(object{"key": key, "effect": "NoSchedule"}) }
	ready := func(message string) func(object) {
		return in(
			"status",
			"conditions",
			[]any{
				object{"type": "MemoryPressure", "message": "node is shutting down"},
				object{"type": "Ready", "status": "False", "message": message},
			},
		)
	}
	for name, tt := range map[string]struct {
		node any
		want string
	}{
		"not leaving":         {node(), ""},
		"not ready":           {node(ready("container runtime is down"), taint("node.kubernetes.io/not-ready")), ""},
		"cordoned":            {node(in("spec", "unschedulable", true)), "it is cordoned"},
		"by Karpenter":        {node(taint("karpenter.sh/disrupted")), "it has the taint karpenter.sh/disrupted"},
		"by the autoscaler":   {node(taint("ToBeDeletedByClusterAutoscaler")), "it has the taint ToBeDeletedByClusterAutoscaler"},
		"shut down":           {node(ready("[container runtime is down, node is shutting down]")), "its machine shuts down"},
		"about to be deleted": {node(in("metadata", "deletionTimestamp", "2026-01-02T03:04:05Z")), "it was deleted"},
		"deleted":             {nil, "it was deleted"},
	} {
		t.Run(name, func(t *testing.T) {
			s := kubetest.NewServer(t)
			s.Object = tt.node
			got, err := kubernetes.NewNode(s.Options()).Leaving(context.Background())
			if got != tt.want || err != nil {
				t.Errorf("got %q, %v; want %q", got, err, tt.want)
			}
		})
	}
}

func TestAttachments(t *testing.T) {
	attachment := func(attacher, node, volume string) any {
		return object{
			"spec": object{"attacher": attacher, "nodeName": node, "source": object{"persistentVolumeName": volume}},
		}
	}
	list := func(next string, items ...any) any {
		return object{"kind": "VolumeAttachmentList", "metadata": object{"continue": next}, "items": items}
	}
	first := list(
		"more of it",
		attachment(driver, nodeName, "ours"),
		attachment(driver, "worker-4", "elsewhere"),
		attachment("csi.example.org", nodeName, "another's"),
	)
	second := list("", attachment(driver, nodeName, "ours too"))
	for name, tt := range map[string]struct {
		pages map[string]any
		fails int
		want  []string
		kind  error
		says  string
	}{
		"none":              {pages: map[string]any{"": list("")}},
		"on pages":          {pages: map[string]any{"": first, "continue=more+of+it&": second}, want: []string{"ours", "ours too"}},
		"no right to list":  {fails: http.StatusForbidden, kind: metadata.ErrInvalid, says: `the verb "list" on "volumeattachments"`},
		"changed meanwhile": {fails: http.StatusGone, kind: metadata.ErrNotReady, says: "try again"},
		"something else":    {pages: map[string]any{"": object{"kind": "Status"}}, kind: metadata.ErrInvalid, says: "unexpected response from"},
	} {
		t.Run(name, func(t *testing.T) {
			s := kubetest.NewServer(t)
			s.More = func(call, _ string) (int, any) {
				for next, page := range tt.pages {
					if call == fmt.Sprintf(attachments, next) {
						return http.StatusOK, page
					}
				}
				return max(tt.fails, http.StatusBadRequest), nil
			}
			got, err := kubernetes.NewNode(s.Options()).Attachments(context.Background(), driver)
			kubetest.Judge(t, err, tt.kind, tt.says)
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("want (-), got (+):\n%s", diff)
			}
		})
	}
}
