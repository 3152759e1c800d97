// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

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

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// volume is what a user of the commands remembers about a volume.
type volume struct {
	id string
	// snapshot is the ID of its latest snapshot.
	snapshot string
	// diskName is the name of its disk on the rack.
	diskName string
	// written is the checksum of the data that was written to it or to its source, in hexadecimal.
	written string
}

// step is one step of the story: a command, or an action of the volume's user. If the volume is not in the location
// want afterwards, the demo fails.
type step struct {
	// says is the purpose of the step; empty if it continues the previous step.
	says string
	// types is the command, and at the shell that runs it. calls are the CSI calls that change something.
	at           *shell
	types, calls string
	// refused means that the command must fail with exit code exitBlocked.
	refused bool
	volume  *volume
	// do runs after the command, with its output; it may be nil.
	do   func(ctx context.Context, v *volume, printed string) error
	want view
}

const (
	gib       = int64(1) << 30
	sizeBytes = gib
	// stepTimeout is how long a step may take.
	stepTimeout = time.Minute
)

// play executes the steps and checks the volume's location after each.
func (d *demo) play(ctx context.Context, v *volume, steps []step) error {
	number, title := 0, ""
	for _, s := range steps {
		s.volume = v
		if s.says != "" {
			d.out.blank()
			number, title = d.out.step(s.says), s.says
		}
		if err := d.take(ctx, s); err != nil {
			return fmt.Errorf("step %d (%s): %w", number, title, err)
		}
	}
	return nil
}

func (d *demo) take(ctx context.Context, s step) error {
	limited, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	printed, err := d.carryOut(limited, s)
	if err != nil {
		return err
	}
	if s.do != nil {
		if err := s.do(limited, s.volume, printed); err != nil {
			return explain(err)
		}
	}
	seen, err := d.look(limited, s.volume)
	if err != nil {
		return err
	}
	d.out.view(seen)
	if seen != s.want {
		return fmt.Errorf("the volume is not where it should be: %s", s.want)
	}
	return d.out.pause(ctx)
}

// carryOut runs and prints the command of a step, if it has one, and its output.
func (d *demo) carryOut(ctx context.Context, s step) (printed string, err error) {
	if s.types == "" {
		return "", nil
	}
	d.out.command(s.at.prompt, s.types, s.calls)
	printed, code, err := s.at.run(ctx, s.types)
	switch {
	case err != nil:
		return "", err
	case s.refused && code == exitBlocked:
		d.out.quotation(printed)
		d.out.quotation(fmt.Sprintf("(exit code %d)", code))
	case s.refused:
		return "", fmt.Errorf(
			"%s should end with exit code %d, because the rack rejects it, but ends with %d: %s",
			s.types,
			exitBlocked,
			code,
			printed,
		)
	case code != 0:
		return "", fmt.Errorf("%s: %s", s.types, printed)
	default:
		d.out.output(printed)
	}
	return printed, nil
}

// life is the life of a volume, with a snapshot that outlives it. Without nodes it leaves out their steps.
func (d *demo) life() []step {
	a, b := d.processes.nodes[0], d.processes.nodes[1]
	return slices.Concat(
		[]step{
			{
				says:  "A database needs 1 GiB: make a volume.",
				at:    a.shell,
				types: "oxide-csi volume create ledger --size=1GiB",
				calls: "CreateVolume",
				do:    d.created,
				want:  d.seen(detached),
			},
		},
		d.up(a, "ledger", "It is to run on node-a: attach the volume there", ", format it, since it is blank, and mount it"),
		d.work(a, "The database writes a file and syncs it.", d.write),
		[]step{
			{
				says:  "Keep what the volume holds now: take a snapshot.",
				at:    a.shell,
				types: "oxide-csi snapshot create monday --volume=ledger",
				calls: "CreateSnapshot",
				do:    d.snapshotTaken,
				want:  d.seen(mounted(a)),
			},
		},
		d.down(a, "ledger", "The database is to move: take the volume from node-a."),
		d.up(b, "ledger", "Attach it to node-b", ", find its filesystem, and mount it"),
		d.work(b, "The database reads its file.", d.read),
		d.down(b, "ledger", "The database is given up: take the volume away, and delete it."),
		[]step{d.deletion(b, "ledger")},
	)
}

// afterlife is the life of a volume from the snapshot of the other volume.
func (d *demo) afterlife(snapshot string) []step {
	b := d.processes.nodes[1]
	return slices.Concat(
		[]step{
			{
				says:  "Somebody wants to see it once more: make a volume of what the snapshot holds.",
				at:    b.shell,
				types: "oxide-csi volume create copy --from-snapshot=" + snapshot,
				calls: "CreateVolume",
				do:    d.created,
				want:  d.seen(detached),
			},
		},
		d.up(b, "copy", "", ""),
		d.work(b, "The file is there.", d.read),
		d.down(b, "copy", "That was all: delete volume and snapshot."),
		[]step{
			d.deletion(b, "copy"),
			{at: b.shell, types: "oxide-csi snapshot delete " + snapshot, calls: "DeleteSnapshot", want: d.seen(deleted)},
		},
	)
}

