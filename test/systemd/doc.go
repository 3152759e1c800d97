// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package systemd runs the units of deploy/systemd under a real systemd. It is the first process of its own
// namespaces, with an overlay over this machine's root, so that nothing here changes. The machine is an instance of a
// simulated rack.
//
// The tests have the build tag "systemd", because they need root and a machine where systemd can run like this: make
// test-systemd.
package systemd
