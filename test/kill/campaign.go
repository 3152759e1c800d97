// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux && amd64

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
)

// campaign kills the plugin at the steps of one call, for one kind of volume.
type campaign struct {
	kind kind
	call rpc
	// all says that the programs of the plugin are killed too.
	all bool
}

// kind is a kind of volume.
type kind struct {
	name   string
	fsType string
	size   int64
	block  bool
	// used says that the volume has data, and grows that its filesystem is smaller than its disk.
	used, grows, readOnly bool
	// unclean says that the filesystem must be checked before it is mounted.
	unclean bool
	// inUse says that a program keeps the disk in use during the killed call, and for a while afterwards: its device or,
	// if copied, a file in a private copy of the mount.
	inUse, copied bool
}

var kinds = struct{ ext4New, ext4Used, ext4InUse, ext4Copied, ext4Grows, ext4Unclean, ext4ReadOnly, xfsNew, xfsUsed, btrfsNew, btrfsUsed, blockNew, blockUsed, blockInUse kind }{
	ext4New:   kind{name: "ext4, blank disk", fsType: "ext4", size: 64 * mib},
	ext4Used:  kind{name: "ext4, with data", fsType: "ext4", size: 64 * mib, used: true},
	ext4InUse: kind{name: "ext4, disk in use", fsType: "ext4", size: 64 * mib, used: true, inUse: true},
	ext4Copied: kind{
		name:   "ext4, copy with a writer",
		fsType: "ext4",
		size:   64 * mib,
		used:   true,
		inUse:  true,
		copied: true,
	},
	ext4Grows:    kind{name: "ext4, to be grown", fsType: "ext4", size: 320 * mib, used: true, grows: true},
	ext4Unclean:  kind{name: "ext4, to be checked", fsType: "ext4", size: 64 * mib, used: true, unclean: true},
	ext4ReadOnly: kind{name: "ext4, read-only", fsType: "ext4", size: 64 * mib, used: true, readOnly: true},
	xfsNew:       kind{name: "xfs, blank disk", fsType: "xfs", size: 320 * mib},
	xfsUsed:      kind{name: "xfs, with data", fsType: "xfs", size: 320 * mib, used: true},
	btrfsNew:     kind{name: "btrfs, blank disk", fsType: "btrfs", size: 160 * mib},
	btrfsUsed:    kind{name: "btrfs, with data", fsType: "btrfs", size: 160 * mib, used: true},
	blockNew:     kind{name: "raw block, blank disk", size: 16 * mib, block: true},
	blockUsed:    kind{name: "raw block, with data", size: 16 * mib, block: true, used: true},
	blockInUse:   kind{name: "raw block, disk in use", size: 16 * mib, block: true, used: true, inUse: true},
}

func campaigns() (all []campaign) {
	for call, of := range map[rpc][]kind{
		stage:     {kinds.ext4New, kinds.ext4Used, kinds.ext4Grows, kinds.ext4Unclean, kinds.xfsNew, kinds.xfsUsed, kinds.btrfsNew, kinds.btrfsUsed, kinds.blockNew, kinds.blockUsed},
		publish:   {kinds.ext4Used, kinds.ext4ReadOnly, kinds.xfsUsed, kinds.blockUsed},
		unpublish: {kinds.ext4Used, kinds.blockUsed},
		unstage:   {kinds.ext4Used, kinds.ext4InUse, kinds.ext4Copied, kinds.xfsUsed, kinds.btrfsUsed, kinds.blockUsed, kinds.blockInUse},
	} {
		for _, kind := range of {
			all = append(all, campaign{kind, call, false}, campaign{kind, call, true})
		}
	}
	slices.SortFunc(all, func(a, b campaign) int { return strings.Compare(a.name(), b.name()) })
	return all
}

func (c campaign) name() string {
	killed := "plugin"
	if c.all {
		killed = "container"
	}
	return fmt.Sprintf("%s, %s, %s", c.call, c.kind.name, killed)
}

