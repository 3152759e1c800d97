// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package systemd runs the units of deploy/systemd under a real systemd, which is the first process of namespaces of its own:
// an overlay over this machine's root, so that nothing here changes, and a simulated rack whose instance it is.
//
// It has the build tag "systemd", since it needs root and a systemd that can be started so: make test-systemd.
package systemd
