// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package simrack is a simulated Oxide rack: the part of the control plane's HTTP API that deals with disks and
// instances, with the checks, messages, states and limits of a real one, and with knobs that a real one does not have.
//
// It exists so that everything above it is tested, tried and shown with the real SDK over real HTTP, without a rack.
// docs/reference/rack.md says how racks behave, in numbered sections; comments here cite it as "docs/reference/rack.md §4", and the tests of
// this package are its table of cases.
//
// A [Rack] has two outsides. [Rack.API] is the rack as every client knows it. [Rack.Control] is what only a test or a demo
// may touch: faults to inject, settings to change, machines to cut off from power, calls to count. The guests inside the
// instances are not here: [Guests] is what the rack asks of them, and test/simrack/guest keeps them.
//
// # Files
//
//   - rack.go: options, the Rack, starting and stopping it, and who may work on what at one time
//   - disks.go, instances.go, attach.go, snapshots.go, groups.go: the state machine, one file per section of docs/reference/rack.md
//   - names.go: names, UUIDs, and the selectors that may be either
//   - http.go: versions, routes, authentication, answers; body.go: request bodies; page.go: lists; wire.go: the JSON views
//   - faults.go, calls.go, control.go: what the control endpoint offers
//   - store.go: the records that survive the process
//
// # Locking
//
// One mutex guards the records, and no call into [Guests] is made under it, since those take as long as a machine takes.
// What such a call concerns is claimed meanwhile ([Rack.hold]): others who want to change the same instance or disk wait,
// and everybody may look.
package simrack
