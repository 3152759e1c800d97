// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package simrack is a simulated Oxide rack. It serves the part of the control plane's HTTP API that deals with disks,
// instances and snapshots. It has the checks, messages, states and limits of a real rack, and adds settings and faults
// for tests.
//
// With it the plugin is tested and shown through the real SDK over real HTTP, without a rack. docs/reference/rack.md
// describes how racks behave, in numbered sections. Comments here cite it as "docs/reference/rack.md §4". The tests of
// this package are its table of cases.
//
// A [Rack] has two handlers. [Rack.API] is the rack's API. [Rack.Control] is for tests and demos only: it injects
// faults, changes settings, cuts the power of instances, and counts calls. The machines inside the instances are behind
// the interface [Guests]; test/simrack/guest implements it.
//
// # Files
//
//   - rack.go: options, the Rack, starting and stopping it, and locking its records
//   - disks.go, instances.go, attach.go, snapshots.go, groups.go: the state machine, one file per section of
//     docs/reference/rack.md
//   - behaviour.go: settings for what a rack may do and mostly does not
//   - guests.go: what a rack asks of the machines inside its instances
//   - addresses.go: network interfaces and addresses of instances, which only other clients than the plugin ask for
//   - names.go: names, UUIDs, and selectors, which may be either
//   - http.go: versions, routes, authentication, answers; body.go: request bodies; page.go: lists; wire.go: the JSON
//     views; tokens.go: tokens and their roles
//   - network.go: connections that faults can break
//   - faults.go, calls.go, control.go: the control endpoint
//   - shown.go: what answers show of an object instead of its real fields
//   - store.go: the records that survive the process
//
// # Locking
//
// One mutex guards the records. It is not held during calls into [Guests], because they can take seconds. Instead an
// operation locks the IDs that the call concerns ([Rack.lock]). Other operations that change the same instance or disk
// wait; reads do not.
package simrack
