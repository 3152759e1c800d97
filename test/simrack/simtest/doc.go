// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package simtest puts the built programs together on one machine: a simulated rack (oxide-sim serve) and plugins
// (oxide-csi), as processes of their own, spoken to as anybody would: the rack's API, its control endpoint, CSI over unix
// sockets. The demo, the black-box tests, csi-sanity and the benchmarks are built on it.
//
//   - programs.go: building the programs
//   - process.go: starting a process and ending it
//   - sim.go: a simulated rack
//   - control.go: its control endpoint
//   - boot.go: what its guests run
//   - plugin.go: a plugin
//   - node.go: what asks the node plugin for planned restarts
package simtest
