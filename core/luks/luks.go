// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package luks

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/hostexec"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/core/volumelock"
)

// DefaultMemoryBytes is the memory of argon2id for new key slots: RFC 9106, section 4, second recommended option.
const DefaultMemoryBytes = 64 << 20

// iterations are the passes of argon2id over its memory. cryptsetup takes no fewer.
const iterations = 4

// Passphrase is a passphrase. It prints as "***".
type Passphrase []byte

// Format writes "***" for every verb.
func (Passphrase) Format(s fmt.State, _ rune) { _, _ = s.Write([]byte("***")) } // fmt reports no errors

// HeaderUUID returns the UUID of the LUKS2 header that this plugin makes for a volume: the version 5 UUID of the name
// "luks2" in the namespace of the volume's ID. It is permanent.
func HeaderUUID(volumeID uuid.UUID) uuid.UUID { return uuid.NewSHA1(volumeID, []byte("luks2")) }

// DisableCoreDumps sets the core limit of this process to 1 byte. The programs that it starts inherit the limit. With a
// limit of 0 the kernel still gives a core to the program that core_pattern may name; 1 also forbids that (Linux,
// fs/coredump.c).
func DisableCoreDumps() error {
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{Cur: 1, Max: 1}); err != nil {
		return fmt.Errorf("disable core dumps, which would contain passphrases: %w", err)
	}
	return nil
}

// Tool runs cryptsetup. Contexts of its methods come from [volumelock.Acquire].
type Tool struct {
	// Devices are the folders of the guest's devices.
	Devices device.Roots
	// MemoryBytes is the memory of argon2id for new key slots. Zero means [DefaultMemoryBytes].
	MemoryBytes int64
}

// Header is what the LUKS2 header of a disk says.
type Header struct {
	// UUID identifies the header, see [HeaderUUID].
	UUID string
	// Label is [device.LabelUnformatted], or empty.
	Label string
	// OffsetBytes is where the data begins.
	OffsetBytes int64
	// KeySlots are the numbers of the key slots.
	KeySlots []int
	// Epoch is the number of the header's last change.
	Epoch uint64
}

// Unformatted reports whether nothing was ever written into the disk, except by an interrupted mkfs.
func (h Header) Unformatted() bool { return h.Label == device.LabelUnformatted }

// ReadHeader reads the header of an encrypted disk: the newest of its two copies that is not damaged. It changes
// nothing, see [Tool.Mend]. The error is [ErrHeader] if there is no valid LUKS2 header.
func (t Tool) ReadHeader(ctx context.Context, dev device.Device) (Header, error) {
	result, err := hostexec.Run(ctx, "cryptsetup", "luksDump", "--disable-locks", dev.Path)
	if err != nil {
		return Header{}, err
	}
	header := parseDump(result.Stdout)
	if result.ExitCode != 0 || header.UUID == "" || header.OffsetBytes == 0 {
		return Header{}, fmt.Errorf("%w: %s: %s", ErrHeader, dev, result.Message())
	}
	return header, nil
}

var (
	dumpField  = regexp.MustCompile(`(?m)^(Version|Epoch|UUID|Label):[ \t]+(.*)$`)
	dumpOffset = regexp.MustCompile(`(?m)^[ \t]+offset: (\d+) \[bytes\]$`)
	dumpSlot   = regexp.MustCompile(`(?m)^  (\d+): luks2`)
)

// parseDump parses the output of cryptsetup luksDump. The zero value means that it is none of a LUKS2 header.
func parseDump(text string) (h Header) {
	fields := map[string]string{}
	for _, match := range dumpField.FindAllStringSubmatch(text, -1) {
		fields[match[1]] = strings.TrimSpace(match[2])
	}
	if fields["Version"] != "2" {
		return Header{}
	}
	h.UUID = fields["UUID"]
	h.Epoch, _ = strconv.ParseUint(fields["Epoch"], 10, 64) // 0 is no epoch
	if fields["Label"] != "(no label)" {
		h.Label = fields["Label"]
	}
	if match := dumpOffset.FindStringSubmatch(text); match != nil {
		h.OffsetBytes, _ = strconv.ParseInt(match[1], 10, 64) // digits only; too many make 0, which is refused
	}
	for _, match := range dumpSlot.FindAllStringSubmatch(text, -1) {
		slot, _ := strconv.Atoi(match[1]) // LUKS2 has 32 slots
		h.KeySlots = append(h.KeySlots, slot)
	}
	return h
}

