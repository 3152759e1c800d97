// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package client asks a running plugin what an orchestrator would ask it, by the same CSI calls over the same sockets, for a
// person or a script on a host that has no orchestrator.
//
// It keeps nothing: what a call needs from an earlier one is asked again, since each call of the specification that matters
// here may be repeated. What it promises beyond single calls is what the specification demands of an orchestrator: a volume
// is mounted only where it is attached, and detached only when it is unmounted.
//
//   - connection.go: the sockets, and what every call passes through
//   - errors.go: what a failed call says, and its exit code
//   - volume.go, mount.go, snapshot.go: the life of volumes and snapshots
package client
