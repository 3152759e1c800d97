// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package device

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/hostexec"
)

// A read of a disk that does not answer waits in the kernel, and no signal ends it. A process with such a read does not
// end either, and keeps its socket and its locks. So the plugin lets a child process read first ([ChildReader]). It can
// leave a child behind.

// DefaultAnswerTimeout is how long a [ChildReader] waits for a disk unless it has another timeout.
const DefaultAnswerTimeout = 5 * time.Second

// blockBytes is the length of a read of [ChildReader]: the largest logical block size of a rack's disks, and a multiple
// of the others.
const blockBytes = 4 * kib

// ChildReader reads disks in child processes. At most one child at a time reads a disk. The zero value is ready to use.
type ChildReader struct {
	// Timeout bounds a read. Zero means [DefaultAnswerTimeout].
	Timeout time.Duration

	mu       sync.Mutex
	children map[Number]*child
}

// child is a child process that reads a disk.
type child struct {
	disk Device
	// returned is closed when the child has ended, or was left behind.
	returned chan struct{}
	// leftBehind is nil, or it is closed when a child that was left behind has ended.
	leftBehind <-chan struct{}
}

// CheckResponds reads the first block from the disk, not from the kernel's cache. It returns [ErrNoAnswer] if the disk
// has not answered in time, and at once if the child of an earlier read still waits for the disk. It returns
// [ErrUnreadable] if the read failed.
func (r *ChildReader) CheckResponds(ctx context.Context, dev Device) error {
	_, err := r.readBlock(ctx, dev, 0)
	return err
}

// Hanging returns the disks that have not answered a child, and still do not answer it.
func (r *ChildReader) Hanging() (disks []Device) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range r.children {
		if c.leftBehind != nil && !closed(c.leftBehind) {
			disks = append(disks, c.disk)
		}
	}
	slices.SortFunc(disks, func(a, b Device) int { return strings.Compare(a.Path, b.Path) })
	return disks
}

// readBlock reads one block of [blockBytes] from a disk or a partition, at this number of blocks from its beginning.
func (r *ChildReader) readBlock(ctx context.Context, dev Device, index int) (content string, err error) {
	timeout := r.Timeout
	if timeout == 0 {
		timeout = DefaultAnswerTimeout
	}
	// A child that is left behind must not keep the volume's lock: a repeated RPC must be able to say what hangs.
	ctx, cancel := context.WithTimeout(hostexec.WithInherited(ctx, nil), timeout)
	defer cancel()
	start := time.Now()
	c, err := r.enter(ctx, dev)
	if err != nil {
		return "", err
	}
	result, err := hostexec.Run(ctx, "dd", "if="+dev.Path, "iflag=direct", "bs="+strconv.Itoa(blockBytes),
		"skip="+strconv.Itoa(index), "count=1", "status=none")
	r.leave(c, err)
	switch {
	case ctx.Err() != nil && err != nil:
		return "", fmt.Errorf("%w within %s: %s: %s", ErrNoAnswer, time.Since(start).Round(time.Second), dev, noAnswerHint)
	case err != nil:
		return "", err
	case result.ExitCode == 0 && result.Stdout != "":
		return result.Stdout, nil
	case strings.Contains(strings.ToLower(result.Message()), unix.EIO.Error()):
		return "", fmt.Errorf("%w: %s: %w", ErrUnreadable, dev, unix.EIO)
	}
	return "", fmt.Errorf("%w: %s: %s", ErrUnreadable, dev, result.Message())
}

// noAnswerHint is the next step for an operator.
const noAnswerHint = "read the kernel's log on the node; if the disk stays silent, stop and start the instance"

// enter waits until no other child reads the disk.
func (r *ChildReader) enter(ctx context.Context, dev Device) (*child, error) {
	for {
		r.mu.Lock()
		other := r.children[dev.Number]
		if other == nil || other.leftBehind != nil && closed(other.leftBehind) {
			c := &child{disk: dev, returned: make(chan struct{})}
			if r.children == nil {
				r.children = map[Number]*child{}
			}
			r.children[dev.Number] = c
			r.mu.Unlock()
			return c, nil
		}
		hangs := other.leftBehind != nil
		r.mu.Unlock()
		if hangs {
			return nil, fmt.Errorf("%w: %s, and an earlier read still waits for it: %s", ErrNoAnswer, dev, noAnswerHint)
		}
		select {
		case <-other.returned:
		case <-ctx.Done():
			return nil, fmt.Errorf("%w: %s: another read waits for it: %s", ErrNoAnswer, dev, noAnswerHint)
		}
	}
}

// leave ends the turn of a child. A child that was left behind keeps others from starting.
func (r *ChildReader) leave(c *child, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var left *hostexec.LeftBehindError
	if errors.As(err, &left) {
		c.leftBehind = left.Ended
	} else {
		delete(r.children, c.disk.Number)
	}
	close(c.returned)
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