// Mend makes both copies of the header whole and equal, and returns what was wrong with one of them, or "". With
// --disable-locks cryptsetup uses the good copy in silence, and the next fault would lose the disk. Call Mend before
// anything else changes the header: cryptsetup writes the first copy first, and it may be the only good one.
//
// Mend writes only if the good copy is proved: its checksum is valid, cryptsetup reads the same one, and one of the
// passphrases opens it. The error is [ErrHeader] if both copies are damaged, or if they differ and none is newer, and
// [ErrPassphrase] if no passphrase opens the damaged header.
func (t Tool) Mend(ctx context.Context, dev device.Device, passphrases ...Passphrase) (wrong string, err error) {
	copies, err := device.ReadLUKSCopies(dev)
	if err != nil {
		return "", err
	}
	if wrong, err = copies.Fault(); err != nil {
		return "", fmt.Errorf("%w: %s: %w", ErrHeader, dev, err)
	}
	if wrong == "" {
		return "", nil
	}
	header, err := t.ReadHeader(ctx, dev)
	if err != nil {
		return "", err
	}
	if header.Epoch != copies.Epoch() {
		return "", fmt.Errorf("%w: %s: %s, and cryptsetup reads change %d, not %d",
			ErrHeader, dev, wrong, header.Epoch, copies.Epoch())
	}
	err = ErrPassphrase
	for _, passphrase := range passphrases {
		if len(passphrase) == 0 {
			continue
		}
		if _, err = t.Check(ctx, dev, passphrase); !errors.Is(err, ErrPassphrase) {
			break
		}
	}
	if err != nil {
		return "", err
	}
	return wrong, copies.Mend(dev)
}

// Format makes a header with the label [device.LabelUnformatted] and one key slot on the device at path. The caller has
// proved that the device is blank, see [device.Blank.Format].
func (t Tool) Format(ctx context.Context, path string, volumeID uuid.UUID, passphrase Passphrase) error {
	args := append([]string{
		"luksFormat", "--batch-mode", "--disable-locks", "--type=luks2",
		"--cipher=aes-xts-plain64", "--key-size=512", "--sector-size=4096",
		"--uuid=" + HeaderUUID(volumeID).String(), "--label=" + device.LabelUnformatted, "--key-file=-",
	}, t.derivation()...)
	_, err := t.derive(ctx, passphrase, append(args, path)...)
	return err
}

// derivation returns the arguments for a new key slot. Fixed costs take the same time everywhere and need no benchmark.
func (t Tool) derivation() []string {
	memory := t.MemoryBytes
	if memory == 0 {
		memory = DefaultMemoryBytes
	}
	return []string{
		"--pbkdf=argon2id", "--pbkdf-memory=" + strconv.FormatInt(memory>>10, 10),
		"--pbkdf-force-iterations=" + strconv.Itoa(iterations), "--pbkdf-parallel=4",
	}
}

// Verify checks that the header that [Tool.Format] makes is on the disk, in stable storage.
func (t Tool) Verify(ctx context.Context, dev device.Device, volumeID uuid.UUID) error {
	if err := flush(dev); err != nil {
		return err
	}
	header, err := t.ReadHeader(ctx, dev)
	if err != nil {
		return err
	}
	if header.UUID != HeaderUUID(volumeID).String() || !header.Unformatted() || len(header.KeySlots) != 1 {
		return fmt.Errorf("%w: luksFormat reported success, but %s has another header", ErrCryptsetup, dev)
	}
	return nil
}

// ClearLabel removes the label from the header, in stable storage. Afterwards nothing is formatted inside any more.
func (t Tool) ClearLabel(ctx context.Context, dev device.Device) error {
	if err := t.run(ctx, "config", "--disable-locks", "--label=", dev.Path); err != nil {
		return err
	}
	if err := flush(dev); err != nil {
		return err
	}
	header, err := t.ReadHeader(ctx, dev)
	if err == nil && header.Label != "" {
		err = fmt.Errorf("%w: the header of %s still has the label %q", ErrCryptsetup, dev, header.Label)
	}
	return err
}

// flush writes what the kernel has of the disk to stable storage.
func flush(dev device.Device) error {
	file, err := dev.Open(unix.O_RDONLY)
	if err != nil {
		return err
	}
	if err := errors.Join(file.Sync(), hostexec.CloseUninherited(file)); err != nil {
		return fmt.Errorf("%w: flush %s: %w", ErrCryptsetup, dev, err)
	}
	return nil
}

// unlocked matches the line with the number of the key slot that the passphrase opened.
var unlocked = regexp.MustCompile(`Key slot (\d+) unlocked\.`)

// Check verifies a passphrase without opening the disk, and returns its key slot. The error is [ErrPassphrase] if no
// slot has it.
func (t Tool) Check(ctx context.Context, dev device.Device, passphrase Passphrase) (slot int, err error) {
	result, err := t.derive(ctx, passphrase,
		"open", "--verbose", "--test-passphrase", "--disable-locks", "--type=luks2", "--key-file=-", dev.Path)
	if err != nil {
		return 0, err
	}
	match := unlocked.FindStringSubmatch(result.Stdout + result.Stderr)
	if match == nil {
		return 0, fmt.Errorf("%w: it does not say which key slot the passphrase opens: %s", ErrCryptsetup, result.Message())
	}
	return strconv.Atoi(match[1])
}

