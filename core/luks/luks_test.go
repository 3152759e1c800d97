// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package luks_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/device/devicetest"
	"github.com/oxidecomputer/oxide-csi-plugin/core/luks"
	"github.com/oxidecomputer/oxide-csi-plugin/core/volumelock"
	"github.com/oxidecomputer/oxide-csi-plugin/test/pages"
)

const (
	diskName  = "csi-abcdefghijklmnop"
	sizeBytes = 64 << 20
	// testMemory keeps the derivations short.
	testMemory = 1 << 20
)

func TestMain(m *testing.M) { devicetest.Main(m) }

var volumeID = uuid.MustParse("6f1b2c3d-4e5f-4a6b-8c7d-9e0f1a2b3c4d")

type rig struct {
	dev  device.Device
	tool luks.Tool
	// ctx holds the volume's lock.
	ctx   context.Context
	state string
}

func newRig(t *testing.T) *rig {
	t.Helper()
	g := devicetest.New(t)
	g.Add(diskName, sizeBytes)
	r := &rig{tool: luks.Tool{Devices: g.Roots(), MemoryBytes: testMemory}, state: t.TempDir()}
	var err error
	r.dev, err = g.Roots().WaitForDisk(t.Context(), device.ExpectedDisk{Serial: devicetest.Serial(diskName)}, time.Second)
	must(t, err)
	r.ctx = r.lock(t, volumeID)
	return r
}

func (r *rig) lock(t *testing.T, volume uuid.UUID) context.Context {
	t.Helper()
	ctx, release, err := volumelock.Acquire(t.Context(), r.state, volume, time.Second)
	must(t, err)
	t.Cleanup(release)
	return ctx
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantErr(t *testing.T, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("error %v, want %v", err, want)
	}
}

// format encrypts the blank disk.
func (r *rig) format(t *testing.T, passphrase string) {
	t.Helper()
	blank, err := device.ProveBlank(r.ctx, r.dev,
		device.BlankOptions{VolumeID: volumeID, Origin: device.OriginBlank, Encrypted: true})
	must(t, err)
	must(
		t,
		blank.Format(func(path string) error { return r.tool.Format(r.ctx, path, volumeID, luks.Passphrase(passphrase)) }),
	)
	must(t, blank.Close())
	must(t, r.tool.Verify(r.ctx, r.dev, volumeID))
}

func (r *rig) header(t *testing.T) luks.Header {
	t.Helper()
	header, err := r.tool.ReadHeader(r.ctx, r.dev)
	must(t, err)
	return header
}

// digest identifies the content of the disk.
func (r *rig) digest(t *testing.T) string {
	t.Helper()
	return devicetest.Run(t, "sha256sum", r.dev.Path)
}

func TestHeaderUUIDIsPermanent(t *testing.T) {
	const golden = "25748121-0cc6-5655-9a2c-c4c0f5181e3a"
	if got := luks.HeaderUUID(volumeID).String(); got != golden {
		t.Errorf("header UUID %s", got)
	}
	pages.Shows(t, "../../docs/reference/formats.md", golden)
}

func TestFormat(t *testing.T) {
	r := newRig(t)
	r.format(t, "secret")
	header := r.header(t)
	if header.UUID != luks.HeaderUUID(volumeID).String() || !header.Unformatted() || len(header.KeySlots) != 1 ||
		header.OffsetBytes != 16<<20 {
		t.Errorf("header %+v", header)
	}
	dump := devicetest.Run(t, "cryptsetup", "luksDump", "--disable-locks", r.dev.Path)
	for _, want := range []string{"argon2id", "Memory:     1024", "Time cost:  4", "sector: 4096 [bytes]", "aes-xts-plain64", "(no flags)"} {
		if !strings.Contains(dump, want) {
			t.Errorf("the header has no %q:\n%s", want, dump)
		}
	}
	headerUUID, label, err := r.dev.LUKSHeader()
	if err != nil || headerUUID != header.UUID || label != device.LabelUnformatted {
		t.Errorf("first look: UUID %q, label %q, error %v", headerUUID, label, err)
	}
	must(t, r.tool.ClearLabel(r.ctx, r.dev))
	if header := r.header(t); header.Label != "" || header.Unformatted() {
		t.Errorf("label %q after ClearLabel", header.Label)
	}
}

// An encrypted disk is not blank, whatever the format of a filesystem would read.
func TestEncryptedDiskIsNotBlank(t *testing.T) {
	r := newRig(t)
	r.format(t, "secret")
	for _, encrypted := range []bool{true, false} {
		_, err := device.ProveBlank(r.ctx, r.dev,
			device.BlankOptions{VolumeID: volumeID, Origin: device.OriginBlank, Encrypted: encrypted})
		wantErr(t, err, device.ErrNotBlank)
	}
}

