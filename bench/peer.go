// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/klog/v2"
	mountutils "k8s.io/mount-utils"
	utilexec "k8s.io/utils/exec"
)

// comparatorName is the name of the program that this command is with the flag -comparator.
const comparatorName = "mount-utils"

// devicePath is the key in the publish context by which other drivers pass the path of a device node.
const devicePath = "devicePath"

// peer is the node plugin of another driver: a program that serves CSI on the socket that is its last argument.
type peer struct {
	csi.NodeClient
	name string
	cmd  *exec.Cmd
	conn *grpc.ClientConn
	// stages says that the driver has the calls NodeStageVolume and NodeUnstageVolume.
	stages bool
}

// comparator starts the program that does what drivers do that are built on mount-utils.
func (b *bench) comparator(ctx context.Context) (*peer, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	return b.startPeer(ctx, comparatorName, self, "-comparator")
}

// realPeers starts the programs in the directory of the flag -peers.
func (b *bench) realPeers(ctx context.Context) (started []*peer, err error) {
	programs, err := filepath.Glob(filepath.Join(b.peers, "*"))
	if err == nil && len(programs) == 0 {
		err = fmt.Errorf("%s has no program", b.peers)
	}
	if err != nil {
		return nil, err
	}
	for _, program := range programs {
		p, err := b.startPeer(ctx, filepath.Base(program), program)
		if err != nil {
			return started, fmt.Errorf("%s: %w", program, err)
		}
		started = append(started, p)
	}
	return started, nil
}

func (b *bench) startPeer(ctx context.Context, name, program string, args ...string) (_ *peer, err error) {
	dir, err := os.MkdirTemp(b.dir, "")
	if err != nil {
		return nil, err
	}
	socket := filepath.Join(dir, "csi.sock")
	p := &peer{name: name, cmd: exec.Command(program, append(args, socket)...)}
	p.cmd.Stderr = os.Stderr
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	if p.conn, err = grpc.NewClient(
		"passthrough:///"+socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(dialUntilServed),
	); err != nil {
		return nil, errors.Join(err, p.stop())
	}
	p.NodeClient = csi.NewNodeClient(p.conn)
	ctx, cancel := context.WithTimeout(ctx, startupLimit)
	defer cancel()
	can, err := p.NodeGetCapabilities(ctx, &csi.NodeGetCapabilitiesRequest{}, grpc.WaitForReady(true))
	if err != nil {
		return nil, errors.Join(err, p.stop())
	}
	for _, c := range can.GetCapabilities() {
		p.stages = p.stages || c.GetRpc().GetType() == csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME
	}
	return p, nil
}

func (p *peer) stop() error {
	err := p.cmd.Process.Kill()
	_ = p.cmd.Wait() // it was killed
	if p.conn != nil {
		err = errors.Join(err, p.conn.Close())
	}
	return err
}

// comparator is the node plugin of a driver that is built on mount-utils: SafeFormatAndMount (stat, blkid, mkfs or
// fsck, mount) at the staging path, a bind at the target path, and umount of both.
type comparator struct {
	csi.UnimplementedNodeServer
	mounter *mountutils.SafeFormatAndMount
}

// serveComparator serves on a unix socket until the process is killed.
func serveComparator(socket string) error {
	klog.SetSlogLogger(slog.New(slog.DiscardHandler))
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	csi.RegisterNodeServer(server, &comparator{
		mounter: mountutils.NewSafeFormatAndMount(mountutils.New(""), utilexec.New()),
	})
	return server.Serve(listener)
}

func (*comparator) NodeGetCapabilities(
	context.Context, *csi.NodeGetCapabilitiesRequest,
) (*csi.NodeGetCapabilitiesResponse, error) {
	return &csi.NodeGetCapabilitiesResponse{Capabilities: []*csi.NodeServiceCapability{
		{Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{
			Type: csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME,
		}}},
	}}, nil
}

func (c *comparator) NodeStageVolume(
	_ context.Context, r *csi.NodeStageVolumeRequest,
) (*csi.NodeStageVolumeResponse, error) {
	return &csi.NodeStageVolumeResponse{}, c.mounter.FormatAndMount(
		r.GetPublishContext()[devicePath], r.GetStagingTargetPath(), r.GetVolumeCapability().GetMount().GetFsType(), nil)
}

func (c *comparator) NodePublishVolume(
	_ context.Context, r *csi.NodePublishVolumeRequest,
) (*csi.NodePublishVolumeResponse, error) {
	if err := os.MkdirAll(r.GetTargetPath(), 0o750); err != nil {
		return nil, err
	}
	return &csi.NodePublishVolumeResponse{}, c.mounter.Mount(
		r.GetStagingTargetPath(), r.GetTargetPath(), "", []string{"bind"})
}

func (c *comparator) NodeUnpublishVolume(
	_ context.Context, r *csi.NodeUnpublishVolumeRequest,
) (*csi.NodeUnpublishVolumeResponse, error) {
	return &csi.NodeUnpublishVolumeResponse{}, mountutils.CleanupMountPoint(r.GetTargetPath(), c.mounter, true)
}

func (c *comparator) NodeUnstageVolume(
	_ context.Context, r *csi.NodeUnstageVolumeRequest,
) (*csi.NodeUnstageVolumeResponse, error) {
	return &csi.NodeUnstageVolumeResponse{}, mountutils.CleanupMountPoint(r.GetStagingTargetPath(), c.mounter, true)
}

// loopDevice returns the loop device of the only volume that is attached to the guest. Namespace 1 of controller 0 is
// the boot disk.
func (s *stagingRig) loopDevice() (string, error) {
	nodes, err := filepath.Glob(filepath.Join(s.node.Guest, "dev", "nvme*n*"))
	if err != nil {
		return "", err
	}
	nodes = slices.DeleteFunc(nodes, func(node string) bool { return filepath.Base(node) == "nvme0n1" })
	if len(nodes) != 1 {
		return "", fmt.Errorf("the guest has the volumes %q, want one", nodes)
	}
	var stat unix.Stat_t
	if err := unix.Stat(nodes[0], &stat); err != nil {
		return "", err
	}
	return fmt.Sprintf("/dev/loop%d", unix.Minor(stat.Rdev)), nil
}
