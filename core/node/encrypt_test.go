// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package node_test

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/device/devicetest"
	"github.com/oxidecomputer/oxide-csi-plugin/core/luks"
	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/core/node"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
)

// The tests of this file go as far as a kernel without device-mapper allows: up to the mapping. The simulated guest's
// /sys shows no mapping either. So a stage that does everything right ends with FAILED_PRECONDITION, or with INTERNAL
// where the kernel could open the disk. The rest is in test/vm.

func encryptedRig(t *testing.T) *nodeRig {
	t.Helper()
	return newNodeRig(t, func(opts *node.Options) { opts.LUKSMemoryBytes = 1 << 20 })
}

func (r *nodeRig) newEncrypted(disk, passphrase string) *volume {
	r.t.Helper()
	v := r.newVolume(disk)
	v.publish[rpc.KeyEncryption], v.volume[rpc.KeyEncryption] = rpc.EncryptionLUKS2, rpc.EncryptionLUKS2
	v.secrets = map[string]string{rpc.SecretPassphrase: passphrase}
	return v
}

// luksDump returns what cryptsetup says about the disk.
func (r *nodeRig) luksDump(v *volume) string {
	r.t.Helper()
	return devicetest.Run(r.t, "cryptsetup", "luksDump", "--disable-locks", r.node(v))
}

// stageToMapping stages an encrypted volume. It must get as far as the mapping.
func (r *nodeRig) stageToMapping(v *volume, capability *csi.VolumeCapability) {
	r.t.Helper()
	if hasDeviceMapper() {
		coretest.WantCode(r.t, r.stage(v, capability), codes.Internal, "does not show in /sys")
		names, err := filepath.Glob("/dev/mapper/" + device.MappingPrefix(uuid.MustParse(v.id)) + "*")
		coretest.Must(r.t, err)
		for _, name := range names {
			r.run("cryptsetup", "close", "--disable-locks", filepath.Base(name))
		}
		return
	}
	coretest.WantCode(r.t, r.stage(v, capability), codes.FailedPrecondition, "dm_crypt")
}

func TestNodeEncryptsBlankDisk(t *testing.T) {
	for name, capability := range map[string]*csi.VolumeCapability{
		"filesystem": filesystemVolume("ext4", writer), "raw block": rawBlock(writer),
	} {
		t.Run(name, func(t *testing.T) {
			r := encryptedRig(t)
			v := r.newEncrypted(diskA, "secret")
			r.stageToMapping(v, capability)
			for _, want := range []string{
				luks.HeaderUUID(uuid.MustParse(v.id)).String(), device.LabelUnformatted, "argon2id", "sector: 4096",
			} {
				if dump := r.luksDump(v); !strings.Contains(dump, want) {
					t.Errorf("the header has no %q:\n%s", want, dump)
				}
			}
			before := r.digest(v)
			r.stageToMapping(v, capability) // finds the header that it made
			if r.digest(v) != before {
				t.Error("the second stage changed the disk")
			}
			coretest.Must(t, r.unstage(v))
			r.wantMounts()
		})
	}
}

func TestNodeWrongPassphrase(t *testing.T) {
	r := encryptedRig(t)
	v := r.newEncrypted(diskA, "secret")
	r.stageToMapping(v, filesystemVolume("", writer))
	before := r.digest(v)
	for name, secrets := range map[string]map[string]string{
		"none":      nil,
		"empty":     {rpc.SecretPassphrase: ""},
		"both":      {rpc.SecretPassphrase: "wrong", rpc.SecretPreviousPassphrase: "wrong too"},
		"only old":  {rpc.SecretPreviousPassphrase: "secret"},
		"identical": {rpc.SecretPassphrase: "wrong", rpc.SecretPreviousPassphrase: "wrong"},
	} {
		if name == "identical" && !hasDeviceMapper() {
			continue // without device-mapper, cryptsetup does not come as far as the passphrase
		}
		v.secrets = secrets
		err := r.stage(v, filesystemVolume("", writer))
		coretest.WantCode(t, err, codes.FailedPrecondition, "passphrase")
		if strings.Contains(err.Error()+r.log.String(), "wrong too") {
			t.Errorf("%s: the passphrase is in the error or the log: %v", name, err)
		}
	}
	if r.digest(v) != before {
		t.Error("the disk was changed")
	}
}

func hasDeviceMapper() bool {
	misc, _ := os.ReadFile("/proc/misc")
	return bytes.Contains(misc, []byte("device-mapper"))
}