// A disk whose header was destroyed is not blank for another encryption: a backup of the header may make it readable.
func TestDestroyedHeaderIsNotBlank(t *testing.T) {
	for name, test := range map[string]struct{ offset, scanLimit int64 }{
		"the key slots":                   {8 << 20, 0},
		"a btrfs superblock inside":       {16<<20 + 64<<10, 0},
		"the last bytes of the data area": {sizeBytes - 1, 0},
		"the place of a marker":           {sizeBytes / 19 * 7, 0},
		"anywhere, up to the limit":       {30 << 20, sizeBytes},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			file, err := r.dev.Open(unix.O_RDWR)
			must(t, err)
			_, err = file.WriteAt([]byte{1}, test.offset)
			must(t, err)
			must(t, file.Close())
			_, err = device.ProveBlank(r.ctx, r.dev, device.BlankOptions{
				VolumeID: volumeID, Origin: device.OriginBlank, RawBlock: true, Encrypted: true, ScanLimit: test.scanLimit,
			})
			wantErr(t, err, device.ErrNotBlank)
		})
	}
}

// A blank disk for raw block can be encrypted however large it is.
func TestLargeRawBlockDiskIsBlank(t *testing.T) {
	r := newRig(t)
	for _, limit := range []int64{sizeBytes, sizeBytes - 1} {
		blank, err := device.ProveBlank(r.ctx, r.dev, device.BlankOptions{
			VolumeID: volumeID, Origin: device.OriginBlank, RawBlock: true, Encrypted: true, ScanLimit: limit,
		})
		must(t, err)
		must(t, blank.Close())
	}
}

func TestWrongPassphraseChangesNothing(t *testing.T) {
	r := newRig(t)
	r.format(t, "secret")
	before := r.digest(t)
	_, err := r.tool.Check(r.ctx, r.dev, luks.Passphrase("wrong"))
	wantErr(t, err, luks.ErrPassphrase)
	_, err = r.tool.ChangePassphrase(r.ctx, r.dev, luks.Passphrase("wrong"), luks.Passphrase("wrong too"))
	wantErr(t, err, luks.ErrPassphrase)
	_, err = r.tool.ChangePassphrase(r.ctx, r.dev, luks.Passphrase("secret"), luks.Passphrase("secret"))
	wantErr(t, err, luks.ErrPassphrase)
	if after := r.digest(t); after != before {
		t.Error("the disk was changed")
	}
}

// Every byte of a passphrase counts: a line break, a zero byte, and what a shell would expand.
func TestPassphraseIsBinary(t *testing.T) {
	r := newRig(t)
	passphrase := "a\n\x00$HOME' \xff\n"
	r.format(t, passphrase)
	_, err := r.tool.Check(r.ctx, r.dev, luks.Passphrase(passphrase))
	must(t, err)
	for _, other := range []string{"a", "a\n", passphrase[:len(passphrase)-1]} {
		_, err := r.tool.Check(r.ctx, r.dev, luks.Passphrase(other))
		wantErr(t, err, luks.ErrPassphrase)
	}
	_, err = r.tool.ChangePassphrase(r.ctx, r.dev, luks.Passphrase("b\n\x00"+passphrase), luks.Passphrase(passphrase))
	must(t, err)
	_, err = r.tool.Check(r.ctx, r.dev, luks.Passphrase("b\n\x00"+passphrase))
	must(t, err)
}

