// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

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

// OriginBlank is the origin of a disk that the rack made without content. A disk of any other origin is read as a
// whole.
const OriginBlank = "blank"

// BlankOptions say how much proof is required.
type BlankOptions struct {
	// VolumeID is the ID of the volume. The format marker contains it.
	VolumeID uuid.UUID
	// Origin is what the rack made the disk from: [OriginBlank], or anything else.
	Origin string
	// RawBlock says that the disk may have been used as raw block. Such a disk is read as a whole too: its data need not
	// be where a filesystem has any.
	RawBlock bool
	// ScanLimit is the size in bytes up to which a disk of another origin is read as a whole. A larger disk is
	// rejected.
	ScanLimit int64
	// Interrupted describes an unfinished format of this disk. It is nil if there was none.
	Interrupted *InterruptedFormat
	// NeverWritten says that the device is the mapping of an encrypted disk whose header has the label
	// [LabelUnformatted]. Its content is noise, or the remains of an interrupted mkfs, and is not read.
	NeverWritten bool
	// Encrypted says that the disk is about to be encrypted. Then the places are read, too, where an encrypted disk has
	// its key slots and the filesystem inside its superblocks. A blank disk for raw block is read as a whole only up to
	// ScanLimit: larger ones could otherwise never be encrypted, and what a workload wrote is behind a header.
	Encrypted bool
}

// luksDataOffset is where the data of an encrypted disk begins: cryptsetup's default for LUKS2.
const luksDataOffset = 16 * mib

// regions are the places that must be zero.
func (o BlankOptions) regions(dev Device) []region {
	all := formatRegions(dev)
	if !o.Encrypted || dev.SizeBytes <= luksDataOffset {
		return all
	}
	all = append(all, region{"header of an encrypted disk", 0, luksDataOffset})
	for _, size := range dev.sizes() {
		for _, offset := range formatMarkerOffsets(size) {
			all = append(all, region{"place of a format marker", offset, formatMarkerBytes})
		}
	}
	return append(all, encryptedData(luksDataOffset, dev)...)
}

// encryptedData are the places behind the header of an encrypted disk where the filesystem inside has its signatures,
// and where a workload writes first.
func encryptedData(offset int64, dev Device) (all []region) {
	inside := dev.insideAt(offset)
	for _, r := range formatRegions(inside) {
		all = append(all, region{"encrypted data, " + r.format, r.offset + offset, r.length})
	}
	return all
}

// CheckNeverWritten returns [ErrNotBlank] if something was written into an encrypted disk whose data begins at offset.
// dev is the disk, not its mapping: where nothing was written, a disk that was blank is still zero. It reads the places
// where mkfs and workloads write first, or all of a disk for raw block that is not larger than ScanLimit.
func CheckNeverWritten(ctx context.Context, dev Device, offset int64, options BlankOptions) error {
	regions := encryptedData(offset, dev)
	if options.RawBlock && dev.SizeBytes <= options.ScanLimit {
		regions = append(regions, region{"encrypted data", offset, dev.SizeBytes - offset})
	}
	found := ""
	err := dev.withFile(func(file *os.File) (err error) {
		// What the mapping writes does not change the kernel's cache of the disk below.
		if err := unix.IoctlSetInt(int(file.Fd()), unix.BLKFLSBUF, 0); err != nil {
			return fmt.Errorf("drop the cache: %w", err)
		}
		found, err = findByte(ctx, file, regions)
		return err
	})
	if err == nil && found != "" {
		err = errors.New(found)
	}
	if err != nil {
		return fmt.Errorf("%w %s: %w", ErrNotBlank, dev, err)
	}
	return nil
}

// wholeDisk reports whether every byte of a disk of this size must be zero.
func (o BlankOptions) wholeDisk(sizeBytes int64) bool {
	if o.Encrypted && o.Origin == OriginBlank {
		return o.RawBlock && sizeBytes <= o.ScanLimit
	}
	return o.Origin != OriginBlank || o.RawBlock
}

// InterruptedFormat describes a format that did not finish. [ProveBlank] then accepts what this format may have left on
// the disk, and nothing else.
type InterruptedFormat struct {
	// UUID is the UUID of the filesystem that the format was making.
	UUID string
	// Untouched says that nothing else has written to the disk since: it has not left this guest, or it has its marker.
	Untouched bool
}

