// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

const (
	// memoryProcesses is the number of measured processes of each kind.
	memoryProcesses = 5
	// idleTime is how long they are idle before their memory is read.
	idleTime = 2 * time.Second
	// megabyte is the unit for files, mebibyte the unit for memory, which the kernel counts in pages.
	megabyte = 1e6
	mebibyte = 1 << 20
)

// memory measures the memory of idle plugins, after their start and after the life of one volume: for a controller from
// CreateVolume to DeleteVolume, for a node from NodeStageVolume to NodeUnstageVolume.
func memory(ctx context.Context, b *bench) (_ []row, err error) {
	r, err := b.newRig(b.guests()...)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.stop()) }()
	var rows []row
	for _, kind := range []struct {
		mode string
		live func(context.Context, *rig, *simtest.Plugin) error
	}{{"controller", controllerLife}, {"node", nodeLife}} {
		begun, lived, err := b.idleMemory(ctx, r, kind.mode, kind.live)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", kind.mode, err)
		}
		rows = append(rows, begun.rows("memory/"+kind.mode)...)
		rows = append(rows, lived.rows("memory/"+kind.mode+"/after a volume")...)
	}
	return rows, nil
}

// wakeups counts how often the threads of idle plugins wake in a minute. Both are measured at the same time, after the
// look at the token that a controller takes a minute after its start, and then each hour.
func wakeups(ctx context.Context, b *bench) (_ []row, err error) {
	const settled, measured = 80 * time.Second, time.Minute
	r, err := b.newRig(b.guests()...)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.stop()) }()
	node, err := b.startPlugin("node", r.sim)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, node.Stop()) }()
	var counts [2][2]float64 // of controller and node, before and after
	for when, wait := range []time.Duration{settled, measured} {
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(wait):
		}
		for who, p := range []*simtest.Plugin{r.plugin, node} {
			if counts[who][when], err = switches(p.PID()); err != nil {
				return nil, err
			}
		}
	}
	return []row{
		median("wakeups/controller", "1/min", []float64{counts[0][1] - counts[0][0]}),
		median("wakeups/node", "1/min", []float64{counts[1][1] - counts[1][0]}),
	}, nil
}

// switches returns how often the threads of a process have begun to wait.
func switches(pid int) (total float64, err error) {
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
	if err != nil {
		return 0, err
	}
	for _, file := range files {
		status, err := os.ReadFile(file)
		if err != nil {
			return 0, err
		}
		_, after, _ := strings.Cut(string(status), "\nvoluntary_ctxt_switches:")
		count, err := strconv.ParseFloat(strings.TrimSpace(strings.SplitN(after, "\n", 2)[0]), 64)
		if err != nil {
			return 0, err
		}
		total += count
	}
	return total, nil
}

// memorySamples are the memory of several processes, in MiB.
type memorySamples struct {
	anonymous, resident []float64
}

func (m memorySamples) rows(name string) []row {
	return []row{
		median(name+"/anonymous", "MiB", m.anonymous),
		median(name+"/resident", "MiB", m.resident),
	}
}

// guests are the flags for guests, which need root. Without guests a node has no disk to stage.
func (b *bench) guests() []string {
	if os.Geteuid() != 0 {
		fmt.Fprintln(
			os.Stderr,
			"memory: without root there are no guests, so the node is measured without having staged a volume",
		)
		return nil
	}
	return []string{"--guest-root=" + filepath.Join(b.dir, "guests")}
}

// idleMemory starts plugins, lets each go through a volume's life, and reads their idle memory before and after.
func (b *bench) idleMemory(
	ctx context.Context, r *rig, mode string, live func(context.Context, *rig, *simtest.Plugin) error,
) (begun, lived memorySamples, err error) {
	var plugins []*simtest.Plugin
	defer func() {
		for _, p := range plugins {
			err = errors.Join(err, p.Stop())
		}
	}()
	for range memoryProcesses {
		p, err := b.startPlugin(mode, r.sim)
		if err != nil {
			return begun, lived, err
		}
		plugins = append(plugins, p)
	}
	if begun, err = memoryOfAll(ctx, plugins); err != nil {
		return begun, lived, err
	}
	for _, p := range plugins {
		if err := live(ctx, r, p); err != nil {
			return begun, lived, err
		}
	}
	lived, err = memoryOfAll(ctx, plugins)
	return begun, lived, err
}

