// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package device

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"
)

// OriginBlank is the origin of a disk that the rack made without content. Of any other the whole is read.
const OriginBlank = "blank"

// BlankOptions say how much proof is asked for.
type BlankOptions struct {
	// DiskID is the disk's UUID on the rack, which its format marker bears.
	DiskID uuid.UUID
	// Origin is what the rack made the disk from: [OriginBlank], or anything else.
	Origin string
	// ScanLimit is the size in bytes up to which a disk of another origin is read as a whole; a larger one is refused.
	ScanLimit int64
	// Interrupted describes a format of this very disk that was begun and not finished, nil when there was none.
	Interrupted *InterruptedFormat
}

// InterruptedFormat is what is known of a format that did not end. It makes [ProveBlank] accept what that format may have
// left, and nothing else.
type InterruptedFormat struct {
	// UUID is the filesystem UUID that the format was making.
	UUID string
	// Untouched says that nobody else has written to the disk since: it has not left this guest, or it bears its marker.
	Untouched bool
}

// Blank is a disk that was proved to hold nothing, kept under lock. Only [ProveBlank] makes one, and it serves once: see
// [Blank.Format]. The caller closes it in any case.
type Blank struct {
	dev       Device
	diskID    uuid.UUID
	remains   bool
	sequence  uint64
	locked    *os.File // a plain descriptor with flock, held until Close: udev leaves a locked disk alone
	exclusive *os.File // an exclusive one, held until mkfs takes its own
}

// lockTimeout is how long udev may look at a new disk before its lock counts as somebody else's.
const lockTimeout = 5 * time.Second

// ProveBlank reads the disk, with every other user locked out, and returns the proof that nothing is on it:
//
//   - nobody holds the device, and blkid knows nothing on it;
//   - the first and last MiB and every place where something known keeps a superblock or the copy of one are zero;
//   - of a disk whose origin is not [OriginBlank], every byte is.
//
// Anything else is [ErrNotBlank] with what was found, a read error or a short read included; a device that is held is
// [ErrInUse]. A read of the whole disk takes as long as the disk takes and ends early when ctx ends.
//
// With an interrupted format, a filesystem with that format's UUID that was never mounted is no obstacle either, and
// neither is anything without a signature on a disk that nobody else has written to since.
func ProveBlank(ctx context.Context, dev Device, options BlankOptions) (*Blank, error) {
	if options.Origin != OriginBlank && dev.SizeBytes > options.ScanLimit {
		return nil, fmt.Errorf(
			"%w %s: it was made from a snapshot or image, no filesystem is found on it, and its %d bytes are more than the %d that are read as a whole to prove it blank: "+
				"raise --blank-scan-limit, or make the filesystem by hand if the disk is meant to be empty",
			ErrNotBlank,
			dev,
			dev.SizeBytes,
			options.ScanLimit,
		)
	}
	blank := &Blank{dev: dev, diskID: options.DiskID}
	if err := blank.prove(ctx, options); err != nil {
		return nil, errors.Join(err, blank.Close())
	}
	return blank, nil
}

func (b *Blank) prove(ctx context.Context, options BlankOptions) (err error) {
	if b.locked, err = b.dev.Open(unix.O_RDONLY); err != nil {
		return err
	}
	if err := lockDisk(ctx, b.locked); err != nil {
		return fmt.Errorf("%w: %s: %w", ErrInUse, b.dev, err)
	}
	if b.exclusive, err = b.dev.Open(unix.O_RDONLY | unix.O_EXCL); err != nil {
		return err
	}
	if b.sequence, err = Sequence(b.exclusive); err != nil {
		return fmt.Errorf("%w %s: sequence number: %w", ErrNotBlank, b.dev, err)
	}
	if err := b.scan(ctx, options); err != nil {
		return err
	}
	return b.verifyUnchanged()
}

func (b *Blank) scan(ctx context.Context, options BlankOptions) error {
	found, err := findByte(ctx, b.exclusive, append(headAndTail(b.dev.SizeBytes), signatures(b.dev.SizeBytes)...))
	if err != nil {
		return fmt.Errorf("%w %s: %w", ErrNotBlank, b.dev, err)
	}
	content, err := probe(ctx, b.dev)
	if err != nil {
		return fmt.Errorf("%w %s: %w", ErrNotBlank, b.dev, err)
	}
	if options.Interrupted != nil {
		b.remains, err = options.Interrupted.covers(b.dev, content)
		if err != nil {
			return fmt.Errorf("%w %s: %w", ErrNotBlank, b.dev, err)
		}
		if b.remains {
			return nil
		}
	}
	if !content.Empty() {
		return fmt.Errorf("%w %s: it holds %s", ErrNotBlank, b.dev, content)
	}
	if found == "" && options.Origin != OriginBlank {
		if found, err = findByte(ctx, b.exclusive, []region{{"", 0, b.dev.SizeBytes}}); err != nil {
			return fmt.Errorf("%w %s: %w", ErrNotBlank, b.dev, err)
		}
	}
	if found != "" {
		return fmt.Errorf(
			"%w %s: there is data, %s: if it is of no use, make a new volume or zero the disk by hand (blkdiscard --zeroout)",
			ErrNotBlank,
			b.dev,
			found,
		)
	}
	return nil
}

// covers reports whether all that was found on the disk can be what the interrupted format left.
func (i *InterruptedFormat) covers(dev Device, content Content) (bool, error) {
	if content.Empty() {
		return i.Untouched, nil
	}
	if i.UUID == "" || content.UUID != i.UUID || content.PartitionTable != "" {
		return false, nil
	}
	return NeverMounted(dev, content)
}

// Device is the disk that is blank.
func (b *Blank) Device() Device { return b.dev }

