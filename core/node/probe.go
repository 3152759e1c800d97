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

// probeTimeout is how long a disk or a filesystem is waited for.
const probeTimeout = 2 * time.Second

// probes asks disks and filesystems that may never answer. Whoever asks the kernel for a disk that hangs stays there, and
// cannot be called back; so there is at most one question under way for each disk, and who asks in the meantime shares it.
type probes struct {
	mu      sync.Mutex
	running map[device.Number]*probe
}

// probe is what a disk and the filesystem on it have answered.
type probe struct {
	done chan struct{}
	// filesystem is the UUID of the filesystem on the disk, empty where there is none or it is not known.
	filesystem string
	// silent says that there was no answer in time, disk and root what reading the disk, and then the root folder, gave.
	timedOut         bool
	diskErr, rootErr error
	// panicked is what asking has panicked with.
	panicked any
}

// run asks a disk, and the filesystem whose root folder is given if any, for at most 2 s.
func (p *probes) run(ctx context.Context, dev device.Device, root string) probe {
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
			started.ask(dev, root)
		}()
	}
	p.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	select {
	case <-started.done:
		if started.panicked != nil {
			panic(started.panicked) // where it ends one RPC only
		}
		return *started
	case <-ctx.Done():
		return probe{timedOut: true}
	}
}

// ask does not open the filesystem of a disk that does not answer: that would keep it from being unmounted. The superblock
// of one that answers with errors may still be in the kernel's cache.
func (p *probe) ask(dev device.Device, root string) {
	p.diskErr = dev.CheckResponds()
	p.filesystem, _ = dev.FilesystemUUID() // where it cannot be read, it is not known
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