// memoryOfAll reads the memory of plugins after an idle time.
func memoryOfAll(ctx context.Context, plugins []*simtest.Plugin) (samples memorySamples, err error) {
	select {
	case <-time.After(idleTime):
	case <-ctx.Done():
		return memorySamples{}, ctx.Err()
	}
	for _, p := range plugins {
		anonymous, err := memoryOf(p.PID(), "RssAnon")
		if err != nil {
			return memorySamples{}, err
		}
		resident, err := memoryOf(p.PID(), "VmRSS")
		if err != nil {
			return memorySamples{}, err
		}
		samples.anonymous = append(samples.anonymous, anonymous)
		samples.resident = append(samples.resident, resident)
	}
	return samples, nil
}

func controllerLife(ctx context.Context, r *rig, p *simtest.Plugin) error {
	r = &rig{sim: r.sim, plugin: p, sdk: r.sdk, node: r.node}
	id, err := r.createVolume(ctx, "memory")
	if err != nil {
		return err
	}
	if _, err := r.publish(ctx, id); err != nil {
		return err
	}
	if err := r.unpublish(ctx, id); err != nil {
		return err
	}
	return r.deleteVolume(ctx, id)
}

// nodeLife takes a volume of the rig's controller through the calls of a node plugin.
func nodeLife(ctx context.Context, r *rig, node *simtest.Plugin) error {
	if _, err := node.NodeGetInfo(ctx, &csi.NodeGetInfoRequest{}); err != nil {
		return err
	}
	if r.node.Guest == "" {
		return nil
	}
	id, err := r.createVolume(ctx, "memory")
	if err != nil {
		return err
	}
	publishContext, err := r.publish(ctx, id)
	if err != nil {
		return err
	}
	if err := stageAndUnstage(ctx, node, id, publishContext); err != nil {
		return err
	}
	if err := r.unpublish(ctx, id); err != nil {
		return err
	}
	return r.deleteVolume(ctx, id)
}

// stageAndUnstage reverts its steps, also after a failure.
func stageAndUnstage(
	ctx context.Context,
	node *simtest.Plugin,
	id string,
	publishContext map[string]string,
) (err error) {
	dir := filepath.Dir(node.Socket)
	staging, target := filepath.Join(dir, "staging"), filepath.Join(dir, "target")
	if err := os.Mkdir(staging, 0o755); err != nil {
		return err
	}
	defer func() {
		_, unstageErr := node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging})
		err = errors.Join(err, unstageErr)
	}()
	if _, err := node.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
		VolumeId: id, PublishContext: publishContext, StagingTargetPath: staging, VolumeCapability: mountCapability(),
	}); err != nil {
		return err
	}
	defer func() {
		_, unpublishErr := node.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: target})
		err = errors.Join(err, unpublishErr)
	}()
	if _, err := node.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
		VolumeId:          id,
		PublishContext:    publishContext,
		StagingTargetPath: staging,
		TargetPath:        target,
		VolumeCapability:  mountCapability(),
	}); err != nil {
		return err
	}
	_, err = node.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: target})
	return err
}

// memoryOf is the memory of a process in MiB: anonymous (RssAnon), resident (VmRSS), or the peak of resident (VmHWM).
func memoryOf(pid int, which string) (float64, error) {
	file := fmt.Sprintf("/proc/%d/status", pid)
	text, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		if len(fields) == 3 && fields[0] == which+":" && fields[2] == "kB" {
			kib, err := strconv.ParseInt(fields[1], 10, 64)
			return float64(kib) * 1024 / mebibyte, err
		}
	}
	return 0, fmt.Errorf("%s has no %s", file, which)
}

// binarySize is the size of the plugin as built by make build: static and stripped. Controller and node are one
// program.
func binarySize(_ context.Context, b *bench) ([]row, error) {
	info, err := os.Stat(b.programs.Plugin)
	if err != nil {
		return nil, err
	}
	return []row{median("binary", "MB", []float64{float64(info.Size()) / megabyte})}, nil
}
