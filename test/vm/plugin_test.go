// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build vm

package vm

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"net"
	"path"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

const (
	socket = "/run/csi.sock"
	// volumes is the folder of staging and target paths. It is on the system disk, like the plugin's state, so it
	// survives a power cut.
	volumes = "/var/lib/volumes"
)

// plugin is a plugin that runs in a guest.
type plugin struct {
	csi.NodeClient
	csi.IdentityClient
	machine *machine
}

// startPlugin starts the plugin in the guest and waits until it is ready. It ends with the machine. It finds its
// instance ID in the firmware, without configuration.
func startPlugin(t *testing.T, m *machine, flags ...string) *plugin {
	t.Helper()
	m.sh(
		t,
		"mkdir -p %s && oxide-csi --endpoint=unix://%s --mode=node --log-level=debug --log-format=json %s </dev/null >/dev/ttyS1 2>&1 &",
		volumes,
		socket,
		strings.Join(flags, " "),
	)
	conn, err := grpc.NewClient("passthrough:///guest", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return m.dial(ctx, socket) }))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	})
	p := &plugin{NodeClient: csi.NewNodeClient(conn), IdentityClient: csi.NewIdentityClient(conn), machine: m}
	ctx := within(t, time.Minute)
	m.await(t, time.Minute, "the plugin", func() bool {
		resp, err := p.Probe(ctx, &csi.ProbeRequest{}, grpc.WaitForReady(true))
		return err == nil && resp.GetReady().GetValue()
	})
	return p
}

// volume is a disk as an orchestrator uses it on a node.
type volume struct {
	*disk
	capability *csi.VolumeCapability
	// staging and target are in folder, which the orchestrator creates.
	folder, staging, target string
	// passphrase, if it is not empty, makes the volume encrypted. previous is the passphrase that it replaces.
	passphrase, previous string
	// source is the ID of the volume that the disk was copied from, or empty.
	source string
	// mkfsOptions are the options of a new filesystem.
	mkfsOptions string
}

// filesystemVolume returns a volume with a filesystem, block a raw block volume.
func filesystemVolume(d *disk, fsType string) *volume {
	return newVolume(
		d,
		&csi.VolumeCapability{
			AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: fsType}},
		},
	)
}

func block(d *disk) *volume {
	return newVolume(
		d,
		&csi.VolumeCapability{AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}},
	)
}

func newVolume(d *disk, capability *csi.VolumeCapability) *volume {
	capability.AccessMode = &csi.VolumeCapability_AccessMode{
		Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER,
	}
	folder := path.Join(volumes, d.id)
	return &volume{
		disk:       d,
		capability: capability,
		folder:     folder,
		staging:    path.Join(folder, "staging"),
		target:     path.Join(folder, "target"),
	}
}

func (v *volume) isBlock() bool { return v.capability.GetBlock() != nil }

// publishContext returns the controller's publish context.
func (v *volume) publishContext() map[string]string {
	values := map[string]string{
		rpc.KeyDiskName:  v.name,
		rpc.KeyDiskID:    v.id,
		rpc.KeySizeBytes: strconv.FormatInt(v.sizeBytes, 10),
		rpc.KeyBlockSize: "512",
		rpc.KeyOrigin:    rpc.OriginBlank,
		rpc.KeyReadOnly:  "false",
	}
	if v.passphrase != "" {
		values[rpc.KeyEncryption] = rpc.EncryptionLUKS2
	}
	if v.source != "" {
		values[rpc.KeyOrigin], values[rpc.KeyFSLineage] = rpc.OriginSnapshot, v.source
	}
	return values
}

func (v *volume) volumeContext() map[string]string {
	if v.mkfsOptions == "" {
		return nil
	}
	return map[string]string{rpc.KeyMkfsOptions: v.mkfsOptions}
}

func (v *volume) secrets() map[string]string {
	if v.passphrase == "" {
		return nil
	}
	return map[string]string{rpc.SecretPassphrase: v.passphrase, rpc.SecretPreviousPassphrase: v.previous}
}

// callTime is the deadline of a call. The plugin waits up to a minute for a disk, and for a busy mount.
const callTime = 2 * time.Minute

func (p *plugin) stage(t *testing.T, v *volume) error {
	t.Helper()
	return <-p.beginStage(t, v)
}

// beginStage starts NodeStageVolume and does not wait for its end.
func (p *plugin) beginStage(t *testing.T, v *volume) <-chan error {
	t.Helper()
	p.machine.sh(t, "mkdir -p %s", v.folder)
	ctx, done := within(t, callTime), make(chan error, 1)
	go func() {
		_, err := p.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
			VolumeId: v.id, PublishContext: v.publishContext(), StagingTargetPath: v.staging, VolumeCapability: v.capability,
			VolumeContext: v.volumeContext(), Secrets: v.secrets()})
		done <- err
	}()
	return done
}

func (p *plugin) publish(t *testing.T, v *volume) error {
	t.Helper()
	return p.publishAs(t, v, false)
}