func TestNodeChangesPassphrase(t *testing.T) {
	r := encryptedRig(t)
	v := r.newEncrypted(diskA, "old")
	r.stageToMapping(v, filesystemVolume("", writer))
	v.secrets = map[string]string{rpc.SecretPassphrase: "new", rpc.SecretPreviousPassphrase: "old"}
	r.stageToMapping(v, filesystemVolume("", writer))
	r.stageToMapping(v, filesystemVolume("", writer))
	v.secrets = map[string]string{rpc.SecretPassphrase: "other", rpc.SecretPreviousPassphrase: "old"}
	coretest.WantCode(t, r.stage(v, filesystemVolume("", writer)), codes.FailedPrecondition, "passphrase")
	if slots := strings.Count(r.luksDump(v), "AF stripes"); slots != 1 {
		t.Errorf("%d key slots", slots)
	}
}

// A disk with anything on it is never encrypted, and an encrypted disk never used in clear.
func TestNodeEncryptionRefuses(t *testing.T) {
	stageable := filesystemVolume("", writer)
	for _, test := range []struct {
		name    string
		prepare func(*nodeRig, *volume)
		want    string
	}{
		{"a filesystem of this volume", func(r *nodeRig, v *volume) {
			r.run("mkfs.ext4", "-q", "-U", mount.FilesystemUUID(uuid.MustParse(v.id)).String(), r.node(v))
		}, "should be encrypted but holds"},
		{"data where the filesystem inside would begin", func(r *nodeRig, v *volume) { r.poke(v, 16<<20+64<<10, "data") }, "refusing to format"},
		{"data in the first MiB", func(r *nodeRig, v *volume) { r.poke(v, 600<<10, "data") }, "refusing to format"},
		{"a snapshot with data where nothing but a whole read finds it", func(r *nodeRig, v *volume) {
			v.publish[rpc.KeyOrigin] = rpc.OriginSnapshot
			r.poke(v, 123456789, "data")
		}, "refusing to format"},
		{"data on a volume for raw block where nothing but a whole read finds it", func(r *nodeRig, v *volume) {
			v.publish[rpc.KeyRawBlock] = "true"
			r.poke(v, 123456789, "data")
		}, "refusing to format"},
		{"a snapshot of a plain volume", func(r *nodeRig, v *volume) {
			v.publish[rpc.KeyOrigin], v.publish[rpc.KeyFSLineage] = rpc.OriginSnapshot, uuid.NewString()
			r.run("mkfs.ext4", "-q", r.node(v))
		}, "should be encrypted but holds"},
		{"a snapshot with another volume's header", func(r *nodeRig, v *volume) {
			v.publish[rpc.KeyOrigin], v.publish[rpc.KeyFSLineage] = rpc.OriginSnapshot, uuid.NewString()
			r.luksFormat(v, luks.HeaderUUID(uuid.New()).String(), "secret")
		}, `set verifyFilesystem: "false" in the volume's context`},
		{"another volume's header", func(r *nodeRig, v *volume) {
			r.luksFormat(v, luks.HeaderUUID(uuid.New()).String(), "secret")
		}, `set verifyFilesystem: "false" in the volume's context`},
		{"a user's header", func(r *nodeRig, v *volume) { r.luksFormat(v, uuid.NewString(), "secret") }, "belongs to another volume"},
		{"no publish context", func(_ *nodeRig, v *volume) { v.publish = nil }, "publish the volume through the controller"},
		{"a publish context of a plain disk", func(_ *nodeRig, v *volume) { delete(v.publish, rpc.KeyEncryption) }, "publish the volume through the controller"},
		{"a publish context without the disk's size", func(_ *nodeRig, v *volume) {
			delete(v.publish, rpc.KeySizeBytes)
			delete(v.volume, rpc.KeySizeBytes)
		}, "publish the volume through the controller"},
		{"a read-only disk", func(_ *nodeRig, v *volume) { v.publish[rpc.KeyReadOnly] = "true" }, "publish the volume writable once"},
		{"a disk that is mounted in clear", func(r *nodeRig, v *volume) {
			r.run("mkfs.ext4", "-q", r.node(v))
			coretest.Must(r.t, os.Mkdir(r.path("by-hand"), 0o755))
			r.run("mount", r.node(v), r.path("by-hand"))
		}, "already mounted"},
		{"an encrypted disk for a plain filesystem", func(r *nodeRig, v *volume) {
			r.luksFormat(v, luks.HeaderUUID(uuid.MustParse(v.id)).String(), "secret")
			delete(v.publish, rpc.KeyEncryption)
			delete(v.volume, rpc.KeyEncryption)
		}, "is encrypted, and the contexts do not say so"},
		{"a snapshot of an encrypted volume for a plain filesystem", func(r *nodeRig, v *volume) {
			source := uuid.New()
			v.publish[rpc.KeyOrigin], v.publish[rpc.KeyFSLineage] = rpc.OriginSnapshot, source.String()
			r.luksFormat(v, luks.HeaderUUID(source).String(), "secret")
			delete(v.publish, rpc.KeyEncryption)
			delete(v.volume, rpc.KeyEncryption)
			v.secrets = nil
		}, "is encrypted, and the contexts do not say so"},
		{"a snapshot with an unknown header for a plain filesystem", func(r *nodeRig, v *volume) {
			v.publish[rpc.KeyOrigin], v.publish[rpc.KeyFSLineage] = rpc.OriginSnapshot, uuid.NewString()
			r.luksFormat(v, luks.HeaderUUID(uuid.New()).String(), "secret")
			delete(v.publish, rpc.KeyEncryption)
			delete(v.volume, rpc.KeyEncryption)
			v.secrets = nil
		}, "holds crypto_LUKS"},
		{"a passphrase for a plain disk", func(_ *nodeRig, v *volume) {
			delete(v.publish, rpc.KeyEncryption)
			delete(v.volume, rpc.KeyEncryption)
		}, "is not encrypted"},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := encryptedRig(t)
			v := r.newEncrypted(diskA, "secret")
			test.prepare(r, v)
			before := r.digest(v)
			coretest.WantCode(t, r.stage(v, stageable), codes.FailedPrecondition, test.want)
			if r.digest(v) != before {
				t.Error("the disk was changed")
			}
		})
	}
}

