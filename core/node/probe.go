// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package node

import (
	"context"
	"errors"
	"io"
	"os"
	"sync"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
)

// probeTimeout is how long the service waits for the answer of a disk or a filesystem.
const probeTimeout = 2 * time.Second

// probes reads disks and filesystems that may never answer. A child process reads the disk first, because a read from a
// disk that hangs cannot be cancelled. The disk can stop answering after that, and then the probe hangs in this
// process. So at most one probe runs for each disk, and other callers wait for the same probe.
type probes struct {
	mu      sync.Mutex
	running map[device.Number]*probe
}

// probe is the answer of a disk and of its filesystem.
type probe struct {
	done chan struct{}
	// filesystem is the UUID of the disk's filesystem. It is empty if there is none or it is unknown.
	filesystem string
	// timedOut says that there was no answer in time. diskErr is the result of reading the disk, and rootErr of reading
	// the root folder.
	timedOut         bool
	diskErr, rootErr error
	// panicked is the value of a panic in the probe.
	panicked any
}

// run probes a disk, and the filesystem whose root folder is root unless root is empty. It waits for 2 s at most.
func (p *probes) run(ctx context.Context, disks *device.ChildReader, dev device.Device, root string) probe {
	p.mu.Lock()
	started := p.running[dev.Number]
	if started == nil {
		started = &probe{done: make(chan struct{})}
		if p.running == nil {
			p.running = map[device.Number]*probe{}
		}
		p.running[dev.Number] = started
		go func() {
			defer func() {
				started.panicked = recover()
				p.mu.Lock()
				defer p.mu.Unlock()
				delete(p.running, dev.Number)
				close(started.done)
			}()
			started.ask(disks, dev, root)
		}()
	}
	p.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	select {
	case <-started.done:
		if started.panicked != nil {
			panic(started.panicked) // in the RPC's goroutine, where the interceptor recovers it
		}
		return *started
	case <-ctx.Done():
		return probe{timedOut: true}
	}
}

// ask reads the disk and then the root folder. It does not open the filesystem of a disk with errors, because an open
// folder prevents the unmount. The superblock of such a disk may still be in the kernel's cache.
func (p *probe) ask(disks *device.ChildReader, dev device.Device, root string) {
	ctx, cancel := context.WithTimeout(context.Background(), probeTimeout)
	defer cancel()
	p.diskErr = disks.CheckResponds(ctx, dev)
	if p.timedOut = errors.Is(p.diskErr, device.ErrNoAnswer); p.timedOut {
		return
	}
	p.filesystem, _ = dev.FilesystemUUID() // an unreadable UUID counts as unknown
	if p.diskErr != nil || root == "" {
		return
	}
	folder, err := os.Open(root)
	if err == nil {
		_, err = folder.ReadDir(1)
		err = errors.Join(err, folder.Close())
	}
	if !errors.Is(err, io.EOF) {
		p.rootErr = err
	}
}
