//go:build linux

package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// volume is what an orchestrator remembers of a volume from one call to the next.
type volume struct {
	name, id                string
	context, publishContext map[string]string
	// diskName is the name of its disk on the rack, as the rack showed it.
	diskName string
	// written is the checksum of what was written to it, in hexadecimal.
	written string
}

// step is one step of the story. After it the volume must be where want says, or the demo fails.
type step struct {
	// says is what the orchestrator wants, call is the CSI call that it makes; empty where it makes none.
	says, call string
	volume     *volume
	do         func(ctx context.Context, v *volume) error
	want       view
	// begins says that something new begins here, which an empty line shows.
	begins bool
}

const (
	gib       = int64(1) << 30
	sizeBytes = gib
	// stepTimeout is how long a step may take; an orchestrator would ask again.
	stepTimeout = time.Minute
)

// capability is how the volume is used: one filesystem, written to from one node.
var capability = &csi.VolumeCapability{
	AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
	AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
}

// play takes the steps one after the other, and looks at the volume after each.
func (d *demo) play(ctx context.Context, steps []step) error {
	for _, s := range steps {
		if s.begins {
			d.out.blank()
		}
		number := d.out.step(s.says, s.call)
		if err := d.take(ctx, s); err != nil {
			return fmt.Errorf("step %d (%s): %w", number, s.says, err)
		}
	}
	return nil
}

func (d *demo) take(ctx context.Context, s step) error {
	limited, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	if err := s.do(limited, s.volume); err != nil {
		return explain(err)
	}
	seen, err := d.look(limited, s.volume)
	if err != nil {
		return err
	}
	d.out.view(seen)
	if seen != s.want {
		return fmt.Errorf("the volume should be here: %s", s.want)
	}
	return d.out.pause(ctx)
}

// life is the whole life of a volume. Without nodes, the steps that they take are left out.
func (d *demo) life(v *volume) []step {
	a, b := d.cast.nodes[0], d.cast.nodes[1]
	steps := slices.Concat(
		[]step{{says: "A database needs 1 GiB: make a volume.", call: "CreateVolume", do: d.create, want: d.seen(detached), begins: true}},
		d.up(a,
			"It is to run on node-a: attach the volume to that instance.",
			"On node-a: find the disk, see that it is blank, format it, mount it."),
		d.work(a, "The database writes a file and syncs it.", d.write),
		d.down(a,
			"The database is to move. On node-a: take the filesystem from it.",
			"Detach the volume from node-a."),
		d.up(b,
			"Attach it to node-b.",
			"On node-b: find the disk, see its filesystem, mount it."),
		d.work(b, "The database reads its file.", d.read),
		d.down(b,
			"The database is given up. On node-b: take the filesystem from it.",
			"Detach the volume from node-b."),
		[]step{{says: "Nobody needs the volume any more: delete it.", call: "DeleteVolume", do: d.delete, want: d.seen(deleted)}},
	)
	return tellingOf(v, steps)
}

// refusal is what happens to a volume on a rack that attaches nothing to a running instance.
func (d *demo) refusal(v *volume) []step {
	a := d.cast.nodes[0]
	return tellingOf(v, []step{
		{says: "Make another volume.", call: "CreateVolume", do: d.create, want: d.seen(detached)},
		{says: "Attach it to node-a, which runs.", call: "ControllerPublishVolume", do: a.refuse(d), want: d.seen(detached)},
		{says: "Delete it.", call: "DeleteVolume", do: d.delete, want: d.seen(deleted)},
	})
}

func tellingOf(v *volume, steps []step) []step {
	for i := range steps {
		steps[i].volume = v
	}
	return steps
}

// up brings the volume to whoever uses it on a node.
func (d *demo) up(m *machine, attach, stage string) []step {
	steps := []step{{says: attach, call: "ControllerPublishVolume", do: m.attach(d), want: d.seen(attached(m)), begins: true}}
	if m.plugin == nil {
		return steps
	}
	name := m.instance.Name
	return append(steps,
		step{says: stage, call: "NodeStageVolume", do: m.stage, want: d.seen(staged(m))},
		step{says: "On " + name + ": show the filesystem to the database.", call: "NodePublishVolume", do: m.publish, want: d.seen(published(m))})
}

// down takes it away again.
func (d *demo) down(m *machine, unpublish, detach string) []step {
	detaching := step{says: detach, call: "ControllerUnpublishVolume", do: m.detach(d), want: d.seen(detached)}
	if m.plugin == nil {
		detaching.begins = true
		return []step{detaching}
	}
	return []step{
		{says: unpublish, call: "NodeUnpublishVolume", do: m.unpublish, want: d.seen(staged(m)), begins: true},
		{says: "On " + m.instance.Name + ": unmount it.", call: "NodeUnstageVolume", do: m.unstage, want: d.seen(attached(m))},
		detaching,
	}
}

// work is what the one who uses the volume does, which no orchestrator sees.
func (d *demo) work(m *machine, says string, do func(*machine, *volume) error) []step {
	if m.plugin == nil {
		return nil
	}
	return []step{{says: says, do: func(_ context.Context, v *volume) error { return do(m, v) }, want: d.seen(published(m))}}
}

