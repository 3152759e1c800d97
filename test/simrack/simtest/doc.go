// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package simtest starts the built programs on one machine: a simulated rack (oxide-sim serve) and plugins (oxide-csi),
// each in its own process. It talks to them as any client does: through the rack's API, its control endpoint, and CSI
// over unix sockets. The demo, the black-box tests, csi-sanity and the benchmarks use it.
//
//   - programs.go: building the programs
//   - process.go: starting a process and ending it
//   - sim.go: a simulated rack
//   - control.go: the client of its control endpoint
//   - boot.go: the program that its guests boot
//   - plugin.go: a plugin
//   - node.go: a Kubernetes API server that carries the requests for planned restarts
//   - cluster.go: the part of a Kubernetes API server that only reads
package simtest
