// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package nomad runs the job files of deploy/nomad on a real Nomad: a server and two clients with ACLs, whose machines
// are instances of a simulated rack. The commands are those of docs/how-to/nomad.md.
//
// Each client is in its own mount and PID namespace, with its own folder at the same path, like two machines. Killing
// the namespace's first process ends all its processes, like a power cut.
//
// Beside each client runs Debian's dockerd, for the jobs with driver docker. Containers see this machine's /dev and
// /sys, so their node plugin is told where its guest is. The job files are otherwise unchanged.
//
// TestPlannedRestart uses a rack without hot-plug whose instances boot. Each instance is a machine with its own Nomad
// client. It really goes down when its node plugin powers it off, and comes up with other disks. It lacks only its own
// kernel and network.
//
// TestDeferredDetach, TestDrainByForce, TestCompoundFault, TestCutOff, TestTwoNamespaces, TestDisagreements and
// TestClaimsThatStay wait most of the time, so they run at once, each with its own cluster. All clients share one
// network. Those of TestCutOff reach the server through the test, which can cut one off.
//
// TestDrivers, TestMemory and TestRefused need no cluster and no root, only Nomad's command.
//
// The tests have the build tag "nomad", because building Nomad takes minutes: make e2e-nomad.
package nomad
