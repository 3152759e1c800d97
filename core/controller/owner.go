// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller

import (
	"context"
	"errors"
	"fmt"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// A disk or snapshot belongs to the cluster that its description names, until another cluster adopts the volume: a
// description never changes, so an adoption is a record on the rack. A snapshot belongs to the cluster that owns its
// volume. A disk or snapshot without a description of this plugin belongs to no cluster, and every cluster may use it
// (docs/development/decisions/030-the-adopter-owns-the-volume.md).

// adoption returns the adoption of a volume. It returns false if no cluster adopted the volume. A group that is no
// record does not count.
func (c rackController) adoption(ctx context.Context, volumeID string) (record.Adoption, bool, error) {
	a, found, err := record.Adoptions.Get(ctx, c.rack, "", volumeID)
	switch {
	case errors.Is(err, record.ErrNoRecord):
		return a, false, nil
	case err == nil && !found:
		err = c.confirmNotFound(ctx)
	}
	return a, found, err
}

// owner returns the cluster that owns a disk or snapshot of the volume, or "" if no cluster does. It sends a request
// only if the description names another cluster. This cluster's own volumes must cost no request, so it does not
// notice if one of them was adopted by another cluster.
func (c rackController) owner(ctx context.Context, description, volumeID string) (string, error) {
	described, _ := rack.ParseDescription(description)
	if described.Cluster == "" || described.Cluster == c.cluster {
		return described.Cluster, nil
	}
	a, adopted, err := c.adoption(ctx, volumeID)
	if adopted {
		return a.Cluster, nil
	}
	return described.Cluster, err
}

// checkDiskOwner rejects a disk of another cluster.
func (c rackController) checkDiskOwner(ctx context.Context, disk rack.Disk) error {
	return c.checkOwner(ctx, "volume "+disk.VolumeID, disk.Description, disk.VolumeID)
}

// checkSnapshotOwner rejects a snapshot of another cluster.
func (c rackController) checkSnapshotOwner(ctx context.Context, snapshot rack.Snapshot) error {
	return c.checkOwner(ctx, "snapshot "+snapshot.ID, snapshot.Description, snapshot.VolumeID)
}

func (c rackController) checkOwner(ctx context.Context, what, description, volumeID string) error {
	owner, err := c.owner(ctx, description, volumeID)
	if err != nil || owner == "" || owner == c.cluster {
		return err
	}
	return rpc.FailedPrecondition(
		"%s belongs to cluster %q, this is %q: if that is gone, use oxide-csi volume adopt, else restore a snapshot that was made manually",
		what,
		owner,
		c.cluster,
	)
}

// notOwnedReason says why a disk or snapshot with this description is not deleted. It is empty if this plugin made it
// for its cluster, or if this cluster adopted its volume.
func (c rackController) notOwnedReason(ctx context.Context, description, volumeID string) (string, error) {
	owner, err := c.owner(ctx, description, volumeID)
	switch {
	case err != nil:
		return "", err
	case owner == "":
		return "was not made by this plugin", nil
	case owner != c.cluster:
		return fmt.Sprintf("belongs to cluster %q, this is %q", owner, c.cluster), nil
	}
	return "", nil
}

// forgetAdoption deletes the record of a deleted volume that this cluster had adopted. A record that stays has no
// effect: no volume gets the same ID again.
func (c rackController) forgetAdoption(ctx context.Context, disk rack.Disk) {
	if c.ownsDisk(disk) {
		return
	}
	if err := c.rack.DeleteRecordNamed(ctx, record.Adoptions.Named("", disk.VolumeID)); err != nil {
		c.log.Warn("cannot remove the record of a deleted disk's adoption", "volume_id", disk.VolumeID, "error", err.Error())
	}
}

// Adoptions returns the cluster that has adopted each volume, by the volume's ID. records are all records of a rack.
// Those of a newer format count, too: they name the owner.
func Adoptions(records []record.Record) map[string]string {
	clusters := map[string]string{}
	adoptions, newer := record.Adoptions.In(records, "")
	for _, a := range adoptions {
		clusters[a.VolumeID] = a.Cluster
	}
	for _, n := range newer {
		clusters[n.Fields.VolumeID] = n.Fields.Cluster
	}
	return clusters
}
