// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

const (
	appearRounds = 40
	lifeRounds   = 11
)

// staging measures the time that a node adds to the time of the kernel and of mkfs, with real loop devices in a guest
// of the rack. It needs root.
func staging(ctx context.Context, b *bench) (_ []row, err error) {
	if os.Geteuid() != 0 {
		fmt.Println("staging: left out, needs root: loop devices, device nodes and mounts")
		return nil, nil
	}
	s, err := b.newStagingRig()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.stop()) }()
	rows, err := s.appearance(ctx)
	if err != nil {
		return nil, err
	}
	comparator, err := b.comparator(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, comparator.stop()) }()
	for _, fsType := range []string{"ext4", "xfs"} {
		for _, size := range []int64{1, 1023} {
			lives, err := s.lives(ctx, "staging/", fsType, size, comparator)
			if err != nil {
				return nil, err
			}
			rows = append(rows, lives...)
		}
	}
	return rows, nil
}

// peersPrefix begins the names of the rows of [besidePeers].
const peersPrefix = "peers/"

// besidePeers measures a node's four calls beside those of real drivers, and of the comparator. It needs root.
func besidePeers(ctx context.Context, b *bench) (rows []row, err error) {
	s, err := b.newStagingRig()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.stop()) }()
	others, err := b.realPeers(ctx)
	if err == nil {
		var comparator *peer
		comparator, err = b.comparator(ctx)
		others = append(others, comparator)
	}
	defer func() {
		for _, other := range others {
			if other != nil {
				err = errors.Join(err, other.stop())
			}
		}
	}()
	if err != nil {
		return nil, err
	}
	for _, fsType := range []string{"ext4", "xfs"} {
		lives, err := s.lives(ctx, peersPrefix, fsType, 1, others...)
		if err != nil {
			return nil, err
		}
		rows = append(rows, lives...)
	}
	return rows, nil
}

// stagingRig is a rig with guests.
type stagingRig struct {
	*rig
	// guest is the plugin in the guest.
	guest *simtest.Plugin
	dir   string
}

// newStagingRig starts a rack with a guest, and a plugin for each mode.
func (b *bench) newStagingRig() (_ *stagingRig, err error) {
	s := &stagingRig{rig: &rig{}}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.stop())
		}
	}()
	if s.dir, err = os.MkdirTemp(b.dir, ""); err != nil {
		return nil, err
	}
	if s.sim, err = b.startSim(
		"--hotplug",
		"--instances=node-a",
		"--guest-root="+filepath.Join(s.dir, "guests"),
		"--state="+filepath.Join(s.dir, "state"),
	); err != nil {
		return nil, err
	}
	s.node = s.sim.Instances[0]
	for mode, plugin := range map[string]**simtest.Plugin{"controller": &s.plugin, "node": &s.guest} {
		opts, err := b.pluginOptions(mode, s.sim)
		if err != nil {
			return nil, err
		}
		opts.Args = append(opts.Args, "--log-level=debug", "--log-format=json")
		if *plugin, err = simtest.StartPlugin(b.programs.Plugin, opts); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// stop ends all processes.
func (s *stagingRig) stop() error {
	var err error
	if s.guest != nil {
		err = s.guest.Stop()
	}
	return errors.Join(err, s.rig.stop())
}

// stagedVolume is one volume in the calls of the node.
type stagedVolume struct {
	id              string
	capability      *csi.VolumeCapability
	context         map[string]string
	publishContext  map[string]string
	staging, target string
}

func (s *stagingRig) newVolume(ctx context.Context, name, fsType string, size int64) (*stagedVolume, error) {
	capability := &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: fsType}},
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
	}
	resp, err := s.plugin.CreateVolume(ctx, &csi.CreateVolumeRequest{
		Name:               name,
		CapacityRange:      &csi.CapacityRange{RequiredBytes: size << 30},
		VolumeCapabilities: []*csi.VolumeCapability{capability},
	})
	if err != nil {
		return nil, err
	}
	v := &stagedVolume{
		id: resp.GetVolume().GetVolumeId(), capability: capability, context: resp.GetVolume().GetVolumeContext(),
		staging: filepath.Join(s.dir, name+"-staging"), target: filepath.Join(s.dir, name+"-target"),
	}
	return v, os.Mkdir(v.staging, 0o755)
}

func (s *stagingRig) attachVolume(ctx context.Context, v *stagedVolume) (err error) {
	v.publishContext, err = s.publish(ctx, v.id)
	return err
}

func (s *stagingRig) stage(ctx context.Context, v *stagedVolume) error {
	_, err := s.guest.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
		VolumeId:          v.id,
		StagingTargetPath: v.staging,
		VolumeCapability:  v.capability,
		VolumeContext:     v.context,
		PublishContext:    v.publishContext,
	})
	return err
}

