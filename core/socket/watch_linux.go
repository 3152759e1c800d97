// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package socket

import (
	"os"

	"golang.org/x/sys/unix"
)

// watchFile returns a file that can be read when the file at path was removed or replaced, or nil.
func watchFile(path string) *os.File {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil
	}
	watch := os.NewFile(uintptr(fd), "inotify")
	const events = unix.IN_ATTRIB | unix.IN_DELETE_SELF | unix.IN_MOVE_SELF | unix.IN_DONT_FOLLOW
	if _, err := unix.InotifyAddWatch(fd, path, events); err != nil {
		_ = watch.Close() // nothing was written
		return nil
	}
	return watch
}