// refusal is the life of a volume on a rack that does not attach disks to running instances.
func (d *demo) refusal() []step {
	a := d.processes.nodes[0]
	return []step{
		{
			says:  "Make another volume, and attach it to node-a, which runs.",
			at:    a.shell,
			types: "oxide-csi volume create refused --size=1GiB",
			calls: "CreateVolume",
			do:    d.created,
			want:  d.seen(detached),
		},
		{
			at:      a.shell,
			types:   "oxide-csi volume attach refused" + a.named(),
			calls:   "ControllerPublishVolume",
			refused: true,
			want:    d.seen(detached),
		},
		d.deletion(a, "refused"),
	}
}

func (d *demo) deletion(m *machine, name string) step {
	return step{at: m.shell, types: "oxide-csi volume delete " + name, calls: "DeleteVolume", want: d.seen(deleted)}
}

// up makes a volume available to its user on a node. goesOn continues the text if there are nodes.
func (d *demo) up(m *machine, name, says, goesOn string) []step {
	attach := step{
		at:    m.shell,
		types: "oxide-csi volume attach " + name + m.named(),
		calls: "ControllerPublishVolume",
		want:  d.seen(attached(m)),
	}
	mount := step{
		at:    m.shell,
		types: "oxide-csi volume mount " + name + " " + targetFolder,
		calls: "NodeStageVolume, NodePublishVolume",
		want:  d.seen(mounted(m)),
	}
	if m.plugin == nil {
		goesOn = ""
	}
	if says != "" {
		attach.says = says + goesOn + "."
	}
	if m.plugin == nil {
		return []step{attach}
	}
	return []step{attach, mount}
}

// down reverts up.
func (d *demo) down(m *machine, name, says string) []step {
	if m.plugin == nil {
		return []step{{says: says, at: m.shell, types: "oxide-csi volume detach " + name + m.named() + " --unmounted",
			calls: "ControllerUnpublishVolume", want: d.seen(detached)}}
	}
	return []step{
		{says: says, at: m.shell, types: "oxide-csi volume unmount " + name + " " + targetFolder,
			calls: "NodeUnpublishVolume, NodeUnstageVolume", want: d.seen(attached(m))},
		{at: m.shell, types: "oxide-csi volume detach " + name, calls: "ControllerUnpublishVolume", want: d.seen(detached)},
	}
}

// work is an action of the volume's user, which the plugin does not see.
func (d *demo) work(m *machine, says string, do func(*machine, *volume) error) []step {
	if m.plugin == nil {
		return nil
	}
	return []step{
		{says: says, do: func(_ context.Context, v *volume, _ string) error { return do(m, v) }, want: d.seen(mounted(m))},
	}
}

// created finds the volume on the rack by the ID that the command printed.
func (d *demo) created(ctx context.Context, v *volume, printed string) error {
	v.id = printed
	d.volumes = append(d.volumes, v.id)
	disk, err := d.disk(ctx, v.id)
	if err != nil {
		return err
	}
	v.diskName = disk.Name
	d.out.fact("disk", "%s, %d GiB", disk.Name, disk.Size/gib)
	if disk.Size != sizeBytes {
		return fmt.Errorf("the volume was requested with %d bytes, but its disk has %d", sizeBytes, disk.Size)
	}
	return nil
}

func (d *demo) snapshotTaken(_ context.Context, v *volume, printed string) error {
	v.snapshot = printed
	return nil
}

const (
	fileName      = "ledger.db"
	fileMebibytes = 16
)

// fileContent is the content that the database writes: pseudo-random bytes with a fixed seed, so that the checksum is
// the same in each run.
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
	defer func() { _ = f.Close() }() // it was only read
	hash := sha256.New()
	size, err := io.Copy(hash, f)
	if err != nil {
		return err
	}
	sum := hex.EncodeToString(hash.Sum(nil))
	if sum != v.written {
		d.out.fact("read", "%d MiB, sha256 %s", size>>20, sum)
		return fmt.Errorf("the checksum of %s on %s differs from that of the written data", fileName, m.instance.Name)
	}
	d.out.fact("read", "%d MiB, sha256 %s, same", size>>20, sum)
	return nil
}

// explain makes one line of an error, and adds the code of an error from a CSI call.
func explain(err error) error {
	if s, ok := status.FromError(err); ok && s.Code() != codes.OK {
		return fmt.Errorf("%s: %s", s.Code(), s.Message())
	}
	return errors.New(strings.ReplaceAll(err.Error(), "\n", "; "))
}
