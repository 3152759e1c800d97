#!/usr/bin/env bash
# Linux forgets the cached pages of a block device at its last close, and those of a file not.
#
# Version: Linux 6.18; golang.org/x/sys v0.50.0. Needs root, losetup and a free loop device.
# Guess:   a disk is cached like a file: what one program has read is in memory for the next one. A page that a pipe
#          refers to stays in the cache as long as the pipe does.
# Seen:    the page of a file is still cached after the last close. That of a disk is gone, also if a pipe refers to it;
#          it stays if somebody else has the disk open. POSIX_FADV_DONTNEED spares a page that a pipe refers to, and a
#          direct write to the page does not.
# Why:     the last close of a block device empties its mapping without a look at who uses the pages (kill_bdev), as a
#          direct write does with its range. Reclaim and fadvise do look. A program that opens and closes a disk each
#          time reads it from the disk each time.
set -euo pipefail
dir=$(mktemp -d)
loop=
trap '[ -z "$loop" ] || losetup --detach "$loop"; rm -rf "$dir"' EXIT
cd "$dir"
cat >go.mod <<'END'
module finding

go 1.26

require golang.org/x/sys v0.50.0
END
cat >main.go <<'END'
package main

import (
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

const page = 4096

func main() {
	file, disk := os.Args[1], os.Args[2]
	for _, name := range []string{"file", "disk", "disk that is open elsewhere"} {
		path := file
		if name != "file" {
			path = disk
		}
		if name == "disk that is open elsewhere" {
			defer unix.Close(open(disk, unix.O_RDONLY))
		}
		fd := open(path, unix.O_RDONLY)
		pipe := pin(fd)
		check(unix.Close(fd))
		fd = open(path, unix.O_RDONLY)
		fmt.Println(name, "closed and opened: cached", cached(fd))
		check(unix.Close(fd))
		check(unix.Close(pipe[0]))
		check(unix.Close(pipe[1]))
	}
	fd := open(disk, unix.O_RDWR|unix.O_DIRECT)
	reader := open(disk, unix.O_RDONLY)
	pin(reader)
	check(unix.Fadvise(reader, 0, 0, unix.FADV_DONTNEED))
	fmt.Println("after fadvise: cached", cached(reader))
	memory, err := unix.Mmap(-1, 0, page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	check(err)
	_, err = unix.Pwrite(fd, memory, 0)
	check(err)
	fmt.Println("after a direct write: cached", cached(reader))
}

func open(path string, flags int) int {
	fd, err := unix.Open(path, flags, 0)
	check(err)
	return fd
}

// pin reads the first page, and makes a pipe refer to it.
func pin(fd int) [2]int {
	var pipe [2]int
	check(unix.Pipe(pipe[:]))
	offset := int64(0)
	_, err := unix.Splice(fd, &offset, pipe[1], nil, page, 0)
	check(err)
	return pipe
}

func cached(fd int) bool {
	memory, err := unix.Mmap(fd, 0, page, unix.PROT_READ, unix.MAP_SHARED)
	check(err)
	defer unix.Munmap(memory)
	var state byte
	_, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&memory[0])), page, uintptr(unsafe.Pointer(&state)))
	if errno != 0 {
		panic(errno)
	}
	return state&1 != 0
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
END
truncate --size=16M file image
head --bytes=4096 /dev/zero >>file
loop=$(losetup --find --show image)
GOFLAGS=-mod=mod go build -o finding . 2>log || { cat log >&2; exit 1; }
./finding file "$loop" >output
diff - output <<'END' || { echo "changed: see above" >&2; exit 1; }
file closed and opened: cached true
disk closed and opened: cached false
disk that is open elsewhere closed and opened: cached true
after fadvise: cached true
after a direct write: cached false
END
echo "still so: the last close of a disk drops its pages"