func (d *demo) create(ctx context.Context, v *volume) error {
	resp, err := d.cast.controller.CreateVolume(ctx, &csi.CreateVolumeRequest{
		Name:               v.name,
		CapacityRange:      &csi.CapacityRange{RequiredBytes: sizeBytes},
		VolumeCapabilities: []*csi.VolumeCapability{capability},
	})
	if err != nil {
		return err
	}
	v.id, v.context = resp.GetVolume().GetVolumeId(), resp.GetVolume().GetVolumeContext()
	d.volumes = append(d.volumes, v.id)
	disk, err := d.disk(ctx, v.id)
	if err != nil {
		return err
	}
	v.diskName = disk.Name
	d.out.fact("volume", "%s, the rack's disk %s of %d GiB", v.id, disk.Name, disk.Size/gib)
	if got := resp.GetVolume().GetCapacityBytes(); got != disk.Size || got != sizeBytes {
		return fmt.Errorf("%d bytes were asked for, the plugin says %d, the rack's disk has %d", sizeBytes, got, disk.Size)
	}
	return nil
}

func (d *demo) delete(ctx context.Context, v *volume) error {
	_, err := d.cast.controller.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: v.id})
	return err
}

func (m *machine) attach(d *demo) func(context.Context, *volume) error {
	return func(ctx context.Context, v *volume) error {
		resp, err := d.cast.controller.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{
			VolumeId: v.id, NodeId: m.id, VolumeCapability: capability, VolumeContext: v.context,
		})
		v.publishContext = resp.GetPublishContext()
		return err
	}
}

// refuse attaches the volume where the rack will not have it.
func (m *machine) refuse(d *demo) func(context.Context, *volume) error {
	attach := m.attach(d)
	return func(ctx context.Context, v *volume) error {
		err := attach(ctx, v)
		if err == nil {
			return errors.New("the volume was attached to a running instance, which this rack should refuse")
		}
		if status.Code(err) != codes.FailedPrecondition {
			return fmt.Errorf("FAILED_PRECONDITION should be the answer, not this: %w", err)
		}
		d.out.quotation("refused", "FAILED_PRECONDITION: "+status.Convert(err).Message())
		return nil
	}
}

func (m *machine) detach(d *demo) func(context.Context, *volume) error {
	return func(ctx context.Context, v *volume) error {
		_, err := d.cast.controller.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: v.id, NodeId: m.id})
		return err
	}
}

func (m *machine) stage(ctx context.Context, v *volume) error {
	// The orchestrator makes the folder: CSI spec, NodeStageVolume.
	if err := os.MkdirAll(m.staging, 0o755); err != nil {
		return err
	}
	_, err := m.plugin.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
		VolumeId: v.id, PublishContext: v.publishContext, StagingTargetPath: m.staging, VolumeCapability: capability, VolumeContext: v.context,
	})
	return err
}

func (m *machine) publish(ctx context.Context, v *volume) error {
	_, err := m.plugin.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
		VolumeId: v.id, PublishContext: v.publishContext, StagingTargetPath: m.staging, TargetPath: m.target,
		VolumeCapability: capability, VolumeContext: v.context,
	})
	return err
}

func (m *machine) unpublish(ctx context.Context, v *volume) error {
	_, err := m.plugin.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: v.id, TargetPath: m.target})
	return err
}

func (m *machine) unstage(ctx context.Context, v *volume) error {
	_, err := m.plugin.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: v.id, StagingTargetPath: m.staging})
	return err
}

const (
	fileName      = "ledger.db"
	fileMebibytes = 16
)

// fileContent is what the database writes: the same random bytes in each run, so that their checksum is known.
func fileContent() io.Reader {
	seed := [32]byte{}
	copy(seed[:], "the ledger of a database")
	return io.LimitReader(rand.NewChaCha8(seed), fileMebibytes<<20)
}

func (d *demo) write(m *machine, v *volume) error {
	f, err := os.OpenFile(filepath.Join(m.target, fileName), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	hash := sha256.New()
	_, err = io.Copy(io.MultiWriter(f, hash), fileContent())
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	v.written = hex.EncodeToString(hash.Sum(nil))
	d.out.fact("wrote", "%d MiB, sha256 %s", fileMebibytes, v.written)
	return nil
}

func (d *demo) read(m *machine, v *volume) error {
	f, err := os.Open(filepath.Join(m.target, fileName))
	if err != nil {
		return err
	}
	defer f.Close() // Opened for reading.
	hash := sha256.New()
	size, err := io.Copy(hash, f)
	if err != nil {
		return err
	}
	sum := hex.EncodeToString(hash.Sum(nil))
	if sum != v.written {
		d.out.fact("read", "%d MiB, sha256 %s", size>>20, sum)
		return fmt.Errorf("the checksum differs: %s does not hold on %s what was written to it", fileName, m.instance.Name)
	}
	d.out.fact("read", "%d MiB, sha256 %s, same", size>>20, sum)
	return nil
}

// explain makes one line of an error, and names the code of a CSI call's.
func explain(err error) error {
	if s, ok := status.FromError(err); ok && s.Code() != codes.OK {
		return fmt.Errorf("%s: %s", s.Code(), s.Message())
	}
	return errors.New(strings.ReplaceAll(err.Error(), "\n", "; "))
}
