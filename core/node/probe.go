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

// probeTime is how long a disk or a filesystem is waited for.
const probeTime = 2 * time.Second

// probes asks disks and filesystems that may never answer. Whoever asks the kernel for a disk that hangs stays there, and
// cannot be called back; so there is at most one question under way for each disk, and who asks in the meantime shares it.
type probes struct {
	mu       sync.Mutex
	underway map[device.Number]*probe
}

// probe is what a disk and the filesystem on it have answered.
type probe struct {
	done chan struct{}
	// filesystem is the UUID of the filesystem on the disk, empty where there is none or it is not known.
	filesystem string
	// silent says that there was no answer in time, disk and root what reading the disk, and then the root folder, gave.
	silent     bool
	disk, root error
	// panicked is what asking has panicked with.
	panicked any
}

// look asks a disk, and the filesystem whose root folder is given if any, for at most 2 s.
func (p *probes) look(ctx context.Context, dev device.Device, root string) probe {
	p.mu.Lock()
	asked := p.underway[dev.Number]
	if asked == nil {
		asked = &probe{done: make(chan struct{})}
		if p.underway == nil {
			p.underway = map[device.Number]*probe{}
		}
		p.underway[dev.Number] = asked
		go func() {
			defer func() {
				asked.panicked = recover()
				p.mu.Lock()
				defer p.mu.Unlock()
				delete(p.underway, dev.Number)
				close(asked.done)
			}()
			asked.ask(dev, root)
		}()
	}
	p.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, probeTime)
	defer cancel()
	select {
	case <-asked.done:
		if asked.panicked != nil {
			panic(asked.panicked) // where it ends one RPC only
		}
		return *asked
	case <-ctx.Done():
		return probe{silent: true}
	}
}

// ask does not open the filesystem of a disk that does not answer: that would keep it from being unmounted. The superblock
// of one that answers with errors may still be in the kernel's cache.
func (p *probe) ask(dev device.Device, root string) {
	p.disk = dev.Answers()
	p.filesystem, _ = dev.FilesystemUUID() // where it cannot be read, it is not known
	if p.disk != nil || root == "" {
		return
	}
	folder, err := os.Open(root)
	if err == nil {
		_, err = folder.ReadDir(1)
		err = errors.Join(err, folder.Close())
	}
	if !errors.Is(err, io.EOF) {
		p.root = err
	}
}
