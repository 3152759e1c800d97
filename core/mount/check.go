// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package mount

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/hostexec"
)

const (
	// repairTimeout bounds a check or a growth.
	repairTimeout = 4 * time.Hour
	// maxRepairs is how many checks run at a time. A check needs memory in proportion to the size of its disk.
	maxRepairs = 4
	// hungAfter is the time after which a check no longer counts as one of maxRepairs: its disk may hang for ever.
	hungAfter = 10 * time.Minute
	// failureLife is how long the failure of a check without a caller is kept for the caller's repetition.
	failureLife = 10 * time.Minute
)

// Repairs checks and grows the ext filesystems of this node while they are not mounted.
//
// A check can take longer than an RPC, and a check that is stopped at each RPC's end never finishes. So it goes on
// after its RPC, at most one for each disk, and holds the volume's lock (package volumelock). The RPC answers ABORTED
// before its deadline, and its repetition waits for the check with [Repairs.Wait].
type Repairs struct {
	log *slog.Logger
	// growsMounted says that this process may ask the kernel to grow a mounted ext.
	growsMounted bool
	// run is [hostexec.Run].
	run func(ctx context.Context, name string, args ...string) (hostexec.Result, error)

	mu sync.Mutex
	// running has the repairs that run, and those that failed without a caller, by the volume's ID.
	running map[uuid.UUID]*repair
	// notGrown has the filesystems that could not grow before their mount, by the volume's ID, until Grow says so.
	notGrown map[uuid.UUID]error
}

// repair is a check or a growth in a goroutine of its own.
type repair struct {
	dev     device.Device
	started time.Time
	// done is closed at the end. The fields below are valid afterwards.
	done     chan struct{}
	ended    time.Time
	err      error
	panicked any
}

// NewRepairs returns a Repairs without running checks.
func NewRepairs(log *slog.Logger) *Repairs {
	return &Repairs{
		log: log, growsMounted: mayGrowMounted(), run: hostexec.Run,
		running: map[uuid.UUID]*repair{}, notGrown: map[uuid.UUID]error{},
	}
}

// Mount mounts the device's filesystem at the folder target, see [Filesystem]. Before a writable mount of ext3 or ext4
// it reads the superblock, and runs e2fsck -p if the filesystem is not clean. The kernel checks nothing before it
// mounts: without a journal, or with errors, it overwrites files. xfs and btrfs keep their metadata consistent by
// themselves.
//
// The errors are those of [Filesystem], [ErrDamaged] if e2fsck does not repair the filesystem without asking, and
// [ErrChecking] if the check still runs at the end of ctx. Repeat the call then.
func (r *Repairs) Mount(
	ctx context.Context,
	dev device.Device,
	volumeID uuid.UUID,
	target, fsType string,
	options Options,
) error {
	if !options.ReadOnly() {
		if err := r.prepare(ctx, dev, volumeID, fsType, options); err != nil {
			return err
		}
	}
	if isExt(fsType) {
		state, err := device.ReadExtState(dev)
		if err != nil {
			return err
		}
		options.neverPanic = state.PanicsOnError
	}
	err := Filesystem(ctx, dev, target, fsType, options)
	if !errors.Is(err, ErrDamaged) || options.ReadOnly() {
		return err
	}
	if !isExt(fsType) {
		byHand := map[string]string{"xfs": "xfs_repair", "btrfs": "btrfs check"}
		return fmt.Errorf("%w: restore a snapshot, or check the disk with %s on the node", err, byHand[fsType])
	}
	if err := r.check(ctx, dev, volumeID, "the kernel refuses it as damaged"); err != nil {
		return err
	}
	return Filesystem(ctx, dev, target, fsType, options)
}