// A change of the passphrase goes on where an earlier one was interrupted, and ends with one key slot.
func TestChangePassphrase(t *testing.T) {
	addSlot := func(t *testing.T, r *rig, old, added string) {
		t.Helper()
		file := filepath.Join(t.TempDir(), "key")
		must(t, os.WriteFile(file, []byte(old), 0o600))
		must(t, os.WriteFile(file+".new", []byte(added), 0o600))
		devicetest.Run(t, "cryptsetup", "luksAddKey", "-q", "--disable-locks", "--pbkdf-memory=1024",
			"--pbkdf-force-iterations=4", "--key-file="+file, r.dev.Path, file+".new")
	}
	for _, test := range []struct {
		name       string
		interrupt  func(*testing.T, *rig)
		wantChange bool
		wantSlots  int
	}{
		{"from the beginning", func(*testing.T, *rig) {}, true, 1},
		{"after the new slot was added", func(t *testing.T, r *rig) { addSlot(t, r, "old", "new") }, true, 1},
		{"beside a user's own slot", func(t *testing.T, r *rig) { addSlot(t, r, "old", "recovery") }, true, 2},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := newRig(t)
			r.format(t, "old")
			test.interrupt(t, r)
			changed, err := r.tool.ChangePassphrase(r.ctx, r.dev, luks.Passphrase("new"), luks.Passphrase("old"))
			if err != nil || changed != test.wantChange {
				t.Fatalf("changed %t, error %v", changed, err)
			}
			if slots := r.header(t).KeySlots; len(slots) != test.wantSlots {
				t.Errorf("key slots %v", slots)
			}
			_, err = r.tool.Check(r.ctx, r.dev, luks.Passphrase("new"))
			must(t, err)
			_, err = r.tool.Check(r.ctx, r.dev, luks.Passphrase("old"))
			wantErr(t, err, luks.ErrPassphrase)
			before := r.digest(t)
			changed, err = r.tool.ChangePassphrase(r.ctx, r.dev, luks.Passphrase("new"), luks.Passphrase("old"))
			if err != nil || changed || r.digest(t) != before {
				t.Errorf("repeated: changed %t, error %v", changed, err)
			}
		})
	}
}

// While cryptsetup runs, nothing that another process can see contains the passphrase, and no core file would.
func TestPassphraseIsHidden(t *testing.T) {
	must(t, luks.DisableCoreDumps())
	r := newRig(t)
	r.tool.MemoryBytes = 128 << 20 // cryptsetup takes a while
	const passphrase = "canary-Hd5mJs7LbQ9wCf"
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.format(t, passphrase)
	}()
	seen := 0
	for running := true; running; {
		select {
		case <-done:
			running = false
		default:
		}
		for _, folder := range children(t) {
			comm, _ := os.ReadFile(filepath.Join(folder, "comm"))
			if strings.TrimSpace(string(comm)) != "cryptsetup" {
				continue
			}
			limits, err := os.ReadFile(filepath.Join(folder, "limits"))
			if err != nil || len(limits) == 0 {
				continue // it has just ended
			}
			seen++
			if !strings.Contains(string(limits), "Max core file size        1                    1 ") {
				t.Fatalf("limits of cryptsetup:\n%s", limits)
			}
			for _, file := range []string{"cmdline", "environ"} {
				content, _ := os.ReadFile(filepath.Join(folder, file))
				if bytes.Contains(content, []byte(passphrase)) {
					t.Fatalf("%s of cryptsetup has the passphrase: %q", file, content)
				}
			}
		}
	}
	if seen == 0 {
		t.Fatal("cryptsetup was never seen, so the test proves nothing")
	}
	for _, verb := range []string{"%s", "%v", "%+v", "%q", "%x", "%d", "%#v"} {
		if text := fmt.Sprintf(verb, luks.Passphrase(passphrase)); text != "***" {
			t.Errorf("%s prints %q", verb, text)
		}
	}
}

// children returns the /proc folders of the child processes of this one.
func children(t *testing.T) (folders []string) {
	t.Helper()
	tasks, err := filepath.Glob("/proc/self/task/*/children")
	must(t, err)
	for _, task := range tasks {
		content, err := os.ReadFile(task)
		if err != nil {
			continue // a thread that has ended
		}
		for pid := range strings.FieldsSeq(string(content)) {
			folders = append(folders, filepath.Join("/proc", pid))
		}
	}
	return folders
}

// One derivation at a time runs on the node, also if another process of the plugin started it.
func TestOneDerivationAtATime(t *testing.T) {
	r := newRig(t)
	r.format(t, "secret")
	other := r.lock(t, uuid.MustParse("00000000-0000-4000-8000-000000000001"))
	release, err := volumelock.AcquireNode(other, 0)
	must(t, err)
	// Of a deadline, 2 s are kept for the answer ([rpc.WaitBudget]). So with less, no time is left to wait for the turn.
	ctx, cancel := context.WithTimeout(r.ctx, 1500*time.Millisecond)
	defer cancel()
	_, err = r.tool.Check(ctx, r.dev, luks.Passphrase("secret"))
	wantErr(t, err, volumelock.ErrNodeHeld)
	release()
	_, err = r.tool.Check(r.ctx, r.dev, luks.Passphrase("secret"))
	must(t, err)
}