// run counts the steps of the call and kills the plugin at each step, or at most of them if most is not 0.
func (c campaign) run(ctx context.Context, r *rig, point, most int) (res result) {
	attempt := func(killAt int) (steps int) {
		l := &life{campaign: c, rig: r, killAt: killAt}
		err := l.run(ctx)
		for again := 0; errors.Is(err, errUnwatched) && again < 2; again++ {
			// Sometimes the kernel does not report a stop, and the plugin stays stopped. A call that always fails is
			// another error.
			fmt.Printf("again, %s, step %d: %v\n", c.name(), killAt, err)
			l = &life{campaign: c, rig: r, killAt: killAt}
			err = l.run(ctx)
		}
		if err != nil {
			res.failures = append(res.failures, fmt.Sprintf("step %d: %v", killAt, err))
		}
		if killAt > 0 && l.steps >= killAt { // the number of steps varies a little
			res.kills++
			res.retries += l.retries
		}
		return l.steps
	}
	if point > 0 {
		res.steps = attempt(point)
		return res
	}
	res.steps = attempt(0)
	for _, step := range spread(res.steps, most) {
		if ctx.Err() != nil {
			res.failures = append(res.failures, ctx.Err().Error())
			return res
		}
		attempt(step)
	}
	return res
}

// spread returns the steps to kill at: all, or most of them at equal distances, including the first and the last.
func spread(steps, most int) (chosen []int) {
	if most <= 0 || steps <= most {
		most = steps
	}
	for i := range most {
		step := 1 + i*(steps-1)/max(most-1, 1)
		chosen = append(chosen, step)
	}
	return chosen
}

// life is the life of one volume with one kill.
type life struct {
	campaign
	rig    *rig
	killAt int

	volume *volume
	// endUse ends the use of a volume that is in use.
	endUse func() error
	// data must be on the volume.
	data []byte
	// steps and retries are for the report.
	steps, retries int
}

func (l *life) run(ctx context.Context) (err error) {
	if l.volume, err = l.rig.newVolume(l.kind.fsType, l.kind.block, l.kind.size); err != nil {
		return err
	}
	l.volume.readOnly = l.kind.readOnly
	defer func() { err = errors.Join(err, l.volume.remove()) }()
	p, err := l.rig.start()
	if err != nil {
		return err
	}
	if err := l.prepare(ctx, p); err != nil {
		return errors.Join(fmt.Errorf("before the kill: %w", err), p.stop())
	}
	if l.kind.inUse {
		if l.endUse, err = l.use(); err != nil {
			return errors.Join(err, p.stop())
		}
		defer func() { _ = l.endUse() }() // if the life ends early
	}
	if err := l.callAndKill(ctx, p); err != nil {
		return err
	}
	log := p.log.String()
	if p, err = l.rig.start(); err != nil {
		return err
	}
	if err := l.recover(ctx, p); err != nil {
		err = fmt.Errorf(
			"%w\n--- the killed plugin:\n%s--- the next one:\n%s",
			err,
			lastLines(log),
			lastLines(p.log.String()),
		)
		return errors.Join(err, p.stop())
	}
	return p.stop()
}

// lastLines returns the last few lines of a log.
func lastLines(log string) string {
	lines := strings.SplitAfter(log, "\n")
	return strings.Join(lines[max(0, len(lines)-6):], "")
}

// use has a program keep the volume in use.
func (l *life) use() (end func() error, err error) {
	if !l.kind.copied {
		holder, err := os.OpenFile(l.volume.node(), os.O_RDWR, 0)
		return holder.Close, err
	}
	program := exec.Command("unshare", "--mount", "--propagation=private",
		"sh", "-c", `exec 3>"$1/other"; echo ready; exec cat >/dev/null`, "sh", l.volume.staging)
	input, err1 := program.StdinPipe()
	output, err2 := program.StdoutPipe()
	if err := errors.Join(err1, err2, program.Start()); err != nil {
		return nil, err
	}
	_, err = output.Read(make([]byte, 1))
	return func() error { return errors.Join(input.Close(), program.Wait()) }, err
}

// prepare brings the volume to the state before the call.
func (l *life) prepare(ctx context.Context, p *plugin) error {
	v := l.volume
	if l.kind.used {
		if l.kind.grows {
			id := mount.FilesystemUUID(uuid.MustParse(v.id)).String()
			if out, err := exec.Command("mkfs.ext4", "-q", "-U", id, v.node(), "64M").CombinedOutput(); err != nil {
				return fmt.Errorf("mkfs: %w: %s", err, out)
			}
		}
		small := l.kind.grows // staging would already grow it
		if err := l.fill(ctx, p, small); err != nil {
			return err
		}
		if l.kind.unclean {
			out, err := exec.Command("debugfs", "-w", "-R", "set_super_value state 0", v.node()).CombinedOutput()
			if err != nil {
				return fmt.Errorf("debugfs: %w: %s", err, out)
			}
		}
	}
	for _, before := range map[rpc][]rpc{stage: {}, publish: {stage}, unpublish: {stage, publish}, unstage: {stage}}[l.call] {
		if err := v.call(ctx, p, before); err != nil {
			return err
		}
	}
	return nil
}

