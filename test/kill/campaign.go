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
	all  bool
}

// kind is a kind of volume.
type kind struct {
	name   string
	fsType string
	size   int64
	block  bool
	// used says that the volume has data on it; grows, that its filesystem is smaller than its disk.
	used, grows, readOnly bool
}

var kinds = struct{ ext4New, ext4Used, ext4Grows, ext4ReadOnly, xfsNew, xfsUsed, btrfsNew, btrfsUsed, blockNew, blockUsed kind }{
	ext4New:      kind{name: "ext4, blank disk", fsType: "ext4", size: 64 * mib},
	ext4Used:     kind{name: "ext4, with data", fsType: "ext4", size: 64 * mib, used: true},
	ext4Grows:    kind{name: "ext4, to be grown", fsType: "ext4", size: 320 * mib, used: true, grows: true},
	ext4ReadOnly: kind{name: "ext4, read-only", fsType: "ext4", size: 64 * mib, used: true, readOnly: true},
	xfsNew:       kind{name: "xfs, blank disk", fsType: "xfs", size: 320 * mib},
	xfsUsed:      kind{name: "xfs, with data", fsType: "xfs", size: 320 * mib, used: true},
	btrfsNew:     kind{name: "btrfs, blank disk", fsType: "btrfs", size: 160 * mib},
	btrfsUsed:    kind{name: "btrfs, with data", fsType: "btrfs", size: 160 * mib, used: true},
	blockNew:     kind{name: "raw block, blank disk", size: 16 * mib, block: true},
	blockUsed:    kind{name: "raw block, with data", size: 16 * mib, block: true, used: true},
}

func campaigns() (all []campaign) {
	for call, of := range map[rpc][]kind{
		stage:     {kinds.ext4New, kinds.ext4Used, kinds.ext4Grows, kinds.xfsNew, kinds.xfsUsed, kinds.btrfsNew, kinds.btrfsUsed, kinds.blockNew, kinds.blockUsed},
		publish:   {kinds.ext4Used, kinds.ext4ReadOnly, kinds.xfsUsed, kinds.blockUsed},
		unpublish: {kinds.ext4Used, kinds.blockUsed},
		unstage:   {kinds.ext4Used, kinds.xfsUsed, kinds.btrfsUsed, kinds.blockUsed},
	} {
		for _, kind := range of {
			all = append(all, campaign{kind, call, false}, campaign{kind, call, true})
		}
	}
	slices.SortFunc(all, func(a, b campaign) int { return strings.Compare(a.name(), b.name()) })
	return all
}

func (c campaign) name() string {
	who := "plugin"
	if c.all {
		who = "container"
	}
	return fmt.Sprintf("%s, %s, %s", c.call, c.kind.name, who)
}