// Without a controller, nothing says that the disk is this volume's.
func TestNodeEncryptsNothingWithoutController(t *testing.T) {
	r := encryptedRig(t)
	v := r.newEncrypted(diskA, "secret")
	before := r.digest(v)
	err := r.stageWithoutController(v, filesystemVolume("", writer))
	coretest.WantCode(t, err, codes.FailedPrecondition, "has no LUKS header")
	if r.digest(v) != before {
		t.Error("the disk was changed")
	}
}

// A plain raw block volume is never published from a disk that this plugin has encrypted. A user's own header is the
// user's data.
func TestNodeRawBlockOfEncryptedDisk(t *testing.T) {
	r := encryptedRig(t)
	v := r.newVolume(diskA)
	r.luksFormat(v, luks.HeaderUUID(uuid.MustParse(v.id)).String(), "secret")
	coretest.WantCode(t, r.stage(v, rawBlock(writer)), codes.FailedPrecondition, "is encrypted")
	users := r.newVolume(diskB)
	r.luksFormat(users, uuid.NewString(), "secret")
	coretest.Must(t, r.stage(users, rawBlock(writer)))
	coretest.Must(t, r.unstage(users))
}

// A copy of an encrypted volume has the header of its source.
func TestNodeOpensCopyOfEncryptedDisk(t *testing.T) {
	r := encryptedRig(t)
	source := uuid.New()
	v := r.newEncrypted(diskA, "secret")
	v.publish[rpc.KeyOrigin], v.publish[rpc.KeyFSLineage] = rpc.OriginSnapshot, source.String()
	r.luksFormat(v, luks.HeaderUUID(source).String(), "secret")
	before := r.digest(v)
	r.stageToMapping(v, filesystemVolume("", writer))
	coretest.WantCode(
		t,
		r.stageWithoutController(v, filesystemVolume("", writer)),
		codes.FailedPrecondition,
		"wait for the controller",
	)
	if r.digest(v) != before {
		t.Error("the disk was changed")
	}
}

