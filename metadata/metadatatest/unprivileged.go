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

// Unprivileged calls a provider that reads files as an ordinary user for as long as
// denied is set: file modes mean nothing to root, who runs these tests too.
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

// enter makes the thread an ordinary user's as far as files are concerned, where
// access is denied, and returns what ends that.
func (u unprivileged) enter() (leave func()) {
	if !u.denied.Load() {
		return func() {}
	}
	// The file system user belongs to the thread alone, and so does the change.
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
