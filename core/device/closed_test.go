// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package device_test

import (
	"errors"
	"os"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/device/devicetest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
)

// IsClosed sees each opener, also those that no process shows.
func TestIsClosed(t *testing.T) {
	t.Parallel()
	for name, open := range map[string]func(t *testing.T, d *devicetest.Disk) (end func()){
		"for reading": func(t *testing.T, d *devicetest.Disk) func() {
			return devicetest.Hold(t, "exec 3<"+d.Loop).End
		},
		"for writing": func(t *testing.T, d *devicetest.Disk) func() {
			return devicetest.Hold(t, "exec 3>"+d.Loop).End
		},
		"in another mount namespace": func(t *testing.T, d *devicetest.Disk) func() {
			return devicetest.HoldMountNamespace(t, "/nowhere", "exec 3<>"+d.Loop).End
		},
		"by a thread": func(t *testing.T, d *devicetest.Disk) func() {
			return devicetest.HoldWithoutMainThread(t, d.Loop).End
		},
		"by a mapping": func(t *testing.T, d *devicetest.Disk) func() {
			return devicetest.HoldMapping(t, d.Loop).End
		},
		"by a loop device": func(t *testing.T, d *devicetest.Disk) func() {
			loop := strings.TrimSpace(devicetest.Run(t, "losetup", "--find", "--show", d.Loop))
			return func() { devicetest.Run(t, "losetup", "--detach", loop) }
		},
		"by a partition": func(t *testing.T, d *devicetest.Disk) func() {
			devicetest.AddPartition(t, d.Loop, 1<<20, 2<<20)
			holder := devicetest.Hold(t, "exec 3<>"+d.Loop+"p1")
			return func() {
				holder.End()
				devicetest.DeletePartition(t, d.Loop)
			}
		},
		"by a file in a socket": func(t *testing.T, d *devicetest.Disk) func() {
			pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
			must(t, err)
			file, err := os.OpenFile(d.Loop, os.O_RDWR, 0)
			must(t, err)
			must(t, unix.Sendmsg(pair[0], []byte{0}, unix.UnixRights(int(file.Fd())), nil, 0))
			must(t, file.Close())
			return func() { must(t, errors.Join(unix.Close(pair[0]), unix.Close(pair[1]))) }
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, blockSize := range []uint32{512, 4096} {
				g := devicetest.New(t)
				g.BlockSize = blockSize
				d := g.Add(diskName, 16*mib)
				dev, err := g.Roots().ByNumber(d.Number)
				must(t, err)
				closed := func() bool { return looksClosed(t, dev) }
				// Other programs open each loop device for a moment.
				await.Eventually(t, "it is closed before", closed)
				end := sync.OnceFunc(open(t, d))
				t.Cleanup(end)
				for range 100 {
					if closed() {
						t.Fatalf("open %s, blocks of %d bytes: it looks closed", name, blockSize)
					}
				}
				end()
				await.Eventually(t, "it is closed afterwards", closed)
			}
		})
	}
}

func TestIsClosedErrors(t *testing.T) {
	t.Parallel()
	g := devicetest.New(t)
	d := g.Add(diskName, 16*mib)
	dev, err := g.Roots().ByNumber(d.Number)
	must(t, err)
	sequence, err := dev.Sequence()
	must(t, err)
	if closed, err := dev.IsClosed(sequence + 1); closed || !device.HasLeft(err) {
		t.Errorf("another disk: %t, %v", closed, err)
	}
	held, err := os.OpenFile(d.Loop, os.O_RDONLY|unix.O_EXCL, 0)
	must(t, err)
	if closed, err := dev.IsClosed(sequence); closed || !errors.Is(err, device.ErrInUse) {
		t.Errorf("held exclusively: %t, %v", closed, err)
	}
	must(t, held.Close())
	await.Eventually(t, "the same disk is closed", func() bool { return looksClosed(t, dev) })
}

// looksClosed returns the answer of IsClosed. A program that another test is just starting has this process's open
// files until it runs: then the disk is in use. The plugin waits for the programs that it starts, package hostexec.
func looksClosed(t *testing.T, dev device.Device) bool {
	t.Helper()
	closed, err := dev.IsClosed(0)
	if !errors.Is(err, device.ErrInUse) {
		must(t, err)
	}
	return closed
}

// A disk that is open does not look closed when its pages are dropped for another reason.
func TestIsClosedWhilePagesAreDropped(t *testing.T) {
	t.Parallel()
	const page = 4096
	for name, drop := range map[string]func(file *os.File, memory []byte) error{
		"by the kernel, which needs memory": func(file *os.File, _ []byte) error {
			return unix.Fadvise(int(file.Fd()), 0, 0, unix.FADV_DONTNEED)
		},
		"by writes past the page cache": func(file *os.File, memory []byte) error {
			_, err := file.WriteAt(memory, 0)
			return err
		},
		"by discards": func(file *os.File, _ []byte) error {
			return unix.Fallocate(int(file.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, page)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := devicetest.New(t)
			d := g.Add(diskName, 16*mib)
			dev, err := g.Roots().ByNumber(d.Number)
			must(t, err)
			file, err := os.OpenFile(d.Loop, os.O_RDWR|unix.O_DIRECT, 0)
			must(t, err)
			memory, err := unix.Mmap(-1, 0, page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
			must(t, err) // aligned, as O_DIRECT demands
			must(t, drop(file, memory))
			end, ended := make(chan struct{}), make(chan error)
			go func() {
				for {
					select {
					case <-end:
						ended <- errors.Join(file.Close(), unix.Munmap(memory))
						return
					default:
						_ = drop(file, memory) // a failure only spares the pages
					}
				}
			}()
			for range 5000 {
				if looksClosed(t, dev) {
					t.Error("it looks closed")
					break
				}
			}
			close(end)
			must(t, <-ended)
		})
	}
}