// HasRemains reports whether remains of an interrupted format are on the disk.
func (b *Blank) HasRemains() bool { return b.remains }

// Sequence is the kernel's sequence number of the disk, see [Sequence].
func (b *Blank) Sequence() uint64 { return b.sequence }

// Format puts the format marker on the disk, see [HasFormatMarker], wipes what an interrupted format left, so that no mkfs has to be
// told to overwrite anything, drops the exclusive claim, because mkfs takes its own and would
// refuse next to ours, and calls mkfs at once with the path of the device. That the path still leads to the disk that was read is verified before and after. What
// remains is the moment between dropping the claim and mkfs taking its own: who takes the device in it makes mkfs fail,
// but bytes that root writes to a blank volume's device in it, past every lock, would be lost.
//
// A Blank serves once: a second call is [ErrNotBlank], like one of a Blank that no proof stands behind.
func (b *Blank) Format(mkfs func(path string) error) error {
	if b == nil || b.exclusive == nil {
		return fmt.Errorf("%w: the disk was not proved blank", ErrNotBlank)
	}
	if err := b.verifyUnchanged(); err != nil {
		return err
	}
	if err := b.markAndWipe(); err != nil {
		return fmt.Errorf("%w %s: write the format marker: %w", ErrNotBlank, b.dev, err)
	}
	exclusive := b.exclusive
	b.exclusive = nil
	if err := exclusive.Close(); err != nil {
		return fmt.Errorf("%w %s: %w", ErrNotBlank, b.dev, err)
	}
	if err := mkfs(b.dev.Path); err != nil {
		return err
	}
	return b.verifyUnchanged()
}

// markAndWipe brings marker and wiping to stable storage, in this order.
func (b *Blank) markAndWipe() (err error) {
	file, err := b.dev.Open(unix.O_RDWR)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	if err := formatMarker(b.dev, b.diskID).write(file); err != nil || !b.remains {
		return err
	}
	for _, r := range append(headAndTail(b.dev.SizeBytes), signatures(b.dev.SizeBytes)...) {
		for offset := r.offset; offset < r.offset+r.length; offset += chunkBytes {
			if _, err := file.WriteAt(zeros[:min(chunkBytes, r.offset+r.length-offset)], offset); err != nil {
				return err
			}
		}
	}
	return file.Sync()
}

// Close lets go of the disk. It is safe to repeat, and on nil.
func (b *Blank) Close() error {
	if b == nil {
		return nil
	}
	var errs []error
	for _, file := range []**os.File{&b.exclusive, &b.locked} {
		if *file != nil {
			errs = append(errs, (*file).Close())
			*file = nil
		}
	}
	return errors.Join(errs...)
}

// verifyUnchanged verifies that the path leads to the disk that is held, which still has its number, size and sequence number.
func (b *Blank) verifyUnchanged() error {
	if err := b.dev.verify(b.locked); err != nil {
		return fmt.Errorf("%w: %w", ErrNotBlank, err)
	}
	err := b.dev.withFile(func(file *os.File) error {
		sequence, err := Sequence(file)
		if err == nil && sequence != b.sequence {
			err = fmt.Errorf("%w: another disk took its place: sequence number %d, now %d", ErrMismatch, b.sequence, sequence)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("%w %s: %w", ErrNotBlank, b.dev, err)
	}
	return nil
}

// lockDisk takes the lock that keeps udev, and everybody else who asks, away from the disk. udev itself holds it for the
// moment in which it looks at a new disk.
func lockDisk(ctx context.Context, file *os.File) error {
	ctx, cancel := context.WithTimeout(ctx, lockTimeout)
	defer cancel()
	ticker := time.NewTicker(pollInterval)
	defer ticker.Stop()
	for {
		err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("another program keeps it locked: %w", ctx.Err())
		case <-ticker.C:
		}
	}
}

const chunkBytes = 64 << 10

var zeros [chunkBytes]byte

// findByte reads the regions and says where the first byte lies that is not zero; empty when there is none. Of a large region
// what is read is dropped from the page cache again: a scan must not push out what the guest's programs work with.
func findByte(ctx context.Context, file *os.File, regions []region) (found string, err error) {
	var longest int64
	for _, r := range regions {
		longest = max(longest, r.length)
	}
	buffer := make([]byte, min(chunkBytes, longest))
	for _, r := range regions {
		if r.length <= mib {
			// The kernel then reads all of these at a time, instead of each when its turn comes; advice only.
			_ = unix.Fadvise(int(file.Fd()), r.offset, r.length, unix.FADV_WILLNEED)
		}
	}
	for _, r := range regions {
		for offset := r.offset; offset < r.offset+r.length; {
			if err := ctx.Err(); err != nil {
				return "", err
			}
			chunk := buffer[:min(chunkBytes, r.offset+r.length-offset)]
			n, err := file.ReadAt(chunk, offset)
			if n < len(chunk) {
				if err == nil || errors.Is(err, io.EOF) {
					err = io.ErrUnexpectedEOF
				}
				return "", fmt.Errorf("read of %d bytes at %d ended after %d: %w", len(chunk), offset, n, err)
			}
			if found == "" && !bytes.Equal(chunk, zeros[:len(chunk)]) {
				i := slices.IndexFunc(chunk, func(b byte) bool { return b != 0 })
				found = fmt.Sprintf("first at byte %d", offset+int64(i))
				if r.what != "" {
					found += " (" + r.what + ")"
				}
			}
			if r.length > mib {
				// Advice only: where it is not taken, more stays cached. It takes longer than reading, so what is little stays.
				_ = unix.Fadvise(int(file.Fd()), offset, int64(len(chunk)), unix.FADV_DONTNEED)
			}
			offset += int64(len(chunk))
		}
	}
	return found, nil
}
