// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package rack talks to one Oxide rack. It is the only importer of the Oxide SDK, and the only place where a volume is a
// disk: the rest of the plugin speaks the words of the CSI specification.
//
//   - rack.go, snapshot.go: the calls, each one API request; what they return is what the rack said, settled by nobody
//   - list.go: lists, a page at a time
//   - wait.go: waiting for a disk or a snapshot to come to rest
//   - name.go: names and descriptions of the disks that we make: the only metadata a rack keeps for us
//   - errors.go: the SDK's errors in the words of this package
//   - check.go: whether the rack can be used as configured
//   - transport.go: the HTTP client, a pool that suits a hundred calls at once, and the layers that requests pass:
//     reads.go (one answer for all who ask the same), version.go (an API version that the rack serves), retry.go (again, where
//     that does no harm), token.go (credentials that may change), finish.go (changes are seen through to their end),
//     observe.go (what metrics are made of)
//
// What may do harm when it is done twice is sent once: who knows what a repetition may do is the RPC that wanted it.
package rack
