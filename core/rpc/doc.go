// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package rpc has the parts of RPCs that the Controller and the Node service share: errors with gRPC codes, checks of
// requests, the keys of contexts and parameters, the topology, how long an RPC may wait, and what a controller tells
// the commands of oxide-csi beside CSI.
package rpc
