// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux && amd64

package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/uuid"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/guest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/writers"
)

const (
	instanceID = "11111111-2222-4333-8444-555555555555"
	diskName   = "csi-aaaaaaaaaaaaaaaa"
	mib        = 1 << 20
)

// rig is a guest with the folders of an orchestrator.
type rig struct {
	dir     string
	program string
	guests  *guest.Guests
}

func newRig(dir, name, program string) (*rig, error) {
	r := &rig{dir: filepath.Join(dir, name), program: program}
	if err := os.Mkdir(r.dir, 0o755); err != nil {
		return nil, err
	}
	var err error
	r.guests, err = guest.New(
		guest.Options{Root: r.path("guests"), StateDir: r.path("disks"), Log: slog.New(slog.DiscardHandler)},
	)
	if err != nil {
		return nil, err
	}
	err = errors.Join(r.guests.CreateInstance(instanceID, "node"), r.guests.CreateDisk("boot", mib))
	if err == nil {
		err = r.guests.PowerOn(
			instanceID,
			[]simrack.GuestDisk{{ID: "boot", Name: "node-boot", SizeBytes: mib, BlockSize: 512, Boot: true}},
			nil,
		)
	}
	if err != nil {
		return nil, errors.Join(err, r.guests.Close())
	}
	return r, nil
}

func (r *rig) path(name string) string { return filepath.Join(r.dir, name) }

// plugin is a running plugin.
type plugin struct {
	csi.NodeClient
	cmd  *exec.Cmd
	conn *grpc.ClientConn
	log  *strings.Builder
}