// fill writes data to the volume, through calls to the plugin or by hand.
func (l *life) fill(ctx context.Context, p *plugin, byHand bool) error {
	v := l.volume
	l.data = v.newData()
	if v.block {
		return l.writeDevice(v.node())
	}
	if byHand {
		if err := unix.Mount(v.node(), v.staging, v.fsType, 0, ""); err != nil {
			return err
		}
		return errors.Join(l.write(v.staging), unix.Unmount(v.staging, 0))
	}
	if err := v.call(ctx, p, stage); err != nil {
		return err
	}
	return errors.Join(l.write(v.staging), v.call(ctx, p, unstage))
}

func (l *life) write(folder string) error {
	return os.WriteFile(filepath.Join(folder, "file"), l.data, 0o600)
}

func (l *life) writeDevice(device string) error {
	file, err := os.OpenFile(device, os.O_WRONLY|unix.O_SYNC, 0)
	if err != nil {
		return err
	}
	_, err = file.WriteAt(l.data, 0)
	return errors.Join(err, file.Close())
}

// inUseTime is how long an orchestrator waits for the answer to a call for a disk that is in use.
const inUseTime = 1100 * time.Millisecond

// errUnwatched means that a call failed without a kill.
var errUnwatched = errors.New("the call fails without a kill")

// callAndKill makes the call and kills the plugin at the step, or after the call.
func (l *life) callAndKill(ctx context.Context, p *plugin) error {
	ready, answered := make(chan struct{}), make(chan error, 1)
	go func() {
		<-ready
		if l.kind.inUse { // the call waits until a second before its end
			short, cancel := context.WithTimeout(ctx, inUseTime)
			defer cancel()
			ctx = short
		}
		err := l.volume.call(ctx, p, l.call)
		answered <- errors.Join(err, p.cmd.Process.Kill())
	}()
	var err error
	l.steps, err = trace(p.cmd.Process.Pid, l.killAt, l.all, ready)
	answer := <-answered
	if stopped := p.stop(); err == nil {
		err = stopped
	}
	if err == nil && l.kind.inUse && answer == nil {
		return fmt.Errorf("%s succeeds while the disk is in use", l.call)
	}
	if err == nil && l.killAt == 0 && answer != nil && !l.kind.inUse {
		return fmt.Errorf("%w: %w\n--- the plugin:\n%s", errUnwatched, answer, lastLines(p.log.String()))
	}
	return err
}

// recover makes the orchestrator's next calls, and checks their results.
func (l *life) recover(ctx context.Context, p *plugin) error {
	v := l.volume
	if l.kind.inUse {
		short, cancel := context.WithTimeout(ctx, inUseTime)
		defer cancel()
		if err := v.call(short, p, l.call); err == nil {
			return fmt.Errorf("%s afterwards succeeds while the disk is in use", l.call)
		}
		if err := l.endUse(); err != nil {
			return err
		}
	}
	calls := map[rpc][]rpc{
		stage: {stage, publish, unpublish, unstage}, publish: {publish, unpublish, unstage}, unpublish: {unpublish, unstage}, unstage: {unstage},
	}[l.call]
	if l.killAt%2 == 1 { // the orchestrator gives up and undoes the call
		calls = map[rpc][]rpc{
			stage: {unstage}, publish: {unpublish, unstage}, unpublish: {publish, unpublish, unstage}, unstage: {stage, unstage},
		}[l.call]
	}
	for _, call := range calls {
		if err := l.retry(ctx, p, call); err != nil {
			return fmt.Errorf("%s afterwards: %w", call, err)
		}
	}
	if err := l.checkNothingLeft(); err != nil {
		return err
	}
	// Then the whole life of the volume, as on another node.
	if err := errors.Join(v.unplug(), v.plug()); err != nil {
		return err
	}
	for _, call := range []rpc{stage, publish, unpublish, unstage} {
		if err := l.retry(ctx, p, call); err != nil {
			return fmt.Errorf("%s on the next node: %w", call, err)
		}
	}
	return errors.Join(l.checkNothingLeft(), l.checkNoRecords(), l.checkFilesystem())
}

// checkNoRecords checks that the plugin has forgotten the volume: the record of a format would let mkfs run again.
func (l *life) checkNoRecords() error {
	left, err := filepath.Glob(l.rig.path("state/*/" + l.volume.id))
	left = slices.DeleteFunc(left, func(path string) bool { return filepath.Base(filepath.Dir(path)) == "locks" })
	if err != nil || len(left) > 0 {
		return fmt.Errorf("left in the state folder: %v, %w", left, err)
	}
	return nil
}