// An open that fails leaves the header as it was. The end of the request does not stop cryptsetup, which could leave a
// mapping without a table.
func TestOpenWithoutDeviceMapper(t *testing.T) {
	r := newRig(t)
	r.format(t, "secret")
	before := r.digest(t)
	ctx, cancel := context.WithTimeout(r.ctx, 5*time.Millisecond) // cryptsetup takes longer to start
	defer cancel()
	_, err := r.tool.Open(ctx, r.dev, volumeID, luks.Passphrase("secret"), luks.OpenOptions{})
	if devices, _ := os.ReadFile("/proc/misc"); bytes.Contains(devices, []byte("device-mapper")) {
		wantErr(t, err, luks.ErrCryptsetup) // the simulated guest's /sys does not show the mapping
		sequence, err := r.dev.Sequence()
		must(t, err)
		mapping := device.Mapping{DMName: device.MappingName(volumeID, strconv.FormatUint(sequence, 10))}
		mapping.SizeBytes = sizeBytes
		must(t, r.tool.Close(r.ctx, mapping, false))
	} else {
		wantErr(t, err, luks.ErrNoDeviceMapper)
	}
	if r.digest(t) != before {
		t.Error("the disk was changed")
	}
}

func TestReadHeaderOfAnythingElse(t *testing.T) {
	r := newRig(t)
	_, err := r.tool.ReadHeader(r.ctx, r.dev)
	wantErr(t, err, luks.ErrHeader)
	devicetest.Run(t, "mkfs.ext4", "-q", r.dev.Path)
	_, err = r.tool.ReadHeader(r.ctx, r.dev)
	wantErr(t, err, luks.ErrHeader)
}

// headerBytes is the length of both copies of the header.
const headerBytes = 32 << 10

// read returns the beginning of the disk with both copies of the header, and write puts one there.
func (r *rig) read(t *testing.T) []byte {
	t.Helper()
	file, err := r.dev.Open(unix.O_RDONLY)
	must(t, err)
	content := make([]byte, headerBytes)
	_, err = file.ReadAt(content, 0)
	must(t, err)
	must(t, file.Close())
	return content
}

func (r *rig) write(t *testing.T, content []byte) {
	t.Helper()
	file, err := r.dev.Open(unix.O_RDWR)
	must(t, err)
	_, err = file.WriteAt(content, 0)
	must(t, err)
	must(t, file.Sync())
	must(t, file.Close())
}

// mended expects that Mend mends the header, or with want "" that it finds nothing to do. Afterwards each copy alone
// opens the disk.
func (r *rig) mended(t *testing.T, want string) {
	t.Helper()
	wrong, err := r.tool.Mend(r.ctx, r.dev, luks.Passphrase("wrong"), luks.Passphrase("secret"))
	if err != nil || !strings.Contains(wrong, want) || want == "" && wrong != "" {
		t.Fatalf("mended %q, error %v; want %q", wrong, err, want)
	}
	whole := r.read(t)
	if wrong, err := r.tool.Mend(r.ctx, r.dev, luks.Passphrase("wrong")); wrong != "" || err != nil {
		t.Fatalf("again: mended %q, error %v", wrong, err)
	}
	if want == "" {
		return
	}
	for _, at := range []int{0, headerBytes / 2} {
		one := bytes.Clone(whole)
		clear(one[at : at+headerBytes/2])
		r.write(t, one)
		_, err := r.tool.Check(r.ctx, r.dev, luks.Passphrase("secret"))
		must(t, err)
	}
	r.write(t, whole)
}

// A damaged copy of the header, and an older one, is mended from the other one.
func TestTornHeader(t *testing.T) {
	r := newRig(t)
	r.format(t, "secret")
	before := r.read(t)
	old := r.header(t).Epoch
	devicetest.Run(t, "cryptsetup", "config", "--disable-locks", "--key-slot=0", "--priority=prefer", r.dev.Path)
	after := r.read(t)
	r.mended(t, "")
	const half, first, second = headerBytes / 2, "the first copy", "the second copy"
	join := func(a, b []byte) []byte { return append(bytes.Clone(a), b...) }
	for _, test := range []struct {
		name    string
		content []byte
		want    string
		isOld   bool
	}{
		{"the first copy is gone", join(make([]byte, half), after[half:]), first, false},
		{"the second copy is gone", join(after[:half], make([]byte, half)), second, false},
		{"the first copy is older", join(before[:half], after[half:]), first, false},
		{"the second copy is older", join(after[:half], before[half:]), second, false},
		// cryptsetup was killed, or the power was cut, at each step of its change from before to after.
		{"nothing was written", before, "", true},
		{"a piece of the first copy", join(after[:512], before[512:]), first, true},
		{"the binary part of the first copy", join(after[:4096], before[4096:]), first, true},
		{"the second half of the first copy", join(join(before[:2048], after[2048:half]), before[half:]), first, true},
		{"the first copy", join(after[:half], before[half:]), second, false},
		{"a piece of the second copy", join(after[:half+512], before[half+512:]), second, false},
		{"the binary part of the second copy", join(after[:half+4096], before[half+4096:]), second, false},
		{"everything", after, "", false},
	} {
		t.Run(test.name, func(t *testing.T) {
			r.write(t, test.content)
			if epoch := r.header(t).Epoch; (epoch == old) != test.isOld {
				t.Errorf("cryptsetup reads change %d, and the old one was %d", epoch, old)
			}
			if headerUUID, label, err := r.dev.LUKSHeader(); err != nil || label != device.LabelUnformatted ||
				headerUUID != luks.HeaderUUID(volumeID).String() {
				t.Errorf("first look: UUID %q, label %q, error %v", headerUUID, label, err)
			}
			r.mended(t, test.want)
			if got := r.read(t); !bytes.Equal(got[4096:half], got[half+4096:]) {
				t.Error("the copies differ")
			}
		})
	}
}