// The header of a read-only disk stays as it is: the kernel refuses writes before cryptsetup runs, and the passphrase
// is not changed.
func TestNodeReadOnlyEncryptedDisk(t *testing.T) {
	r := encryptedRig(t)
	v := r.newEncrypted(diskA, "new")
	r.luksFormat(v, luks.HeaderUUID(uuid.MustParse(v.id)).String(), "old")
	r.poke(v, 4096, strings.Repeat("\x00", 4096)) // a torn first copy
	v.publish[rpc.KeyReadOnly], v.secrets[rpc.SecretPreviousPassphrase] = "true", "old"
	before := r.digest(v)
	r.stageToMapping(v, filesystemVolume("", writer))
	if readOnly, err := r.device().ReadOnly(); err != nil || !readOnly {
		t.Errorf("the kernel refuses writes: %t, %v", readOnly, err)
	}
	if r.digest(v) != before {
		t.Error("the disk was changed")
	}
}

// luksFormat that was interrupted runs again, whatever it left: nothing, a header without key slots, or all of it. The
// format marker on the disk, or the record on the node, says so. With neither, a finished header stays.
func TestNodeInterruptedLuksFormat(t *testing.T) {
	for _, test := range []struct {
		name  string
		leave func(*nodeRig, *volume)
	}{
		{"only the marker", func(*nodeRig, *volume) {}},
		{"noise where the key slots are", func(r *nodeRig, v *volume) { r.poke(v, 40<<10, "noise of a key slot") }},
		{"a header without key slots", func(r *nodeRig, v *volume) {
			r.luksFormat(v, luks.HeaderUUID(uuid.MustParse(v.id)).String(), "another")
			r.run("cryptsetup", "luksErase", "-q", "--disable-locks", r.node(v))
		}},
		{"a whole header", func(r *nodeRig, v *volume) {
			r.luksFormat(v, luks.HeaderUUID(uuid.MustParse(v.id)).String(), "another")
		}},
		{"a header with a torn first copy", func(r *nodeRig, v *volume) {
			r.luksFormat(v, luks.HeaderUUID(uuid.MustParse(v.id)).String(), "another")
			r.poke(v, 4096, strings.Repeat("\x00", 4096))
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := encryptedRig(t)
			v := r.newEncrypted(diskA, "secret")
			test.leave(r, v)
			r.writeFormatMarker(v)
			r.stageToMapping(v, filesystemVolume("ext4", writer))
			dump := r.luksDump(v)
			if !strings.Contains(dump, device.LabelUnformatted) || strings.Count(dump, "AF stripes") != 1 {
				t.Errorf("header:\n%s", dump)
			}
			r.checkPassphrase(v, "secret")
			if marked, err := r.hasFormatMarker(v); err != nil || marked {
				t.Errorf("the marker is left: %t, %v", marked, err)
			}
		})
	}
}

// A stage mends a damaged copy of the header. It says so once in the log, and in the volume's health until the unstage.
// It changes nothing if both copies are damaged.
func TestNodeMendsHeader(t *testing.T) {
	const first, second = 4200, 16<<10 + 4200
	mended := func(r *nodeRig) int {
		counts, err := r.service.Volumes()
		coretest.Must(t, err)
		return counts.HeadersMended
	}
	for name, places := range map[string][2]int64{
		"first copy": {first, second}, "second copy": {second, first}, "magic": {0, second},
	} {
		t.Run(name, func(t *testing.T) {
			r := encryptedRig(t)
			v := r.newEncrypted(diskA, "secret")
			r.stageToMapping(v, filesystemVolume("ext4", writer))
			r.poke(v, places[0], "\xff\xff")
			damaged := r.digest(v)
			r.stageToMapping(v, filesystemVolume("ext4", writer))
			whole := r.digest(v)
			r.stageToMapping(v, filesystemVolume("ext4", writer))
			if count := strings.Count(r.log.String(), "mended the header"); count != 1 || mended(r) != 1 {
				t.Errorf("%d warnings, %d in the metric", count, mended(r))
			}
			if whole == damaged || r.digest(v) != whole {
				t.Error("the header was not mended, or the next stage changed the disk")
			}
			health := &csi.NodeGetVolumeHealthRequest{VolumeId: v.id}
			if diff := cmp.Diff([]string{"DEGRADED HeaderMended"}, r.health(health)); diff != "" {
				t.Errorf("health (-want +got):\n%s", diff)
			}
			coretest.Must(t, r.unstage(v))
			if left := r.health(health); left != nil {
				t.Errorf("health after the unstage: %v", left)
			}
			r.poke(v, places[1], "\xff\xff")
			r.checkPassphrase(v, "secret")
		})
	}
	r := encryptedRig(t)
	v := r.newEncrypted(diskA, "secret")
	r.stageToMapping(v, filesystemVolume("ext4", writer))
	r.poke(v, first, "\xff\xff")
	r.poke(v, second, "\xff\xff")
	before := r.digest(v)
	coretest.WantCode(t, r.stage(v, filesystemVolume("ext4", writer)), codes.FailedPrecondition, "header cannot be read")
	if r.digest(v) != before || mended(r) != 0 || r.health(&csi.NodeGetVolumeHealthRequest{VolumeId: v.id}) != nil {
		t.Error("the disk was changed")
	}
}

