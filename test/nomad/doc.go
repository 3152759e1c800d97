// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package nomad runs the job files of deploy/nomad on a real Nomad: a server and two clients with ACLs on, before a simulated
// rack whose instances the two clients are. What is typed here is what docs/how-to/nomad.md says to type.
//
// Each client is in a mount and PID namespace of its own, with its own folder at the same path, as two machines would be; ending
// the namespace's first process ends all that runs there, as pulling the plug would.
//
// Beside each client runs Debian's dockerd, for the job files that are for Docker. Containers see this machine's /dev and /sys, so
// that their node plugin is told where its guest is; nothing else of the job files is changed.
//
// TestPlannedRestart has a rack without hot-plug, whose instances boot: each is a machine of its own that runs its Nomad client,
// really goes down when its node plugin says so, and comes up with other disks. Of a real machine it lacks a kernel and a network
// of its own.
//
// It has the build tag "nomad", since building Nomad takes minutes: make e2e-nomad.
package nomad