// OpenOptions say how a disk is opened.
type OpenOptions struct {
	// ReadOnly says that the mapping rejects writes.
	ReadOnly bool
	// Discard says that discards reach the disk. They show which blocks are unused.
	Discard bool
}

// Open opens the disk as the volume's mapping. Its errors are [ErrPassphrase] and [ErrNoDeviceMapper], among others.
func (t Tool) Open(
	ctx context.Context,
	dev device.Device,
	volume uuid.UUID,
	passphrase Passphrase,
	opts OpenOptions,
) (device.Mapping, error) {
	args := []string{"open", "--disable-locks", "--type=luks2", "--key-file=-"}
	if opts.ReadOnly {
		args = append(args, "--readonly")
	}
	if opts.Discard {
		args = append(args, "--allow-discards")
	}
	sequence, err := dev.Sequence()
	if err != nil {
		return device.Mapping{}, err
	}
	attachment := strconv.FormatUint(sequence, 10)
	if sequence == 0 {
		if attachment, err = t.Devices.Attachment(dev.Name); err != nil {
			return device.Mapping{}, err
		}
	}
	name := device.MappingName(volume, attachment)
	// A killed cryptsetup can leave a mapping without a table. So both programs outlive the request.
	outliving, cancel := context.WithTimeout(context.WithoutCancel(ctx), openTimeout)
	defer cancel()
	if err := t.removeUnfinished(outliving, name); err != nil {
		return device.Mapping{}, err
	}
	args = append(args, dev.Path, name)
	_, err = t.deriveFor(ctx, openTimeout, passphrase, args...)
	if errors.Is(err, ErrPassphrase) {
		// cryptsetup says the same when the kernel does not permit the mapping.
		if _, check := t.Check(ctx, dev, passphrase); !errors.Is(check, ErrPassphrase) {
			err = errors.Join(check, fmt.Errorf("%w: the kernel does not permit to open %s", ErrCryptsetup, dev))
		}
	}
	if err != nil {
		return device.Mapping{}, err
	}
	m, found, err := t.Devices.Mapping(volume)
	if err == nil && (!found || m.Below != dev.Number) {
		err = fmt.Errorf("%w: the mapping of %s does not show in /sys", ErrCryptsetup, dev)
	}
	return m, err
}

// Belongs reports whether a mapping is that of the header, at the full size of the disk.
func (h Header) Belongs(m device.Mapping, dev device.Device) bool {
	return m.Below == dev.Number && m.SizeBytes == dev.SizeBytes-h.OffsetBytes &&
		strings.HasPrefix(m.DMUUID, "CRYPT-LUKS2-"+strings.ReplaceAll(h.UUID, "-", "")+"-")
}

// Close closes a mapping, also one that a killed cryptsetup left unfinished. The error is [ErrBusy] while it is in use.
// If deferred, the kernel closes it when its last user has gone.
func (t Tool) Close(ctx context.Context, m device.Mapping, deferred bool) error {
	if m.Unfinished() {
		return t.removeUnfinished(ctx, m.DMName)
	}
	args := []string{"close", "--disable-locks"}
	if deferred {
		args = append(args, "--deferred")
	}
	return t.run(ctx, append(args, m.DMName)...)
}

// removeUnfinished removes a mapping of this name, if there is one. Without a table it does not show in /sys, and holds
// nothing but the name. device-mapper refuses to remove one that is in use.
func (t Tool) removeUnfinished(ctx context.Context, name string) error {
	result, err := hostexec.Run(ctx, "dmsetup", "info", name)
	if err != nil || result.ExitCode != 0 {
		return err // there is none, or no device-mapper
	}
	if result, err = hostexec.Run(ctx, "dmsetup", "remove", name); err == nil && result.ExitCode != 0 {
		err = fmt.Errorf("%w: dmsetup remove: exit code %d: %s", ErrCryptsetup, result.ExitCode, result.Message())
	}
	return err
}