// Without a marker, a header with the label stays as it is: its passphrase may be all that is wrong.
func TestNodeFinishedLuksFormatStays(t *testing.T) {
	r := encryptedRig(t)
	v := r.newEncrypted(diskA, "secret")
	r.luksFormat(v, luks.HeaderUUID(uuid.MustParse(v.id)).String(), "another")
	before := r.digest(v)
	v.secrets[rpc.SecretPreviousPassphrase] = "not this either"
	coretest.WantCode(t, r.stage(v, filesystemVolume("ext4", writer)), codes.FailedPrecondition, "wrong passphrase")
	if r.digest(v) != before {
		t.Error("the disk was changed")
	}
}

// A header whose label was removed is never made again, even if the marker of an interrupted luksFormat is on the disk.
// The marker goes: it must not count after the header is damaged.
func TestNodeUsedHeaderStays(t *testing.T) {
	r := encryptedRig(t)
	v := r.newEncrypted(diskA, "wrong")
	r.luksFormat(v, luks.HeaderUUID(uuid.MustParse(v.id)).String(), "secret")
	r.run("cryptsetup", "config", "--disable-locks", "--label=", r.node(v))
	r.writeFormatMarker(v)
	v.secrets[rpc.SecretPreviousPassphrase] = "wrong too"
	coretest.WantCode(t, r.stage(v, filesystemVolume("ext4", writer)), codes.FailedPrecondition, "wrong passphrase")
	r.checkPassphrase(v, "secret")
	if marked, err := r.hasFormatMarker(v); err != nil || marked {
		t.Errorf("the marker is left: %t, %v", marked, err)
	}
}

// The record of an mkfs that was killed inside an encrypted disk is not taken for that of luksFormat, which would run
// again and need the mapping closed.
func TestNodeRecordOfMkfsInside(t *testing.T) {
	r := encryptedRig(t)
	v := r.newEncrypted(diskA, "secret")
	r.luksFormat(v, luks.HeaderUUID(uuid.MustParse(v.id)).String(), "secret")
	coretest.Must(t, os.MkdirAll(r.path("state/format"), 0o700))
	coretest.Must(t, os.WriteFile(r.path("state/format/"+v.id), []byte(`{"serial":"`+diskA+`","fsType":"ext4","fsUUID":"`+
		mount.FilesystemUUID(uuid.MustParse(v.id)).String()+`","bootID":"another","diskSequence":1}`), 0o600))
	before := r.digest(v)
	r.stageToMapping(v, filesystemVolume("ext4", writer))
	if r.digest(v) != before {
		t.Error("luksFormat ran again")
	}
}

func (r *nodeRig) hasFormatMarker(v *volume) (bool, error) {
	number := r.number(v)
	dev, err := r.roots().ByNumber(device.Number{Major: unix.Major(number), Minor: unix.Minor(number)})
	coretest.Must(r.t, err)
	return device.HasFormatMarker(dev, uuid.MustParse(v.id))
}

func (r *nodeRig) luksFormat(v *volume, headerUUID, passphrase string) {
	r.t.Helper()
	file := filepath.Join(r.t.TempDir(), "key")
	coretest.Must(r.t, os.WriteFile(file, []byte(passphrase), 0o600))
	r.run(
		"cryptsetup",
		"luksFormat",
		"-q",
		"--disable-locks",
		"--type=luks2",
		"--sector-size=4096",
		"--uuid="+headerUUID,
		"--label="+device.LabelUnformatted,
		"--pbkdf-memory=1024",
		"--pbkdf-force-iterations=4",
		"--key-file="+file,
		r.node(v),
	)
}

func (r *nodeRig) checkPassphrase(v *volume, passphrase string) {
	r.t.Helper()
	file := filepath.Join(r.t.TempDir(), "key")
	coretest.Must(r.t, os.WriteFile(file, []byte(passphrase), 0o600))
	r.run("cryptsetup", "open", "--test-passphrase", "--disable-locks", "--key-file="+file, r.node(v))
}
