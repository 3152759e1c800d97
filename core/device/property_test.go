// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package device_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/device/devicetest"
)

// ownUUID is the UUID of the filesystem that the interrupted format of these tests would have made.
const ownUUID = "12345678-1234-5234-8234-123456789abc"

// write is a part of a disk's content. All other bytes are zero.
type write struct {
	offset int64
	bytes  []byte
}

// magics are signatures by which blkid or a person recognises known formats, and other bytes.
var magics = [][]byte{
	{
		1,
	},
	{0xff, 0xff},
	[]byte("data"),
	[]byte("LUKS\xba\xbe\x00\x01"),
	[]byte("LUKS\xba\xbe\x00\x02"),
	[]byte("SKUL\xba\xbe\x00\x02"),
	[]byte("LABELONE"),
	[]byte(
		"SWAPSPACE2",
	),
	[]byte("XFSB\x00\x00\x10\x00"),
	[]byte("_BHRfS_M"),
	{0x53, 0xef},
	{0x55, 0xaa},
	[]byte("EFI PART\x00\x00\x01\x00"),
	[]byte(
		"bluestore block device\n",
	),
	{0x0c, 0xb1, 0xba, 0x00, 0, 0, 0, 0},
	[]byte("hsqs"),
	[]byte("ReIsEr2Fs"),
	[]byte("NTFS    "),
	{0xfc, 0x4e, 0x2b, 0xa9},
	[]byte(
		"CD001",
	),
	[]byte("csi.oxide.computer format marker 1\n"),
	bytes.Repeat([]byte{0xa5}, 5000),
	bytes.Repeat([]byte{0}, 300),
}

// places returns the offsets of the signatures of known formats on a disk of this size, and some other offsets.
func places(size int64) []int64 {
	all := []int64{
		0,
		3,
		446,
		510,
		512,
		1024,
		1024 + 0x38,
		4096,
		4086,
		8192,
		16384,
		32*kib + 1,
		64 * kib,
		64*kib + 0x40,
		128 * kib,
		256*kib + 16*kib,
		512 * kib,
		mib - 1,
		mib,
		mib + 1,
		2 * mib,
		4 * mib,
		8*mib + kib,
		16 * mib,
		32*mib + 2*kib,
		64*mib + 0x40,
		size / 4,
		size / 2,
		size / 4 * 3,
		size / 19 * 3 / 4096 * 4096,
		size - mib,
		size - mib - 1,
		size - 512*kib + 16*kib,
		size - 64*kib,
		size - 8*kib,
		size - 512,
		size - 10,
		size - 1,
		5*mib + 12345,
		11*mib + 1,
	}
	return slices.DeleteFunc(all, func(offset int64) bool { return offset < 0 || offset >= size })
}

// mustBeZero returns the ranges that must be zero on a disk that the rack made blank. The list does not use the
// scanner's list, so that an error there fails the test.
func mustBeZero(size int64) [][2]int64 {
	spans := [][2]int64{{0, mib}, {size - mib, size}}
	for _, start := range []int64{mib, 2 * mib, 4 * mib, 8*mib + kib, 16 * mib, 32*mib + 2*kib, 64*mib + 0x40, size / 4 / 4096 * 4096, size / 2 / 4096 * 4096, size / 4 * 3 / 4096 * 4096} {
		spans = append(spans, [2]int64{start, start + 512})
	}
	return spans
}

// specimen is a disk that has another content in each case.
type specimen struct {
	guest *devicetest.Guest
	disk  *devicetest.Disk
	dev   device.Device
	raw   *os.File
}

