// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rpc

import "time"

// Details describe a volume or a snapshot for people, see [MetadataDetails].
type Details struct {
	// Name is the name with which the volume or snapshot was created. It is empty if it is not known in full, and for a
	// disk or snapshot that this plugin did not make.
	Name string `json:"name,omitempty"`
	// Cluster is the ID of the cluster in which the name is valid. It is empty for the controller's own cluster.
	Cluster string `json:"cluster,omitempty"`
	// Claim is namespace/name of a volume's claim in Kubernetes, or empty.
	Claim string `json:"claim,omitempty"`
	// RackName is the name of a snapshot on the rack. That of a disk is in the volume context.
	RackName string `json:"rackName,omitempty"`
	// Holder is the instance that has a volume's disk, or empty. It has the disk also after an unpublish, until the
	// deferred detach.
	Holder string `json:"holder,omitempty"`
	// Created is by the rack's clock.
	Created time.Time `json:"created,omitzero"`
}
