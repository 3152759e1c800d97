// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package kubernetes_test

import (
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/kubernetes/kubetest"
)

// Short names for what package kubetest has.
const (
	idA         = kubetest.IDA
	idB         = kubetest.IDB
	nodeName    = kubetest.NodeName
	token       = kubetest.Token
	allNodes    = kubetest.AllNodes
	allCSINodes = kubetest.AllCSINodes
)

type object = kubetest.Object

var (
	node       = kubetest.Node
	in         = kubetest.In
	annotation = kubetest.Annotation
)