// run counts the steps of the call and kills the plugin at each of them, or at as many as there may be.
func (c campaign) run(ctx context.Context, r *rig, point, most int) (res result) {
	attempt := func(killAt int) (steps int) {
		o := &ordeal{campaign: c, rig: r, killAt: killAt}
		err := o.run(ctx)
		for again := 0; errors.Is(err, errUnwatched) && again < 2; again++ {
			// Now and then the kernel does not tell of a stop, and the plugin stays in it. A call that cannot be made at all is no such thing.
			fmt.Printf("again, %s, step %d: %v\n", c.name(), killAt, err)
			o = &ordeal{campaign: c, rig: r, killAt: killAt}
			err = o.run(ctx)
		}
		if err != nil {
			res.failures = append(res.failures, fmt.Sprintf("step %d: %v", killAt, err))
		}
		if killAt > 0 && o.steps >= killAt { // it takes a step less now and then
			res.kills++
			res.retries += o.retries
		}
		return o.steps
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

// spread are the steps to kill at: all, or as many as wanted at equal distances, the first and the last among them.
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

// ordeal is one volume's life with one kill in it.
type ordeal struct {
	campaign
	rig    *rig
	killAt int

	volume *volume
	// data is what must be on the volume.
	data []byte
	// steps and retries are for the report.
	steps, retries int
}

func (o *ordeal) run(ctx context.Context) (err error) {
	if o.volume, err = o.rig.newVolume(o.kind.fsType, o.kind.block, o.kind.size); err != nil {
		return err
	}
	o.volume.readOnly = o.kind.readOnly
	defer func() { err = errors.Join(err, o.volume.remove()) }()
	p, err := o.rig.start()
	if err != nil {
		return err
	}
	if err := o.prepare(ctx, p); err != nil {
		return errors.Join(fmt.Errorf("before the kill: %w", err), p.stop())
	}
	if err := o.die(ctx, p); err != nil {
		return err
	}
	log := p.log.String()
	if p, err = o.rig.start(); err != nil {
		return err
	}
	if err := o.live(ctx, p); err != nil {
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

// lastLines are the last few lines of a log.
func lastLines(log string) string {
	lines := strings.SplitAfter(log, "\n")
	return strings.Join(lines[max(0, len(lines)-6):], "")
}

// prepare brings the volume to where the call begins.
func (o *ordeal) prepare(ctx context.Context, p *plugin) error {
	v := o.volume
	if o.kind.used {
		if o.kind.grows {
			id := mount.FilesystemUUID(uuid.MustParse(v.id)).String()
			if out, err := exec.Command("mkfs.ext4", "-q", "-U", id, v.node(), "64M").CombinedOutput(); err != nil {
				return fmt.Errorf("mkfs: %w: %s", err, out)
			}
		}
		small := o.kind.grows // staging would grow it, and what the call is to do would be done
		if err := o.fill(ctx, p, small); err != nil {
			return err
		}
	}
	for _, before := range map[rpc][]rpc{stage: {}, publish: {stage}, unpublish: {stage, publish}, unstage: {stage}}[o.call] {
		if err := v.call(ctx, p, before); err != nil {
			return err
		}
	}
	return nil
}

// fill puts data on the volume, by the plugin's own calls or by hand.
func (o *ordeal) fill(ctx context.Context, p *plugin, byHand bool) error {
	v := o.volume
	o.data = []byte("data of " + v.id)
	if v.block {
		return o.poke(v.node())
	}
	if byHand {
		if err := unix.Mount(v.node(), v.staging, v.fsType, 0, ""); err != nil {
			return err
		}
		return errors.Join(o.write(v.staging), unix.Unmount(v.staging, 0))
	}
	if err := v.call(ctx, p, stage); err != nil {
		return err
	}
	return errors.Join(o.write(v.staging), v.call(ctx, p, unstage))
}

func (o *ordeal) write(folder string) error {
	return os.WriteFile(filepath.Join(folder, "file"), o.data, 0o600)
}

func (o *ordeal) poke(device string) error {
	file, err := os.OpenFile(device, os.O_WRONLY|unix.O_SYNC, 0)
	if err != nil {
		return err
	}
	_, err = file.WriteAt(o.data, 0)
	return errors.Join(err, file.Close())
}

// errUnwatched says that a call failed although nobody was killed.
var errUnwatched = errors.New("the call fails without a kill")

// die makes the call and kills the plugin at its step, or after it.
func (o *ordeal) die(ctx context.Context, p *plugin) error {
	ready, answered := make(chan struct{}), make(chan error, 1)
	go func() {
		<-ready
		err := o.volume.call(ctx, p, o.call)
		answered <- errors.Join(err, p.cmd.Process.Kill())
	}()
	var err error
	o.steps, err = trace(p.cmd.Process.Pid, o.killAt, o.all, ready)
	answer := <-answered
	if stopped := p.stop(); err == nil {
		err = stopped
	}
	if err == nil && o.killAt == 0 && answer != nil {
		return fmt.Errorf("%w: %w\n--- the plugin:\n%s", errUnwatched, answer, lastLines(p.log.String()))
	}
	return err
}

// live is what the orchestrator does next, and what must hold.
func (o *ordeal) live(ctx context.Context, p *plugin) error {
	v := o.volume
	calls := map[rpc][]rpc{
		stage: {stage, publish, unpublish, unstage}, publish: {publish, unpublish, unstage}, unpublish: {unpublish, unstage}, unstage: {unstage},
	}[o.call]
	if o.killAt%2 == 1 { // it gives up: what may have been done is undone
		calls = map[rpc][]rpc{
			stage: {unstage}, publish: {unpublish, unstage}, unpublish: {publish, unpublish, unstage}, unstage: {stage, unstage},
		}[o.call]
	}
	for _, call := range calls {
		if err := o.insist(ctx, p, call); err != nil {
			return fmt.Errorf("%s afterwards: %w", call, err)
		}
	}
	if err := o.clean(); err != nil {
		return err
	}
	// And its whole life once more, as on another node.
	if err := errors.Join(v.unplug(), v.plug()); err != nil {
		return err
	}
	for _, call := range []rpc{stage, publish, unpublish, unstage} {
		if err := o.insist(ctx, p, call); err != nil {
			return fmt.Errorf("%s in the next life: %w", call, err)
		}
	}
	return o.clean()
}

// patience is how long an orchestrator is kept waiting by a kill at most: a program that outlived the plugin may hold the disk.
const patience = 20 * time.Second

// insist repeats a call until it succeeds, as orchestrators do, and looks at what it did.
func (o *ordeal) insist(ctx context.Context, p *plugin, call rpc) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		err := o.volume.call(ctx, p, call)
		if err == nil {
			return o.look(call)
		}
		if ctx.Err() != nil {
			return err
		}
		o.retries++
		time.Sleep(50 * time.Millisecond)
	}
}

// look compares the mounts, and the volume's data, with what the call has promised.
func (o *ordeal) look(call rpc) error {
	v := o.volume
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
		return o.read()
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

// read compares the data at the target with what was written; where nothing was, it writes.
func (o *ordeal) read() error {
	v := o.volume
	if o.data == nil {
		o.data = []byte("data of " + v.id)
		if v.block {
			return o.poke(v.target)
		}
		if info, err := os.Stat(v.target); err != nil || info.Mode().Perm() != 0o770 {
			return fmt.Errorf("the root folder's mode is not what the volume's parameters ask: %v, %w", info, err)
		}
		return o.write(v.target)
	}
	var found []byte
	var err error
	if v.block {
		found = make([]byte, len(o.data))
		var file *os.File
		if file, err = os.Open(v.target); err == nil {
			_, err = file.ReadAt(found, 0)
			err = errors.Join(err, file.Close())
		}
	} else {
		found, err = os.ReadFile(filepath.Join(v.target, "file"))
	}
	if err != nil || !bytes.Equal(found, o.data) {
		return fmt.Errorf("the volume holds %q, %w; want %q", found, err, o.data)
	}
	return nil
}

// clean checks that nothing holds the disk and nothing is left over.
func (o *ordeal) clean() error {
	v := o.volume
	end := time.Now().Add(patience)
	for stillRuns(v.rig.dir + "/") {
		if time.Now().After(end) {
			return errors.New("a program that the killed plugin had started still runs")
		}
		time.Sleep(20 * time.Millisecond)
	}
	file, err := os.OpenFile(v.node(), os.O_RDONLY|unix.O_EXCL, 0)
	if err != nil {
		return fmt.Errorf("after all was undone, something holds the disk: %w", err)
	}
	if err := file.Close(); err != nil {
		return err
	}
	if entries, err := os.ReadDir(v.staging); err != nil && !errors.Is(err, os.ErrNotExist) || len(entries) > 0 {
		return fmt.Errorf("left in the staging folder: %v, %w", entries, err)
	}
	return nil
}