func newSpecimen(t testing.TB, size int64) *specimen {
	t.Helper()
	g := devicetest.New(t)
	s := &specimen{guest: g, disk: g.Add(diskName, size)}
	var err error
	if s.dev, err = g.Roots().ByNumber(s.disk.Number); err != nil {
		t.Fatal(err)
	}
	if s.raw, err = os.OpenFile(s.disk.Loop, os.O_RDWR, 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.raw.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// check writes to the disk, calls ProveBlank, and compares the result with the content.
func (s *specimen) check(t *testing.T, writes []write, options device.BlankOptions) {
	t.Helper()
	size := s.dev.SizeBytes
	image := map[int64]byte{} // all bytes that are not zero, by offset
	for i, w := range writes {
		w.bytes = w.bytes[:min(int64(len(w.bytes)), size-w.offset)]
		writes[i] = w
		if _, err := s.raw.WriteAt(w.bytes, w.offset); err != nil {
			t.Fatal(err)
		}
		for j, b := range w.bytes {
			if delete(image, w.offset+int64(j)); b != 0 {
				image[w.offset+int64(j)] = b
			}
		}
	}
	defer func() {
		for _, w := range writes {
			if _, err := s.raw.WriteAt(make([]byte, len(w.bytes)), w.offset); err != nil {
				t.Fatal(err)
			}
		}
	}()

	blank, err := device.ProveBlank(context.Background(), s.dev, options)
	if closing := blank.Close(); closing != nil {
		t.Fatal(closing)
	}
	if err != nil && !errors.Is(err, device.ErrNotBlank) {
		t.Fatalf("%v, want a proof or ErrNotBlank", err)
	}
	switch wanted := s.expect(t, image, options); {
	case wanted == proved && err != nil:
		t.Errorf("rejected: %v", err)
	case wanted == refused && err == nil:
		t.Errorf("proved blank with %d bytes that are not zero, the first at %d", len(image), slices.Min(keys(image)))
	}
	for _, w := range writes {
		now := make([]byte, len(w.bytes))
		if _, err := s.raw.ReadAt(now, w.offset); err != nil {
			t.Fatal(err)
		}
		for j := range now {
			if now[j] != image[w.offset+int64(j)] {
				t.Fatalf("the byte at %d was changed", w.offset+int64(j))
			}
		}
	}
}

type expectation int

const (
	either expectation = iota
	proved
	refused
)

func (s *specimen) expect(t *testing.T, image map[int64]byte, options device.BlankOptions) expectation {
	t.Helper()
	if options.Origin != device.OriginBlank && s.dev.SizeBytes > options.ScanLimit {
		return refused
	}
	if len(image) == 0 {
		return proved
	}
	if options.Interrupted != nil {
		content, err := device.Probe(t.Context(), s.dev)
		switch {
		case err != nil:
			return refused
		case !content.Empty():
			if content.UUID != options.Interrupted.UUID {
				return refused
			}
			return either // blkid found the plugin's own superblock, which the bytes of these cases cannot form
		case options.Interrupted.Untouched:
			return proved
		}
	}
	if options.Origin != device.OriginBlank {
		return refused
	}
	for offset := range image {
		for _, span := range mustBeZero(s.dev.SizeBytes) {
			if span[0] <= offset && offset < span[1] {
				return refused
			}
		}
	}
	return either // on a disk that the rack made blank, the bytes are outside all ranges that the scanner must read
}

func keys(image map[int64]byte) (offsets []int64) {
	for offset := range image {
		offsets = append(offsets, offset)
	}
	return offsets
}

// optionsOf decodes options from a few bits.
func optionsOf(bits byte, size int64) device.BlankOptions {
	options := device.BlankOptions{
		Origin:    []string{device.OriginBlank, device.OriginBlank, "snapshot", ""}[bits&3],
		ScanLimit: size,
	}
	if bits&0b1111_0000 == 0b1111_0000 {
		options.ScanLimit = size - 1
	}
	switch bits >> 2 & 3 {
	case 2:
		options.Interrupted = &device.InterruptedFormat{UUID: ownUUID}
	case 3:
		options.Interrupted = &device.InterruptedFormat{UUID: ownUUID, Untouched: true}
	}
	return options
}

// provedContents is the number of disk contents that TestProveBlankProperty generates. It keeps the everyday test
// short; make fuzz checks 50,000.
const provedContents = 1000

// ProveBlank's answers for random contents of a disk follow the rules in expect.
func TestProveBlankProperty(t *testing.T) {
	const workers = 2
	for worker := range workers {
		t.Run(fmt.Sprint("worker ", worker), func(t *testing.T) {
			t.Parallel()
			var specimens []*specimen
			for _, size := range []int64{2 * mib, 3*mib + 512, 12 * mib, 68 * mib} {
				specimens = append(specimens, newSpecimen(t, size))
			}
			for seed := worker; seed < provedContents && !t.Failed(); seed += workers {
				random := rand.New(rand.NewPCG(uint64(seed), 1))
				s := specimens[random.IntN(len(specimens))]
				var writes []write
				for range random.IntN(4) {
					at := places(s.dev.SizeBytes)
					w := write{offset: at[random.IntN(len(at))], bytes: magics[random.IntN(len(magics))]}
					if random.IntN(3) == 0 {
						w.offset = random.Int64N(s.dev.SizeBytes)
					}
					writes = append(writes, w)
				}
				s.check(t, writes, optionsOf(byte(random.Uint32()), s.dev.SizeBytes))
				if t.Failed() {
					t.Logf("seed %d, writes %v", seed, writes)
				}
			}
		})
	}
}

// FuzzProveBlank checks generated contents of a disk. The first byte of program has the options. Three bytes for each
// write follow: two with the offset, and one that selects a signature or text.
func FuzzProveBlank(f *testing.F) {
	for i := range byte(40) {
		f.Add([]byte{i << 2, i, 0, i}, []byte("free text"))
		f.Add([]byte{i, 0x80 | i, i, 0xff, i, 1, i}, []byte{0, 0, 1})
	}
	f.Add([]byte{}, []byte{})
	const size = 12 * mib
	s := newSpecimen(f, size)
	at := places(size)
	f.Fuzz(func(t *testing.T, program, text []byte) {
		var bits byte
		if len(program) > 0 {
			bits, program = program[0], program[1:]
		}
		var writes []write
		for ; len(program) >= 3 && len(writes) < 8; program = program[3:] {
			w := write{offset: at[int(program[1])%len(at)], bytes: text}
			if program[0]&0x80 != 0 {
				w.offset = (int64(program[0]&0x7f)<<8 | int64(program[1])) * (size / (1 << 15))
			}
			if which := int(program[2]); which < len(magics) {
				w.bytes = magics[which]
			}
			w.bytes = slices.Clone(w.bytes)
			writes = append(writes, w)
		}
		s.check(t, writes, optionsOf(bits, size))
	})
}