func (s *stagingRig) unstage(ctx context.Context, v *stagedVolume) error {
	_, err := s.guest.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staging})
	return err
}

// life is stage, publish, unpublish, unstage by the plugin.
func (s *stagingRig) life(ctx context.Context, v *stagedVolume) error {
	return life(ctx, s.guest, true, v)
}

// life is stage, publish, unpublish, unstage by a node plugin, or the two in the middle if it has no others.
func life(ctx context.Context, node csi.NodeClient, stages bool, v *stagedVolume) error {
	if stages {
		_, err := node.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
			VolumeId:          v.id,
			StagingTargetPath: v.staging,
			VolumeCapability:  v.capability,
			VolumeContext:     v.context,
			PublishContext:    v.publishContext,
		})
		if err != nil {
			return err
		}
	}
	_, err := node.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
		VolumeId:          v.id,
		StagingTargetPath: v.staging,
		TargetPath:        v.target,
		VolumeCapability:  v.capability,
		VolumeContext:     v.context,
		PublishContext:    v.publishContext,
	})
	if err != nil {
		return err
	}
	if _, err := node.NodeUnpublishVolume(
		ctx,
		&csi.NodeUnpublishVolumeRequest{VolumeId: v.id, TargetPath: v.target},
	); err != nil || !stages {
		return err
	}
	_, err = node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staging})
	return err
}

func (s *stagingRig) remove(ctx context.Context, v *stagedVolume) error {
	return errors.Join(s.unpublish(ctx, v.id), s.deleteVolume(ctx, v.id), os.Remove(v.staging))
}

// appearance measures from the appearance of a disk's device node until a waiting NodeStageVolume has found the disk,
// and until it has mounted the disk. The disk already has a filesystem.
func (s *stagingRig) appearance(ctx context.Context) (_ []row, err error) {
	v, err := s.newVolume(ctx, "appear", "ext4", 1)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(s.attachVolume(ctx, v), s.stage(ctx, v), s.unstage(ctx, v), s.unpublish(ctx, v.id)); err != nil {
		return nil, err
	}
	var found, staged []float64
	for range appearRounds {
		seen := len(s.guest.Stderr().String())
		done := make(chan error, 1)
		var answered time.Time
		go func() {
			err := s.stage(ctx, v)
			answered = time.Now()
			done <- err
		}()
		appeared := make(chan time.Time, 1)
		go s.watch(ctx, appeared)
		if err := s.attachVolume(ctx, v); err != nil {
			return nil, err
		}
		start := <-appeared
		if err := <-done; err != nil {
			return nil, err
		}
		line, err := s.logged(seen, "found the disk", v.id)
		if err != nil {
			return nil, err
		}
		found = append(found, milliseconds(max(0, line.Time.Sub(start))))
		staged = append(staged, milliseconds(answered.Sub(start)))
		if err := errors.Join(s.unstage(ctx, v), s.unpublish(ctx, v.id)); err != nil {
			return nil, err
		}
	}
	if err := errors.Join(s.deleteVolume(ctx, v.id), os.Remove(v.staging)); err != nil {
		return nil, err
	}
	return []row{
		median("staging/appeared-found/p50", "ms", found),
		percentile99("staging/appeared-found/p99", "ms", found),
		median("staging/appeared-staged/p50", "ms", staged),
		percentile99("staging/appeared-staged/p99", "ms", staged),
	}, nil
}

func percentile99(name, unit string, samples []float64) row {
	sorted := slices.Sorted(slices.Values(samples))
	return newRow(name, unit, samples, sorted[(len(sorted)-1)*99/100])
}

// watch sends the time at which a device node besides the boot disk's appears in the guest. Its namespace need not be
// 1: while another process holds the device, a disk returns as the next namespace.
func (s *stagingRig) watch(ctx context.Context, appeared chan<- time.Time) {
	for ctx.Err() == nil {
		nodes, err := filepath.Glob(filepath.Join(s.node.Guest, "dev", "nvme*n*"))
		if err == nil && len(nodes) > 1 {
			break
		}
		time.Sleep(100 * time.Microsecond)
	}
	appeared <- time.Now()
}

// logLine is a line of the plugin's log, with the fields that are used here. Durations are in nanoseconds.
type logLine struct {
	Time     time.Time     `json:"time"`
	Msg      string        `json:"msg"`
	VolumeID string        `json:"volume_id"`
	Find     time.Duration `json:"find"`
	Scan     time.Duration `json:"scan"`
	Mkfs     time.Duration `json:"mkfs"`
	Mount    time.Duration `json:"mount"`
}

