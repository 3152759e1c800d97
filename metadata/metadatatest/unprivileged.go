// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package metadatatest

import (
	"context"
	"os"
	"runtime"
	"sync/atomic"
	"syscall"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// Unprivileged wraps a provider that reads files. While denied is set, the provider reads them as an ordinary user.
// Tests that run as root need this, because root can read a file whatever its mode.
func Unprivileged(provider metadata.Provider, denied *atomic.Bool) metadata.Provider {
	if os.Geteuid() != 0 {
		return provider
	}
	return unprivileged{provider, denied}
}

type unprivileged struct {
	metadata.Provider
	denied *atomic.Bool
}

func (u unprivileged) Instance(ctx context.Context) (metadata.Instance, error) {
	defer u.enter()()
	return u.Provider.Instance(ctx)
}

func (u unprivileged) PartialInstance(ctx context.Context) (metadata.Instance, error) {
	defer u.enter()()
	return u.Provider.(metadata.PartialProvider).PartialInstance(ctx)
}

// enter changes the thread's user for file access to an ordinary one if access is denied. The returned function changes
// it back.
func (u unprivileged) enter() (leave func()) {
	if !u.denied.Load() {
		return func() {}
	}
	// The user for file access belongs to the thread, so the goroutine must stay on this thread.
	runtime.LockOSThread()
	const nobody = 65534
	setUser(nobody)
	return func() {
		setUser(0)
		runtime.UnlockOSThread()
	}
}

func setUser(uid uintptr) {
	if _, _, errno := syscall.RawSyscall(syscall.SYS_SETFSUID, uid, 0, 0); errno != 0 {
		panic(errno)
	}
}
