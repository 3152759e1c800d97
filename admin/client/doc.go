// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package client calls a running plugin as an orchestrator does: by CSI calls over the same sockets. It is for people
// and scripts on a host without an orchestrator.
//
// It stores nothing. If a call needs the result of an earlier call, the client repeats that call, which CSI allows. The
// client keeps the order that the specification demands of an orchestrator: it mounts a volume only where the volume is
// attached, and detaches the volume only when it is unmounted.
//
//   - connection.go: the sockets, and the interceptor of every call
//   - errors.go: the text and exit code of a failed call; progress.go: what a command waits for
//   - names.go: volumes, snapshots and nodes by their names; details.go: what answers of CSI have no field for
//   - volume.go, mount.go, detach.go, snapshot.go: the life of volumes and snapshots
//   - kept.go: what a host keeps for its next boot; header.go: copies of the headers of encrypted volumes
//   - hostmounts.go: where volumes are mounted on this host; restarts.go, adopt.go: planned restarts, adoptions
package client