// logged finds the last line with the message about a volume, after the first bytes of the log.
func (s *stagingRig) logged(after int, message, volumeID string) (found logLine, err error) {
	for text := range strings.Lines(s.guest.Stderr().String()[after:]) {
		var line logLine
		if json.Unmarshal([]byte(text), &line) == nil && line.Msg == message && line.VolumeID == volumeID {
			found = line
		}
	}
	if found.Msg == "" {
		return logLine{}, fmt.Errorf("the plugin has not logged %q about volume %s", message, volumeID)
	}
	return found, nil
}

// lives measures the four calls for a blank disk and for a used one: the plugin's time and CPU time, and the shares of
// scan, mkfs, mount and the rest for the blank one. It measures the same with other drivers in turn, because the
// machine's speed changes. The names of the rows begin with prefix.
func (s *stagingRig) lives(ctx context.Context, prefix, fsType string, size int64, others ...*peer) ([]row, error) {
	parts := map[string][]float64{}
	nodes := append([]*peer{{name: pluginName, NodeClient: s.guest, stages: true}}, others...)
	for i := range lifeRounds {
		for _, node := range nodes {
			name := fmt.Sprintf("%s-%s-%d-%d", node.name, fsType, size, i)
			if err := s.livesOn(ctx, node, name, fsType, size, parts); err != nil {
				return nil, fmt.Errorf("%s: %w", node.name, err)
			}
		}
	}
	name := fmt.Sprintf("%s%s-%dGiB/", prefix, fsType, size)
	var rows []row
	for _, part := range slices.Sorted(maps.Keys(parts)) {
		if strings.HasSuffix(part, "/cpu") { // the kernel counts in steps of 10 ms
			rows = append(rows, newRow(name+part, "ms", parts[part], mean(parts[part])))
		} else {
			rows = append(rows, median(name+part, "ms", parts[part]))
		}
	}
	for _, disk := range []string{"blank/", "used/"} {
		for _, other := range others {
			time := middle(parts[disk+pluginName]) / middle(parts[disk+other.name])
			cpu := mean(parts[disk+pluginName+"/cpu"]) / mean(parts[disk+other.name+"/cpu"])
			rows = append(rows,
				median(name+disk+other.name+"/ratio", "×", []float64{time}),
				median(name+disk+other.name+"/cpu-ratio", "×", []float64{cpu}))
		}
	}
	return rows, nil
}

// pluginName is our own name beside those of other drivers.
const pluginName = "plugin"

// usedLives is how many lives of a used volume follow the one of the blank volume.
const usedLives = 3

// livesOn measures one node plugin with a new volume, first blank, then used.
func (s *stagingRig) livesOn(
	ctx context.Context, node *peer, name, fsType string, size int64, parts map[string][]float64,
) error {
	v, err := s.newVolume(ctx, name, fsType, size)
	if err != nil {
		return err
	}
	if err := s.attachVolume(ctx, v); err != nil {
		return err
	}
	pid := s.guest.PID()
	if node.cmd != nil {
		pid = node.cmd.Process.Pid
		device, err := s.loopDevice()
		if err != nil {
			return err
		}
		v.publishContext, v.context = map[string]string{devicePath: device}, nil
	}
	measure := func(part string) (took time.Duration, err error) {
		// Some drivers remove the directory that the orchestrator made.
		if err := os.MkdirAll(v.staging, 0o755); err != nil {
			return 0, err
		}
		before, err1 := cpuTime(pid)
		took, err2 := timed(func() error { return life(ctx, node, node.stages, v) })
		after, err3 := cpuTime(pid)
		parts[part+node.name] = append(parts[part+node.name], milliseconds(took))
		parts[part+node.name+"/cpu"] = append(parts[part+node.name+"/cpu"], after-before)
		return took, errors.Join(err1, err2, err3)
	}
	seen := len(s.guest.Stderr().String())
	blank, err := measure("blank/")
	if err != nil {
		return err
	}
	if node.cmd == nil {
		scanned, err1 := s.logged(seen, "making a filesystem on a blank disk", v.id)
		made, err2 := s.logged(seen, "made a filesystem", v.id)
		mounted, err3 := s.logged(seen, "mounted", v.id)
		if err := errors.Join(err1, err2, err3); err != nil {
			return err
		}
		for part, took := range map[string]time.Duration{
			"scan": scanned.Scan, "mkfs": made.Mkfs, "mount": mounted.Mount, "rest": blank - made.Mkfs - mounted.Mount,
		} {
			parts["blank/"+part] = append(parts["blank/"+part], milliseconds(took))
		}
	}
	for range usedLives {
		if _, err := measure("used/"); err != nil {
			return err
		}
	}
	return errors.Join(os.MkdirAll(v.staging, 0o755), s.remove(ctx, v))
}

func mean(samples []float64) (mean float64) {
	for _, sample := range samples {
		mean += sample / float64(len(samples))
	}
	return mean
}

// timed returns how long do took.
func timed(do func() error) (time.Duration, error) {
	start := time.Now()
	err := do()
	return time.Since(start), err
}