// prepare makes sure that the filesystem fits the disk and can be mounted writable.
func (r *Repairs) prepare(
	ctx context.Context,
	dev device.Device,
	volumeID uuid.UUID,
	fsType string,
	options Options,
) error {
	if !isExt(fsType) {
		_, err := needsGrowth(dev, fsType)
		return err
	}
	grows, err := needsGrowth(dev, fsType)
	if err != nil {
		return err
	}
	state, err := device.ReadExtState(dev)
	if err != nil {
		return err
	}
	if state.Unclean != "" {
		if err := r.check(ctx, dev, volumeID, state.Unclean); err != nil {
			return err
		}
	}
	why := r.whyNotMounted(state)
	if !grows || why == nil || options.KeepSize {
		return nil
	}
	if err = checkGrowthIsSafe(dev, why); err == nil {
		err = r.growUnmounted(ctx, dev, volumeID, why)
	}
	if !errors.Is(err, ErrGrow) {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.notGrown[volumeID] = err
	return nil
}

// check runs e2fsck -p.
func (r *Repairs) check(ctx context.Context, dev device.Device, volumeID uuid.UUID, reason string) error {
	return r.do(ctx, dev, volumeID, func(ctx context.Context) error {
		r.log.Info("checking a filesystem", "volume_id", volumeID.String(), "device", dev.String(), "reason", reason)
		return r.preen(ctx, dev, volumeID)
	})
}

// preen runs e2fsck -p, which repairs what it can repair without loss of data. Before that the kernel replays the
// journal, see [replayJournal]. A marker is on the disk until e2fsck has ended by itself, see [device.Checking].
func (r *Repairs) preen(ctx context.Context, dev device.Device, volumeID uuid.UUID, flags ...string) error {
	state, err := device.ReadExtState(dev)
	if err != nil {
		return err
	}
	if err := replayJournal(ctx, dev); err != nil {
		return err
	}
	if state.Replay && state.FastCommit {
		flags = append(flags, "-f") // the kernel's replay of fast commits leaves wrong counts of blocks
	}
	whole, err := device.ExtChecksumValid(dev)
	if err == nil && whole {
		err = device.WriteWorkMarker(dev, volumeID, device.Checking)
	}
	if errors.Is(err, device.ErrOccupied) {
		r.log.Warn("the check must not be interrupted: there is no room on the disk to mark it",
			"volume_id", volumeID.String(), "device", dev.String(), "because", err)
	} else if err != nil {
		return err
	}
	err = r.e2fsck(ctx, dev, append(flags, "-p")...)
	if errors.Is(err, errKilled) || ctx.Err() != nil {
		return err
	}
	// If a write of one piece of the superblock fails, e2fsck ends with 8, or even with 0.
	if marked, err := device.InterruptedWork(dev); err != nil || marked != device.NoWork {
		if whole, err := device.ExtChecksumValid(dev); err != nil || !whole {
			return errors.Join(
				fmt.Errorf("%w: e2fsck has not written the superblock of %s as a whole: try again", ErrMount, dev), err)
		}
	}
	return errors.Join(err, device.RemoveWorkMarker(dev))
}

// errKilled means that a signal has ended e2fsck.
var errKilled = errors.New("e2fsck was killed")

// Wait waits until no check of the disk runs. At the end of ctx it returns [ErrChecking].
func (r *Repairs) Wait(ctx context.Context, volumeID uuid.UUID) error {
	r.mu.Lock()
	running := r.running[volumeID]
	r.mu.Unlock()
	if running == nil {
		return nil
	}
	return running.wait(ctx)
}

// do runs work in a goroutine that outlives ctx, and waits for its result. If a repair of the disk failed after its
// caller had left, do returns that failure instead, once. A repair that succeeded has changed the superblock, which
// tells the next caller.
func (r *Repairs) do(
	ctx context.Context,
	dev device.Device,
	volumeID uuid.UUID,
	work func(context.Context) error,
) error {
	current, err := r.startOrJoin(ctx, dev, volumeID, work)
	if err != nil {
		return err
	}
	if err := current.wait(ctx); err != nil {
		return err
	}
	r.mu.Lock()
	if r.running[volumeID] == current {
		delete(r.running, volumeID)
	}
	r.mu.Unlock()
	if current.panicked != nil {
		panic(current.panicked) // in the RPC's goroutine, where the interceptor recovers it
	}
	return current.err
}

// Finish waits for the checks and growths that outlive their RPCs. Call it when no call can start another one. It does
// not wait for one that hangs.
func (r *Repairs) Finish() {
	r.mu.Lock()
	running := slices.Collect(maps.Values(r.running))
	r.mu.Unlock()
	for _, one := range running {
		select {
		case <-one.done:
		case <-time.After(time.Until(one.started.Add(hungAfter))):
		}
	}
}

// startOrJoin starts a repair, or returns the one of the disk that runs or has failed. While too many repairs of other
// disks run, it waits.
func (r *Repairs) startOrJoin(
	ctx context.Context, dev device.Device, volumeID uuid.UUID, work func(context.Context) error,
) (*repair, error) {
	const interval = 20 * time.Millisecond
	ctx, cancel := beforeAnswer(ctx)
	defer cancel()
	for {
		r.mu.Lock()
		current := r.running[volumeID]
		if current != nil && !current.forgotten() {
			r.mu.Unlock()
			return current, nil
		}
		if r.countLocked() < maxRepairs {
			defer r.mu.Unlock()
			return r.startLocked(ctx, dev, volumeID, work)
		}
		r.mu.Unlock()
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("%w: %s: %d other disks are being checked: try again", ErrChecking, dev, maxRepairs)
		case <-time.After(interval):
		}
	}
}