// Blank is a locked disk that was proved to hold nothing. Only [ProveBlank] makes a Blank. It can be formatted once,
// see [Blank.Format]. The caller MUST close it.
type Blank struct {
	dev       Device
	volumeID  uuid.UUID
	remains   bool
	locked    *os.File // opened normally and flocked until Close: udev leaves a locked disk alone
	exclusive *os.File // opened with O_EXCL until mkfs opens the disk
}

// BlockSize returns the size of a logical block of the disk in bytes.
func (b *Blank) BlockSize() (bytes int, err error) {
	return unix.IoctlGetInt(int(b.locked.Fd()), unix.BLKSSZGET)
}

// lockTimeout is how long ProveBlank waits for the lock of another program. udev locks a new disk for a moment.
const lockTimeout = 5 * time.Second

// ProveBlank locks the disk, reads it, and returns the proof that the disk is blank:
//
//   - no other program holds the device, and blkid finds nothing on it;
//   - the first and last MiB are zero, and so is every place where a known format keeps a superblock or a copy of one,
//     also at the sizes that the disk had before the volume grew;
//   - if the origin is not [OriginBlank], or the disk may have been used as raw block, the whole disk is zero.
//
// Otherwise it returns [ErrNotBlank] with what was found, also after a read error or a short read. It returns
// [ErrInUse] if another program holds the device. Reading a whole disk takes long, and stops when ctx ends.
//
// The mapping of an encrypted disk into which nothing was ever written counts as blank, see [BlankOptions]. What it
// shows is then wiped as the remains of an interrupted format are.
//
// If a format of the disk was interrupted, ProveBlank also accepts a filesystem with that format's UUID that was never
// mounted. If nothing else has written to the disk since, it accepts any data without a signature.
func ProveBlank(ctx context.Context, dev Device, options BlankOptions) (*Blank, error) {
	if options.wholeDisk(dev.SizeBytes) && dev.SizeBytes > options.ScanLimit {
		return nil, fmt.Errorf(
			"%w %s: it has no filesystem, and has %d bytes, more than the %d that are scanned: "+
				"raise --blank-scan-limit, or make the filesystem manually if the disk is empty",
			ErrNotBlank,
			dev,
			dev.SizeBytes,
			options.ScanLimit,
		)
	}
	blank := &Blank{dev: dev, volumeID: options.VolumeID}
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
	if b.dev.sequence, err = sequenceOf(b.exclusive); err != nil {
		return fmt.Errorf("%w %s: sequence number: %w", ErrNotBlank, b.dev, err)
	}
	if err := b.scan(ctx, options); err != nil {
		return err
	}
	return b.verifyUnchanged()
}

func (b *Blank) scan(ctx context.Context, options BlankOptions) error {
	if options.NeverWritten {
		b.remains = true
		return nil
	}
	if err := b.examine(ctx, options); err != nil {
		return fmt.Errorf("%w %s: %w", ErrNotBlank, b.dev, err)
	}
	return nil
}

// examine returns an error that says what is on the disk, or why that is not known.
func (b *Blank) examine(ctx context.Context, options BlankOptions) error {
	found, err := findByte(ctx, b.exclusive, options.regions(b.dev))
	if err != nil {
		return err
	}
	content, err := probe(ctx, b.dev)
	if err == nil && content.Empty() && found != "" {
		content, err = Probe(ctx, b.dev)
	}
	if err != nil {
		return err
	}
	if options.Interrupted != nil {
		if b.remains, err = options.Interrupted.covers(b.dev, content); err != nil || b.remains {
			return err
		}
	}
	if !content.Empty() {
		return fmt.Errorf("it holds %s", content)
	}
	if found == "" && options.wholeDisk(b.dev.SizeBytes) {
		found, err = findByte(ctx, b.exclusive, []region{{"", 0, b.dev.SizeBytes}})
	}
	if err != nil || found == "" {
		return err
	}
	known, err := findSignature(b.exclusive, options.regions(b.dev))
	if err != nil {
		return err
	}
	if known != "" {
		return fmt.Errorf("it holds %s, %s: use another volume, and ask the owner of the data", known, found)
	}
	return fmt.Errorf("it holds data, %s: create a new volume, or run blkdiscard --zeroout if the data is not needed",
		found)
}