func (p *plugin) publishReadOnly(t *testing.T, v *volume) error {
	t.Helper()
	return p.publishAs(t, v, true)
}

func (p *plugin) publishAs(t *testing.T, v *volume, readOnly bool) error {
	t.Helper()
	_, err := p.NodePublishVolume(within(t, callTime), &csi.NodePublishVolumeRequest{
		VolumeId:          v.id,
		PublishContext:    v.publishContext(),
		StagingTargetPath: v.staging,
		TargetPath:        v.target,
		VolumeCapability:  v.capability,
		Readonly:          readOnly,
	})
	return err
}

func (p *plugin) stats(t *testing.T, v *volume) error {
	t.Helper()
	_, err := p.NodeGetVolumeStats(
		within(t, callTime),
		&csi.NodeGetVolumeStatsRequest{VolumeId: v.id, VolumePath: v.target, StagingTargetPath: v.staging},
	)
	return err
}

func (p *plugin) unpublish(t *testing.T, v *volume) error {
	t.Helper()
	_, err := p.NodeUnpublishVolume(
		within(t, callTime),
		&csi.NodeUnpublishVolumeRequest{VolumeId: v.id, TargetPath: v.target},
	)
	return err
}

func (p *plugin) unstage(t *testing.T, v *volume) error {
	t.Helper()
	_, err := p.NodeUnstageVolume(
		within(t, callTime),
		&csi.NodeUnstageVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staging},
	)
	return err
}

// stageAndPublish stages and publishes the volume. Both calls must succeed.
func (p *plugin) stageAndPublish(t *testing.T, v *volume) {
	t.Helper()
	succeed(t, p.stage(t, v))
	succeed(t, p.publish(t, v))
	succeed(t, p.stats(t, v))
}

// unpublishAndUnstage removes the volume from the guest, and checks that nothing of it is left.
func (p *plugin) unpublishAndUnstage(t *testing.T, v *volume) {
	t.Helper()
	succeed(t, p.unpublish(t, v))
	succeed(t, p.unstage(t, v))
	p.checkGone(t, v)
}

// checkGone checks that the volume has no mount and no target path, as the CSI specification demands.
func (p *plugin) checkGone(t *testing.T, v *volume) {
	t.Helper()
	for line := range strings.Lines(p.machine.sh(t, "cat /proc/self/mountinfo")) {
		if strings.Contains(line, v.folder) {
			t.Errorf("left in the mount table: %s", line)
		}
	}
	if left := p.machine.sh(t, "find %s -mindepth 1 ! -path %s", v.folder, v.staging); left != "" {
		t.Errorf("left below %s:\n%s", v.folder, left)
	}
}

// write writes data to the published volume, flushes it to the disk, and returns it.
func (p *plugin) write(t *testing.T, v *volume) (data string) {
	t.Helper()
	data = rand.Text()
	p.machine.sh(t, "printf %s | dd of=%s conv=notrunc,fsync", data, v.data())
	return data
}

// check checks that the published volume has the data.
func (p *plugin) check(t *testing.T, v *volume, data string) {
	t.Helper()
	if read := p.machine.sh(t, "head -c %d %s", len(data), v.data()); read != data {
		t.Errorf("%s: read %[3]q, want %[2]q", v.name, data, read)
	}
}

// data is the path that write writes to: a file, or the device.
func (v *volume) data() string {
	if v.isBlock() {
		return v.target
	}
	return path.Join(v.target, "data")
}

func succeed(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// fail checks the code of an error, and logs the error's message.
func fail(t *testing.T, err error, want codes.Code) {
	t.Helper()
	if got := status.Code(err); got != want {
		t.Fatalf("the answer is %s (%v), not %s", got, err, want)
	}
	t.Logf("%v", err)
}

// entry is a line of the plugin's log.
type entry struct {
	Time     time.Time
	Msg      string
	VolumeID string `json:"volume_id"`
	Duration time.Duration
}

// entries returns the log's lines about a volume with this message.
func (p *plugin) entries(t *testing.T, msg, volumeID string) (found []entry) {
	t.Helper()
	for line := range strings.Lines(p.machine.text(t, p.machine.pluginLog)) {
		var e entry
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			continue // the last line may be incomplete
		}
		if e.Msg == msg && e.VolumeID == volumeID {
			found = append(found, e)
		}
	}
	return found
}

// name returns the guest kernel's name of the disk in a slot, such as nvme1n1. It is empty if the kernel shows no
// disk.
func (m *machine) name(t *testing.T, slot int) string {
	t.Helper()
	return strings.TrimSpace(
		m.sh(
			t,
			"cd /sys/block && for disk in nvme*; do case $(readlink $disk) in */0000:00:%s.0/*) echo $disk;; esac; done",
			address(slot),
		),
	)
}

// awaitName waits until the guest's kernel shows the disk in a slot, and returns its name.
func (m *machine) awaitName(t *testing.T, slot int) (name string) {
	t.Helper()
	m.await(t, plugTime, fmt.Sprintf("the disk in slot %d", slot), func() bool {
		name = m.name(t, slot)
		return name != ""
	})
	return name
}