// ChangePassphrase makes sure that the new passphrase opens the disk and that the previous one does not. Each step is
// one write of the header, and the next call finds what is done: the new key slot is added, verified, and then the
// previous one is removed. The error is [ErrPassphrase] if neither passphrase opens the disk. Other key slots stay.
func (t Tool) ChangePassphrase(
	ctx context.Context,
	dev device.Device,
	passphrase, previous Passphrase,
) (changed bool, err error) {
	if bytes.Equal(passphrase, previous) {
		return false, fmt.Errorf("%w: the new and the previous passphrase are the same", ErrPassphrase)
	}
	header, err := t.ReadHeader(ctx, dev)
	if err != nil {
		return false, err
	}
	slot, err := t.Check(ctx, dev, passphrase)
	switch {
	case err == nil && len(header.KeySlots) < 2:
		return false, nil
	case errors.Is(err, ErrPassphrase):
		if slot, err = t.addKey(ctx, dev, passphrase, previous); err != nil {
			return false, err
		}
	case err != nil:
		return false, err
	}
	old, err := t.Check(ctx, dev, previous)
	if errors.Is(err, ErrPassphrase) {
		return false, nil
	}
	if err != nil || old == slot {
		return false, errors.Join(err, fmt.Errorf("%w: key slot %d was not removed", ErrCryptsetup, old))
	}
	if err := t.run(ctx, "luksKillSlot", "--batch-mode", "--disable-locks", dev.Path, strconv.Itoa(old)); err != nil {
		return false, err
	}
	return true, flush(dev)
}

// addKey adds a key slot for the passphrase, and returns its number after it was seen to open the disk.
func (t Tool) addKey(ctx context.Context, dev device.Device, passphrase, previous Passphrase) (slot int, err error) {
	args := append([]string{
		"luksAddKey", "--batch-mode", "--disable-locks", "--key-file=-",
		"--keyfile-size=" + strconv.Itoa(len(previous)), "--new-keyfile-size=" + strconv.Itoa(len(passphrase)),
	}, t.derivation()...)
	both := append(bytes.Clone(previous), passphrase...)
	if _, err := t.derive(ctx, both, append(args, dev.Path, "-")...); err != nil {
		return 0, err
	}
	if err := flush(dev); err != nil {
		return 0, err
	}
	return t.Check(ctx, dev, passphrase)
}

// BackUpHeader copies the header and its key slots to a new file. It needs no passphrase. The copy keeps the
// passphrases of its time valid: with it they open the disk, also after they were changed.
func BackUpHeader(ctx context.Context, path, file string) error {
	if _, err := os.Lstat(file); err == nil {
		return fmt.Errorf("%w: %s exists: choose another file", ErrCryptsetup, file)
	}
	return Tool{}.run(ctx, "luksHeaderBackup", "--disable-locks", "--header-backup-file="+file, path)
}

// openTimeout limits a cryptsetup that outlives its request.
const openTimeout = 2 * time.Minute

// derive runs cryptsetup with a secret, alone on this node.
func (t Tool) derive(ctx context.Context, secret []byte, args ...string) (hostexec.Result, error) {
	return t.deriveFor(ctx, 0, secret, args...)
}

// deriveFor is derive. With a limit, cryptsetup ends by the limit and not with ctx.
func (t Tool) deriveFor(
	ctx context.Context,
	limit time.Duration,
	secret []byte,
	args ...string,
) (hostexec.Result, error) {
	release, err := volumelock.AcquireNode(ctx, rpc.WaitBudget(ctx))
	if err != nil {
		return hostexec.Result{}, fmt.Errorf("wait for the turn to derive the key: %w", err)
	}
	defer release()
	if limit > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), limit)
		defer cancel()
	}
	result, err := hostexec.RunWithSecret(ctx, secret, "cryptsetup", args...)
	if err != nil {
		return result, err
	}
	return result, failure(args[0], result)
}

func (t Tool) run(ctx context.Context, args ...string) error {
	result, err := hostexec.Run(ctx, "cryptsetup", args...)
	if err != nil {
		return err
	}
	return failure(args[0], result)
}

// Exit codes of cryptsetup, cryptsetup(8).
const (
	exitPassphrase = 2 // also of what the kernel does not permit
	exitMemory     = 3
	exitBusy       = 5
)

// failure returns the error for an exit code. Only its message is repeated, which never contains a passphrase.
func failure(action string, result hostexec.Result) error {
	switch {
	case result.ExitCode == 0:
		return nil
	case strings.Contains(result.Stderr, "Cannot initialize device-mapper"), strings.Contains(result.Stderr, "dm_crypt"):
		first, _, _ := strings.Cut(strings.TrimSpace(result.Stderr), "\n") // cryptsetup repeats itself
		return fmt.Errorf("%w: load the kernel modules dm_mod and dm_crypt on the node: %s", ErrNoDeviceMapper, first)
	case result.ExitCode == exitPassphrase && strings.Contains(result.Stderr, "No key available with this passphrase"):
		return ErrPassphrase
	case result.ExitCode == exitMemory, result.ExitCode < 0 && result.Stderr == "": // the kernel killed it
		return fmt.Errorf("%w: cryptsetup %s: exit code %d: give the plugin more memory, or its container a higher limit",
			ErrMemory, action, result.ExitCode)
	case result.ExitCode == exitBusy:
		return fmt.Errorf("%w: %s", ErrBusy, result.Message())
	}
	return fmt.Errorf("%w: %s: exit code %d: %s", ErrCryptsetup, action, result.ExitCode, result.Message())
}