// checkFilesystem checks the filesystem as a whole: a lost file need not be the one that is compared.
func (l *life) checkFilesystem() error {
	check, known := map[string][]string{
		"ext4": {"e2fsck", "-f", "-n"}, "xfs": {"xfs_repair", "-n"}, "btrfs": {"btrfs", "check"},
	}[l.kind.fsType]
	if !known {
		return nil
	}
	if out, err := exec.Command(check[0], append(check[1:], l.volume.node())...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s finds damage: %w: %s", check[0], err, out)
	}
	return nil
}

// retryTimeout is how long an orchestrator retries after a kill. A program that outlived the plugin may hold the disk.
const retryTimeout = 20 * time.Second

// retry repeats a call until it succeeds, like an orchestrator, and checks the result.
func (l *life) retry(ctx context.Context, p *plugin, call rpc) error {
	ctx, cancel := context.WithTimeout(ctx, retryTimeout)
	defer cancel()
	for {
		err := l.volume.call(ctx, p, call)
		if err == nil {
			return l.check(call)
		}
		if ctx.Err() != nil {
			return err
		}
		l.retries++
		time.Sleep(50 * time.Millisecond)
	}
}

// check compares the mounts and the volume's data with the promise of the call.
func (l *life) check(call rpc) error {
	v := l.volume
	staged := v.staging
	if v.block {
		staged = filepath.Join(v.staging, v.id)
	}
	table, err := mount.ReadTable()
	if err != nil {
		return err
	}
	count := map[string]int{}
	for _, entry := range table {
		count[entry.Path]++
	}
	wantStaged := map[rpc]int{stage: 1, publish: 1, unpublish: 1, unstage: 0}[call]
	if count[staged] != wantStaged {
		return fmt.Errorf("%d mounts at the staging path, want %d", count[staged], wantStaged)
	}
	switch call {
	case publish:
		if count[v.target] != 1 {
			return fmt.Errorf("%d mounts at the target, want 1", count[v.target])
		}
		return l.readOrWrite()
	case unpublish, unstage:
		if count[v.target] != 0 {
			return fmt.Errorf("%d mounts at the target, want none", count[v.target])
		}
		if _, err := os.Lstat(v.target); call == unpublish && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("the target is still there: %w", err)
		}
	}
	return nil
}

// readOrWrite compares the data at the target with the written data. If there is none yet, it writes it.
func (l *life) readOrWrite() error {
	v := l.volume
	if l.data == nil {
		l.data = v.newData()
		if v.block {
			return l.writeDevice(v.target)
		}
		if info, err := os.Stat(v.target); err != nil || info.Mode().Perm() != 0o770 {
			return fmt.Errorf("the root folder's mode differs from the volume's parameters: %v, %w", info, err)
		}
		return l.write(v.target)
	}
	var found []byte
	var err error
	if v.block {
		found = make([]byte, len(l.data))
		var file *os.File
		if file, err = os.Open(v.target); err == nil {
			_, err = file.ReadAt(found, 0)
			err = errors.Join(err, file.Close())
		}
	} else {
		found, err = os.ReadFile(filepath.Join(v.target, "file"))
	}
	if err != nil {
		return err
	}
	return compare(found, l.data)
}

// compare says where the found data differs first.
func compare(found, want []byte) error {
	if bytes.Equal(found, want) {
		return nil
	}
	at := 0
	for at < min(len(found), len(want)) && found[at] == want[at] {
		at++
	}
	return fmt.Errorf("the volume holds %d bytes, want %d, and they differ from byte %d on", len(found), len(want), at)
}

// checkNothingLeft checks that nothing holds the disk and that no file is left.
func (l *life) checkNothingLeft() error {
	v := l.volume
	end := time.Now().Add(retryTimeout)
	for stillRuns(v.rig.dir + "/") {
		if time.Now().After(end) {
			return errors.New("a program of the killed plugin still runs")
		}
		time.Sleep(20 * time.Millisecond)
	}
	file, err := os.OpenFile(v.node(), os.O_RDONLY|unix.O_EXCL, 0)
	if err != nil {
		return fmt.Errorf("after unstage something holds the disk: %w", err)
	}
	if err := file.Close(); err != nil {
		return err
	}
	if entries, err := os.ReadDir(v.staging); err != nil && !errors.Is(err, os.ErrNotExist) || len(entries) > 0 {
		return fmt.Errorf("left in the staging folder: %v, %w", entries, err)
	}
	return nil
}
