// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package kubernetes

import (
	"context"
	"net/http"
	"net/url"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata/kubernetes"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

const (
	persistentVolumes = "/api/v1/persistentvolumes"
	claims            = "/api/v1/persistentvolumeclaims"
	snapshotContents  = "/apis/snapshot.storage.k8s.io/v1/volumesnapshotcontents"
)

// Operator reads what a cluster knows of the plugin's volumes, for the commands of an operator. It changes nothing.
type Operator struct{ client }

// NewOperator makes an Operator. It does no I/O. The options need no NodeName.
func NewOperator(options kubernetes.Options) *Operator { return &Operator{newClient(options)} }

// persistentVolume has the fields of a PersistentVolume that are read.
type persistentVolume struct {
	object
	Spec struct {
		ClaimRef         *reference
		StorageClassName string
		CSI              *struct{ Driver, VolumeHandle string }
	}
	Status struct{ Phase string }
}

// reference names another object.
type reference struct{ Kind, Namespace, Name, UID string }

func (r *reference) claim() string {
	if r == nil {
		return ""
	}
	return r.Namespace + "/" + r.Name
}

// snapshotContent has the fields of a VolumeSnapshotContent that are read.
type snapshotContent struct {
	object
	Spec struct {
		Driver            string
		Source            struct{ SnapshotHandle string }
		VolumeSnapshotRef reference
	}
	Status *struct{ SnapshotHandle string }
}

// Inventory implements [orchestrator.Inventorist]. It needs the verb "list" on "persistentvolumes",
// "persistentvolumeclaims" and, if the cluster has snapshots, "volumesnapshotcontents".
func (o *Operator) Inventory(ctx context.Context) (orchestrator.Inventory, error) {
	var known orchestrator.Inventory
	// Claims come first: one that is bound meanwhile is then in the list of volumes.
	all, err := listAll[claim](ctx, o.client, claims, "persistentvolumeclaims")
	if err != nil {
		return orchestrator.Inventory{}, err
	}
	for _, c := range all {
		if c.Spec.VolumeName == "" {
			known.Volumes = append(known.Volumes, orchestrator.KnownObject{
				CSIName: "pvc-" + string(c.UID), Object: "PersistentVolumeClaim " + c.key(), Claim: c.key(),
			})
		}
	}
	volumes, err := listAll[persistentVolume](ctx, o.client, persistentVolumes, "persistentvolumes")
	if err != nil {
		return orchestrator.Inventory{}, err
	}
	for _, v := range volumes {
		if v.Spec.CSI != nil && v.Spec.CSI.Driver == driver {
			known.Volumes = append(known.Volumes, orchestrator.KnownObject{
				ID: v.Spec.CSI.VolumeHandle, Object: "PersistentVolume " + v.Name, Claim: v.Spec.ClaimRef.claim(),
			})
		}
	}
	contents, err := listAll[snapshotContent](
		ctx,
		o.client,
		snapshotContents,
		"volumesnapshotcontents",
		http.StatusNotFound,
	)
	if err != nil {
		return orchestrator.Inventory{}, err
	}
	for _, c := range contents {
		if c.Spec.Driver == driver {
			known.Snapshots = append(known.Snapshots, c.known())
		}
	}
	return known, nil
}

// known is the snapshot of a VolumeSnapshotContent. The snapshotter names a snapshot that it creates after the UID of
// the VolumeSnapshot.
func (c snapshotContent) known() orchestrator.KnownObject {
	known := orchestrator.KnownObject{Object: "VolumeSnapshotContent " + c.Name, ID: c.Spec.Source.SnapshotHandle}
	if c.Status != nil && c.Status.SnapshotHandle != "" {
		known.ID = c.Status.SnapshotHandle
	}
	if known.ID == "" {
		known.CSIName = "snapshot-" + c.Spec.VolumeSnapshotRef.UID
	}
	return known
}

// claim has the fields of a PersistentVolumeClaim that are read.
type claim struct {
	object
	Spec struct {
		VolumeName       string
		StorageClassName *string
		DataSource       *reference
		Resources        struct{ Requests map[string]string }
	}
	Status struct {
		Phase      string
		Capacity   map[string]string
		Conditions []condition
	}
}

// condition is a condition in the status of an object.
type condition struct{ Type, Status, Reason, Message string }

func (o object) key() string { return o.Namespace + "/" + o.Name }

// listAll reads all pages of a list. An HTTP status in accepted means an empty list.
func listAll[T any](ctx context.Context, c client, path, resource string, accepted ...int) ([]T, error) {
	return listSelected[T](ctx, c, path, resource, url.Values{}, accepted...)
}

// listSelected is [listAll] with selectors.
func listSelected[T any](
	ctx context.Context, c client, path, resource string, query url.Values, accepted ...int,
) ([]T, error) {
	var all []T
	query.Set("limit", pageSize)
	for {
		var page kubernetes.List[T]
		status, err := c.Do(ctx, kubernetes.Request{
			Method: http.MethodGet, Path: path, Query: query, What: "list " + resource, Verb: "list", Resource: resource,
		}, &page, accepted...)
		if err != nil || status != http.StatusOK {
			return nil, err
		}
		all = append(all, page.Items...)
		if page.Continue == "" {
			return all, nil
		}
		query.Set("continue", page.Continue)
	}
}

var _ orchestrator.Inventorist = (*Operator)(nil)