// Mend itself can be killed between any two blocks. The good copy stays, and the next call mends the other.
func TestTornWhileMending(t *testing.T) {
	r := newRig(t)
	r.format(t, "secret")
	whole := r.read(t)
	for _, at := range []int{0, headerBytes / 2} {
		torn := bytes.Clone(whole)
		clear(torn[at : at+headerBytes/2])
		r.write(t, torn)
		r.mended(t, "copy")
		mended := r.read(t)
		for _, blocks := range []int{1, 4, 7, 8, 9} {
			copy(torn[at:], mended[at:at+blocks*512])
			if blocks >= 9 {
				clear(torn[at+512 : at+1024]) // blocks can reach the disk in any order
			}
			r.write(t, torn)
			r.mended(t, "copy")
			clear(torn[at : at+headerBytes/2])
		}
	}
}

// Nothing is written if nothing proves which copy is good.
func TestHeaderThatCannotBeMended(t *testing.T) {
	r := newRig(t)
	r.format(t, "secret")
	whole := r.read(t)
	// other has the same number of changes as whole, and another label.
	must(t, r.tool.ClearLabel(r.ctx, r.dev))
	cleared := r.read(t)
	r.write(t, whole)
	devicetest.Run(t, "cryptsetup", "config", "--disable-locks", "--label=another", r.dev.Path)
	other := r.read(t)
	damage := func(content []byte, places ...int) []byte {
		content = bytes.Clone(content)
		for _, at := range places {
			content[at] ^= 0xff
		}
		return content
	}
	for _, test := range []struct {
		name       string
		content    []byte
		passphrase string
		want       error
	}{
		{"both copies are torn", damage(whole, 4200, 16<<10+4200), "secret", luks.ErrHeader},
		{"both copies are gone", make([]byte, headerBytes), "secret", luks.ErrHeader},
		{"the copies differ", append(bytes.Clone(cleared[:16<<10]), other[16<<10:]...), "secret", luks.ErrHeader},
		{"no passphrase opens the good copy", damage(whole, 4200), "wrong", luks.ErrPassphrase},
	} {
		t.Run(test.name, func(t *testing.T) {
			r.write(t, test.content)
			_, err := r.tool.Mend(r.ctx, r.dev, luks.Passphrase(test.passphrase))
			wantErr(t, err, test.want)
			if !bytes.Equal(r.read(t), test.content) {
				t.Error("the disk was changed")
			}
		})
	}
}

func TestBackUpHeader(t *testing.T) {
	r := newRig(t)
	r.format(t, "secret")
	file := filepath.Join(t.TempDir(), "header")
	must(t, luks.BackUpHeader(r.ctx, r.dev.Path, file))
	wantErr(t, luks.BackUpHeader(r.ctx, r.dev.Path, file), luks.ErrCryptsetup)
	info, err := os.Stat(file)
	must(t, err)
	if info.Size() != 16<<20 || info.Mode().Perm()&0o077 != 0 {
		t.Errorf("the backup has %d bytes and mode %s", info.Size(), info.Mode())
	}
	devicetest.Run(t, "dd", "if=/dev/zero", "of="+r.dev.Path, "bs=1M", "count=16", "conv=fsync", "status=none")
	devicetest.Run(t, "cryptsetup", "luksHeaderRestore", "-q", "--disable-locks", "--header-backup-file="+file, r.dev.Path)
	slot, err := r.tool.Check(r.ctx, r.dev, luks.Passphrase("secret"))
	if err != nil {
		t.Errorf("key slot %s, error %v", strconv.Itoa(slot), err)
	}
}