// start starts the plugin in mode node.
func (r *rig) start() (*plugin, error) {
	guestDir := r.guests.Dir(instanceID)
	p := &plugin{log: &strings.Builder{}}
	p.cmd = exec.Command(
		r.program,
		"--mode=node",
		"--endpoint=unix://"+r.path("csi.sock"),
		"--instance-id="+instanceID,
		"--state-dir="+r.path("state"),
		"--dev-root="+filepath.Join(guestDir, "dev"),
		"--sys-root="+filepath.Join(guestDir, "sys"),
		"--device-timeout=2s",
	)
	p.cmd.Env = []string{}
	p.cmd.Stderr = p.log
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	err := r.await()
	if err == nil {
		p.conn, err = grpc.NewClient("unix://"+r.path("csi.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	}
	if err != nil {
		return nil, errors.Join(err, p.stop())
	}
	p.NodeClient = csi.NewNodeClient(p.conn)
	return p, nil
}

// await waits until a plugin accepts connections. The socket of a plugin that has ended does not.
func (r *rig) await() error {
	end := time.Now().Add(callTime)
	for {
		conn, err := net.Dial("unix", r.path("csi.sock"))
		if err == nil {
			return conn.Close()
		}
		if time.Now().After(end) {
			return fmt.Errorf("the plugin does not listen: %w", err)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// stop kills the plugin and waits until it has ended.
func (p *plugin) stop() error {
	err := p.cmd.Process.Kill()
	if errors.Is(err, os.ErrProcessDone) {
		err = nil
	}
	// The plugin ends by the kill. The tracer may have read its exit status already.
	var exit *exec.ExitError
	if waited := p.cmd.Wait(); waited != nil && !errors.As(waited, &exit) && !errors.Is(waited, syscall.ECHILD) {
		err = errors.Join(err, waited)
	}
	if p.conn != nil {
		err = errors.Join(err, p.conn.Close())
	}
	return err
}

// volume is an attached disk with its staging and target paths.
type volume struct {
	rig    *rig
	id     string
	size   int64
	fsType string
	block  bool
	// readOnly asks for a read-only publication.
	readOnly        bool
	staging, target string
}

func (r *rig) newVolume(fsType string, block bool, size int64) (*volume, error) {
	// The ID is unique on this machine: the filesystem's UUID follows from it, and mkfs.btrfs rejects a UUID that
	// exists.
	v := &volume{rig: r, id: uuid.NewString(), size: size, fsType: fsType, block: block}
	v.staging, v.target = r.path("staging-"+v.id), r.path("target-"+v.id)
	if err := errors.Join(os.Mkdir(v.staging, 0o755), r.guests.CreateDisk(v.id, size)); err != nil {
		return nil, err
	}
	return v, v.plug()
}

// newData returns data for the volume, which no other volume has. It fills a raw block volume: whatever the plugin
// writes there is damage. Of a filesystem it fills a part, so that it lies at many places of the disk.
func (v *volume) newData() []byte {
	size := v.size
	if !v.block {
		size = 8 * mib
	}
	data := make([]byte, size)
	_, _ = rand.NewChaCha8(sha256.Sum256([]byte(v.id))).Read(data) // never fails
	return data
}

func (v *volume) plug() error {
	return v.rig.guests.Plug(
		instanceID,
		simrack.GuestDisk{ID: v.id, Name: diskName, Slot: 1, SizeBytes: v.size, BlockSize: 512},
	)
}

func (v *volume) unplug() error { return v.rig.guests.Unplug(instanceID, v.id) }

// node is the device node in the guest.
func (v *volume) node() string {
	return filepath.Join(v.rig.guests.Dir(instanceID), "dev", v.rig.guests.Device(instanceID, v.id))
}

// remove deletes the disk, after it has unmounted what a failed case left mounted.
func (v *volume) remove() error {
	table, err := mount.ReadTable()
	if err != nil {
		return err
	}
	for i := len(table) - 1; i >= 0; i-- {
		if strings.HasPrefix(table[i].Path, v.rig.dir+"/") && strings.Contains(table[i].Path, v.id) {
			err = errors.Join(err, unix.Unmount(table[i].Path, unix.MNT_DETACH))
		}
	}
	return errors.Join(err, v.unplug(), v.rig.guests.DeleteDisk(v.id), os.RemoveAll(v.staging), os.RemoveAll(v.target))
}

func (v *volume) capability() *csi.VolumeCapability {
	c := &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
	}
	if v.block {
		c.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
	} else {
		c.AccessType = &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: v.fsType}}
	}
	return c
}

func (v *volume) contexts() (publish, volume map[string]string) {
	size := fmt.Sprint(v.size)
	return map[string]string{
			"diskName":  diskName,
			"diskID":    v.id,
			"sizeBytes": size,
			"blockSize": "512",
			"origin":    "blank",
			"readOnly":  "false",
			"fsLineage": "",
		},
		map[string]string{
			"diskName":  diskName,
			"sizeBytes": size,
			"blockSize": "512",
			"rootMode":  "0770",
		}
}

// rpc is one of the node's calls about a volume.
type rpc string

const (
	stage     rpc = "NodeStage"
	publish   rpc = "NodePublish"
	unpublish rpc = "NodeUnpublish"
	unstage   rpc = "NodeUnstage"
)

// callTime is how long an orchestrator waits for an answer. It is long, because a traced mkfs.btrfs looks at every loop
// device of the machine.
const callTime = 40 * time.Second

func (v *volume) call(ctx context.Context, p *plugin, call rpc) (err error) {
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	publishContext, volumeContext := v.contexts()
	switch call {
	case stage:
		_, err = p.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
			VolumeId:          v.id,
			StagingTargetPath: v.staging,
			VolumeCapability:  v.capability(),
			PublishContext:    publishContext,
			VolumeContext:     volumeContext,
		})
	case publish:
		_, err = p.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
			VolumeId:          v.id,
			StagingTargetPath: v.staging,
			TargetPath:        v.target,
			VolumeCapability:  v.capability(),
			Readonly:          v.readOnly,
			PublishContext:    publishContext,
			VolumeContext:     volumeContext,
		})
	case unpublish:
		_, err = p.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: v.id, TargetPath: v.target})
	case unstage:
		_, err = p.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staging})
		if err == nil {
			err = writers.Check(v.node())
		}
	}
	return err
}