// countLocked counts the repairs that run and do not hang.
func (r *Repairs) countLocked() (count int) {
	for _, other := range r.running {
		if other.isRunning() && time.Since(other.started) < hungAfter {
			count++
		}
	}
	return count
}

func (r *Repairs) startLocked(
	ctx context.Context, dev device.Device, volumeID uuid.UUID, work func(context.Context) error,
) (*repair, error) {
	outliving, release, err := hostexec.Outlive(ctx)
	if err != nil {
		return nil, err
	}
	started := &repair{dev: dev, started: time.Now(), done: make(chan struct{})}
	r.running[volumeID] = started
	go func() {
		ctx, cancel := context.WithTimeout(outliving, repairTimeout)
		defer func() {
			started.panicked = recover()
			cancel()
			release()
			r.mu.Lock()
			defer r.mu.Unlock()
			started.ended = time.Now()
			if started.err == nil && started.panicked == nil {
				delete(r.running, volumeID)
			}
			close(started.done)
		}()
		started.err = work(ctx)
	}()
	return started, nil
}

func (c *repair) isRunning() bool {
	select {
	case <-c.done:
		return false
	default:
		return true
	}
}

// forgotten reports whether the repair failed too long ago to answer a repetition.
func (c *repair) forgotten() bool { return !c.isRunning() && time.Since(c.ended) > failureLife }

// wait waits for the end of the repair.
func (c *repair) wait(ctx context.Context) error {
	ctx, cancel := beforeAnswer(ctx)
	defer cancel()
	select {
	case <-c.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%w: %s: for %s until now: try again", ErrChecking, c.dev, time.Since(c.started).Round(time.Second))
	}
}

// beforeAnswer returns a context that ends a moment before ctx, so that the caller can answer.
func beforeAnswer(ctx context.Context) (context.Context, context.CancelFunc) {
	deadline, ok := ctx.Deadline()
	if !ok {
		return context.WithCancel(ctx)
	}
	return context.WithDeadline(ctx, deadline.Add(-answerReserve))
}

// Exit codes of e2fsck: up to e2fsckFixed, the filesystem is clean now. TestFsyncedFilesOutliveAPowerCut shows that
// nothing synced is lost then. With the bit e2fsckErrorsLeft, it is not clean. With the bit e2fsckCancelled, e2fsck has
// ended by a signal.
const (
	e2fsckFixed      = 1
	e2fsckErrorsLeft = 4
	e2fsckCancelled  = 32
)

// journalDropped matches what e2fsck says about a journal that it could not replay. It drops such a journal, repairs
// what is left, and ends with e2fsckFixed, although synced files are lost.
var journalDropped = regexp.MustCompile(`while recovering journal|Journal (checksum error|corrupted)`)

// e2fsck repairs an unmounted ext filesystem: with -p as far as that loses no data, with -y in any case. It returns
// [ErrDamaged] if errors remain. The output of e2fsck can be long, and goes to the log.
func (r *Repairs) e2fsck(ctx context.Context, dev device.Device, flags ...string) error {
	start := time.Now()
	result, err := r.run(ctx, "e2fsck", append(flags, dev.Path)...)
	if err != nil {
		return fmt.Errorf("check of %s: %w", dev, err)
	}
	if result.ExitCode < 0 || result.ExitCode&e2fsckCancelled != 0 {
		return fmt.Errorf("%w: %w: %s: try again", ErrMount, errKilled, dev)
	}
	if result.ExitCode != 0 {
		r.log.Warn("e2fsck found errors", "device", dev.String(), "flags", strings.Join(flags, " "),
			"exit_code", result.ExitCode, "took", time.Since(start), "output", result.Message())
	}
	switch code := result.ExitCode; {
	case code <= e2fsckFixed && journalDropped.MatchString(result.Message()):
		return fmt.Errorf("%w: e2fsck could not replay the journal of %s, and has dropped it: restore a snapshot", ErrDamaged,
			dev)
	case code <= e2fsckFixed:
		return nil
	case code&e2fsckErrorsLeft != 0:
		return fmt.Errorf(
			"%w: e2fsck %s does not repair it (exit code %d): run e2fsck -f %s on the node, or restore a snapshot", ErrDamaged,
			strings.Join(flags, " "), code, dev.Path)
	}
	// e2fsck found the disk in use, for example: the state of the filesystem is unknown.
	return fmt.Errorf("%w: e2fsck on %s: exit code %d: %s", ErrMount, dev, result.ExitCode, result.Message())
}