// covers reports whether everything that was found on the disk can come from the interrupted format.
func (i *InterruptedFormat) covers(dev Device, content Content) (bool, error) {
	if content.Empty() {
		return i.Untouched, nil
	}
	if i.UUID == "" || content.UUID != i.UUID || content.PartitionTable != "" {
		return false, nil
	}
	return NeverMounted(dev, content)
}

// Device returns the blank disk.
func (b *Blank) Device() Device { return b.dev }

// HasRemains reports whether the disk holds remains of an interrupted format.
func (b *Blank) HasRemains() bool { return b.remains }

// Sequence returns the kernel's sequence number of the disk, see [Device.Sequence].
func (b *Blank) Sequence() uint64 { return b.dev.sequence }

// Format makes the disk ready for mkfs and calls mkfs with the path of the device:
//
//   - It writes the format marker, see [HasFormatMarker].
//   - It wipes what an interrupted format left, so that mkfs needs no option to overwrite data.
//   - It closes the exclusive descriptor, because mkfs opens the device exclusively itself.
//
// Format verifies before and after that the path leads to the disk that was read. One gap remains, between closing the
// descriptor and the opening by mkfs. If another program opens the device exclusively in this gap, mkfs fails. Bytes
// that root writes to the blank disk in this gap, without any lock, are lost.
//
// A second call returns [ErrNotBlank]. So does a Blank that [ProveBlank] did not make.
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
	if err := closeExclusive(exclusive); err != nil {
		return fmt.Errorf("%w %s: %w", ErrNotBlank, b.dev, err)
	}
	if err := mkfs(b.dev.Path); err != nil {
		return err
	}
	return b.verifyUnchanged()
}

// markAndWipe writes the marker and then wipes remains, each to stable storage.
func (b *Blank) markAndWipe() (err error) {
	file, err := b.dev.Open(unix.O_RDWR)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	if err := formatMarker(b.dev, b.volumeID).write(file); err != nil || !b.remains {
		return err
	}
	for _, r := range formatRegions(b.dev) {
		for offset := r.offset; offset < r.offset+r.length; offset += chunkBytes {
			if _, err := file.WriteAt(zeros[:min(chunkBytes, r.offset+r.length-offset)], offset); err != nil {
				return err
			}
		}
	}
	return file.Sync()
}

// Close releases the disk. It is safe to repeat, and to call on nil.
func (b *Blank) Close() error {
	if b == nil {
		return nil
	}
	var errs []error
	for _, file := range []**os.File{&b.exclusive, &b.locked} {
		if *file != nil {
			errs = append(errs, closeExclusive(*file))
			*file = nil
		}
	}
	return errors.Join(errs...)
}

// verifyUnchanged verifies that the path leads to the disk that this process holds, and that number, size and sequence
// number of the disk are the same.
func (b *Blank) verifyUnchanged() error {
	if err := b.dev.verify(b.locked); err != nil {
		return fmt.Errorf("%w: %w", ErrNotBlank, err)
	}
	if err := b.dev.withFile(func(*os.File) error { return nil }); err != nil {
		return fmt.Errorf("%w %s: %w", ErrNotBlank, b.dev, err)
	}
	return nil
}

// lockDisk takes the flock that keeps udev and other programs that ask for it away from the disk. udev holds this lock
// while it reads a new disk.
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

// findByte reads the regions and returns where the first byte is that is not zero, or "" if there is none. It drops
// what it read of a large region from the page cache: a scan must not evict the pages of the guest's programs.
func findByte(ctx context.Context, file *os.File, regions []region) (found string, err error) {
	var longest int64
	for _, r := range regions {
		longest = max(longest, r.length)
	}
	buffer := make([]byte, min(chunkBytes, longest))
	for _, r := range regions {
		if r.length <= mib {
			// The kernel then reads all small regions at once, not one after the other. This is only advice.
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
				if r.format != "" {
					found += " (" + r.format + ")"
				}
			}
			if r.length > mib {
				// This is only advice: if the kernel ignores it, more stays cached. It takes longer than a read, so
				// small regions stay cached.
				_ = unix.Fadvise(int(file.Fd()), offset, int64(len(chunk)), unix.FADV_DONTNEED)
			}
			offset += int64(len(chunk))
		}
	}
	return found, nil
}
