// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package rack is the client of one Oxide rack. Only this package imports the Oxide SDK, and only here a volume is
// called a disk: the rest of the plugin uses the words of the CSI specification.
//
//   - rack.go, instance.go, snapshot.go: disks, instances and snapshots; each call is one API request
//   - disks.go: decoding disks, also those in a state that the SDK does not know
//   - grown.go: the disk of a volume that has grown
//   - record.go: records, small texts that the plugin keeps on the rack
//   - role.go, accesstoken.go: what the client's token may do, and when it expires
//   - list.go: lists of disks and snapshots, page by page
//   - wait.go: waiting until a disk or a snapshot reaches a stable state
//   - description.go: the description of a disk or a snapshot, the only metadata that a rack keeps for us
//   - errors.go: SDK errors translated to the errors of this package
//   - refusal.go: what a refusal means, by the states of disk and instance
//   - cafile.go: replaceable CA certificates
//   - answer.go: checking that an answer is about what was asked
//   - check.go: checking that the rack can be used as configured
//   - transport.go: the HTTP client and its layers: coalesce.go (concurrent equal reads share one request), version.go
//     (API version negotiation), retry.go (repeating requests that are safe to repeat), token.go (replaceable
//     credentials), deadline.go (waiting for changes beyond the caller's deadline), limit.go (bounds for the calls
//     under way and for repetitions), observe.go (one callback per request, for metrics)
//
// A request that is not safe to repeat is sent once. Only the RPC that made it knows what a second attempt would mean.
package rack
