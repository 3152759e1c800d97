// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
	"github.com/oxidecomputer/oxide-csi-plugin/core/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/core/hostexec"
	"github.com/oxidecomputer/oxide-csi-plugin/core/luks"
	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// This file opens and closes encrypted disks, see [luks]. Between the two, the rest of the package works on the mapping
// where it reads or writes data, and on the disk where it holds the disk or lets it go.

// passphrases are the secrets of a NodeStageVolume request.
type passphrases struct {
	now luks.Passphrase
	// previous is the passphrase that now replaces. It is empty if there is no change.
	previous luks.Passphrase
}

func parsePassphrases(secrets map[string]string) passphrases {
	p := passphrases{now: luks.Passphrase(secrets[rpc.SecretPassphrase])}
	if previous := secrets[rpc.SecretPreviousPassphrase]; previous != secrets[rpc.SecretPassphrase] {
		p.previous = luks.Passphrase(previous)
	}
	return p
}

// content returns the device that has the volume's clear data: the mapping of an encrypted disk, or the disk.
func (v *staging) content() device.Device {
	if v.mapping == nil {
		return v.dev
	}
	inside := v.mapping.Device
	inside.FirstBytes = max(0, v.dev.FirstBytes-(v.dev.SizeBytes-inside.SizeBytes))
	return inside
}

// acceptsHeader reports whether the volume's disk may have a LUKS header with this UUID.
func (v *staging) acceptsHeader(headerUUID string) bool {
	return v.anyFilesystem || v.isOwnHeader(headerUUID)
}

// isOwnHeader reports whether this plugin made a LUKS header with this UUID for the volume's disk, or for one that it
// was copied from.
func (v *staging) isOwnHeader(headerUUID string) bool {
	return slices.ContainsFunc(append(v.fsLineage, v.id), func(disk uuid.UUID) bool {
		return strings.EqualFold(luks.HeaderUUID(disk).String(), headerUUID)
	})
}

// unlock opens the volume's encrypted disk, after making its header if the disk is blank. For a volume that is not
// encrypted, it only checks that the disk is not encrypted either.
func (n *Service) unlock(ctx context.Context, volume *staging) error {
	if !volume.encrypted {
		return checkInClear(volume)
	}
	dev := volume.dev
	mapping, err := n.ownMapping(ctx, volume)
	if err != nil {
		return err
	}
	table, err := mount.ReadTable()
	if err != nil {
		return err
	}
	if mapping != nil && len(table.OfDevice(dev.Number)) > 0 {
		// It is staged. Nothing is opened, so a passphrase is only needed to change it.
		volume.mapping = mapping
		_, err := n.changePassphrase(ctx, volume)
		return err
	}
	if len(volume.secrets.now) == 0 {
		return rpc.Fault(fault.PassphraseMissing,
			"volume %s is encrypted, and the request has no passphrase: set the key %s of the volume's secret",
			volume.id, rpc.SecretPassphrase)
	}
	if mapping, err = n.closeLeft(ctx, volume, table, mapping); err != nil {
		return err
	}
	if err := setReadOnly(dev, volume.readOnly); err != nil {
		return err
	}
	header, err := n.ensureHeader(ctx, volume)
	if err != nil {
		return err
	}
	volume.unformatted, volume.dataOffset = header.Unformatted(), header.OffsetBytes
	if mapping != nil && !header.Belongs(*mapping, dev) {
		return rpc.FailedPrecondition(
			"volume %s: its mapping %s is in use, and is not that of disk %s: end the programs that have it open", volume.id,
			mapping.Name, dev)
	}
	volume.mapping = mapping
	start := time.Now()
	if err := n.open(ctx, volume); err != nil {
		return err
	}
	n.log.Debug("opened the encrypted disk",
		"volume_id", volume.id.String(), "device", dev.String(), "open", time.Since(start))
	return nil
}

// closeLeft closes a mapping that a killed plugin has left, so that it is opened with the options of this request. It
// returns the mapping only if read-only copies of a mount still use it. Otherwise nothing may use the disk.
func (n *Service) closeLeft(
	ctx context.Context, volume *staging, table mount.Table, left *device.Mapping,
) (*device.Mapping, error) {
	if left != nil && len(mount.CopiesOf(volume.dev.Number)) > 0 {
		return left, nil
	}
	if left != nil {
		if err := n.closeMapping(ctx, *left, false); err != nil {
			return nil, fmt.Errorf("volume %s: its disk is open from an earlier stage: %w", volume.id, err)
		}
	}
	return nil, n.checkFree(ctx, volume, table)
}

// ownMapping returns the volume's open mapping on its disk, or nil. It closes the others: one that a killed cryptsetup
// left unfinished, and those of disks that have left the guest, at the latest when their last users have gone.
func (n *Service) ownMapping(ctx context.Context, volume *staging) (*device.Mapping, error) {
	if err := n.closeOrphans(ctx, volume.id); err != nil {
		return nil, err
	}
	mapping, found, err := n.devices.Mapping(volume.id)
	if err != nil || !found {
		return nil, err
	}
	if mapping.Below != volume.dev.Number {
		return nil, rpc.FailedPrecondition(
			"volume %s: its mapping %s is open on another disk than %s: unstage the volume first", volume.id, mapping.Name,
			volume.dev)
	}
	return &mapping, nil
}

// checkFree rejects a disk that is in use before it was opened: it would be used in clear.
func (n *Service) checkFree(ctx context.Context, volume *staging, table mount.Table) error {
	if err := checkNotMounted(volume, table); err != nil {
		return err
	}
	own, err := n.checkForeignUser(ctx, volume)
	if err == nil && own != nil {
		err = volume.foreignUser(own.String())
	}
	return err
}

// open opens the disk, or verifies the passphrase if a plugin that was killed has left the mapping open.
func (n *Service) open(ctx context.Context, volume *staging) error {
	dev, secrets := volume.dev, volume.secrets
	checked, err := n.changePassphrase(ctx, volume)
	if err != nil {
		return err
	}
	if volume.mapping != nil {
		if !checked {
			_, err = n.luks.Check(ctx, dev, secrets.now)
		}
		return volume.wrongPassphrase(err)
	}
	options := luks.OpenOptions{
		ReadOnly: volume.readOnly,
		Discard:  slices.Contains(filesystem.SplitMountFlags(volume.options.Flags), "discard"),
	}
	mapping, err := n.luks.Open(ctx, dev, volume.id, secrets.now, options)
	if errors.Is(err, luks.ErrPassphrase) && volume.readOnly && len(secrets.previous) > 0 {
		mapping, err = n.luks.Open(ctx, dev, volume.id, secrets.previous, options)
	}
	if err != nil {
		return volume.wrongPassphrase(err)
	}
	volume.mapping, volume.opened = &mapping, true
	return nil
}

// hold keeps the volume's mapping open, so that the kernel can neither close it nor give its number away. Then it looks
// whether the mapping is still the volume's: its last user may have ended meanwhile.
func (n *Service) hold(volume *staging) (release func() error, err error) {
	file, err := volume.mapping.Open(unix.O_RDONLY)
	if err != nil {
		return nil, err
	}
	now, found, err := n.devices.Mapping(volume.id)
	if err == nil && (!found || now.Number != volume.mapping.Number || now.DMUUID != volume.mapping.DMUUID) {
		err = rpc.Unavailable("volume %s: its mapping was just closed: try again", volume.id)
	}
	if err != nil {
		return nil, errors.Join(err, hostexec.CloseUninherited(file))
	}
	return func() error { return hostexec.CloseUninherited(file) }, nil
}

// changePassphrase changes the passphrase of the disk's header if the request asks for it. The header of a read-only
// disk stays. It reports whether the new passphrase was seen to open the disk.
func (n *Service) changePassphrase(ctx context.Context, volume *staging) (checked bool, err error) {
	dev, secrets := volume.dev, volume.secrets
	if len(secrets.previous) == 0 || len(secrets.now) == 0 || volume.readOnly {
		return false, nil
	}
	changed, err := n.luks.ChangePassphrase(ctx, dev, secrets.now, secrets.previous)
	if err != nil {
		return false, volume.wrongPassphrase(err)
	}
	if changed {
		n.log.Info("changed the passphrase of an encrypted disk", "volume_id", volume.id.String(), "device", dev.String())
	}
	return true, nil
}

// wrongPassphrase says what to do about [luks.ErrPassphrase].
func (v *staging) wrongPassphrase(err error) error {
	if !errors.Is(err, luks.ErrPassphrase) {
		return err
	}
	return rpc.FailedPrecondition(
		"volume %s: disk %s does not open: %w: correct the passphrase; a copy has that of its source",
		v.id,
		v.dev,
		err,
	)
}

// ensureHeader returns the LUKS header of the disk. If the disk is provably blank, it makes one. No other code calls
// luksFormat. A disk with anything else stays as it is, except for a damaged copy of its header.
func (n *Service) ensureHeader(ctx context.Context, volume *staging) (luks.Header, error) {
	dev := volume.dev
	zero, err := device.HeadIsZero(ctx, dev)
	if err != nil {
		return luks.Header{}, err
	}
	var content device.Content
	if !zero {
		if content, err = device.Probe(ctx, dev); err != nil {
			return luks.Header{}, err
		}
	}
	made := luks.HeaderUUID(volume.id)
	interrupted, err := n.formatter.InterruptedFormat(volume.id, made, dev, content)
	if err != nil {
		return luks.Header{}, err
	}
	if content.Empty() || interrupted != nil {
		return n.encrypt(ctx, volume, interrupted)
	}
	if content.Type != device.TypeLUKS {
		return luks.Header{}, rpc.FailedPrecondition(
			"volume %s: disk %s should be encrypted but holds %s: use another volume, or find what wrote to it", volume.id, dev,
			content)
	}
	header, err := n.luks.ReadHeader(ctx, dev)
	if err == nil {
		err = volume.checkHeader(header)
	}
	if err != nil {
		return luks.Header{}, err
	}
	if err := n.mendHeader(ctx, volume); err != nil {
		return luks.Header{}, err
	}
	return header, n.formatter.RemoveMarkerAndRecord(volume.id, dev)
}

// mendHeader mends a damaged or older copy of the header of a writable disk, before anything else changes the header.
func (n *Service) mendHeader(ctx context.Context, volume *staging) error {
	if volume.readOnly {
		return nil
	}
	wrong, err := n.luks.Mend(ctx, volume.dev, volume.secrets.now, volume.secrets.previous)
	if err != nil {
		return volume.wrongPassphrase(err)
	}
	if wrong != "" {
		n.mendedHeaders.Add(1)
		n.mended.Store(volume.id, condition(csi.VolumeHealthErrorType_DEGRADED, reasonHeaderMended,
			"at %s the LUKS header of disk %s was mended from its other copy: %s: "+
				"look for the cause in the logs of the node and the rack, and restore what else is damaged",
			time.Now().UTC().Format(time.RFC3339), volume.dev, wrong))
		n.log.Warn("mended the header of an encrypted disk: look for the cause in the logs of the node and the rack",
			"volume_id", volume.id.String(), "device", volume.dev.String(), "reason", wrong)
	}
	return nil
}

// checkHeader rejects a header that is not known to be that of the volume's disk.
func (v *staging) checkHeader(header luks.Header) error {
	switch {
	case !v.acceptsHeader(header.UUID):
		return rpc.Fault(
			fault.ForeignFilesystem,
			"volume %s: the LUKS header on %s belongs to another volume: its UUID is %s: "+
				"use the right disk, or set %s: \"false\" in the volume's context",
			v.id,
			v.dev.Path,
			header.UUID,
			rpc.KeyVerifyFilesystem,
		)
	case v.ownFilesystem && header.UUID != luks.HeaderUUID(v.id).String():
		return rpc.FailedPrecondition(
			"volume %s: the LUKS header on %s does not show that the disk is this volume's: wait for the controller, which knows",
			v.id,
			v.dev,
		)
	}
	return nil
}

// encrypt makes a LUKS header on a blank disk.
func (n *Service) encrypt(
	ctx context.Context, volume *staging, interrupted *device.InterruptedFormat,
) (_ luks.Header, err error) {
	dev := volume.dev
	if !volume.mayEncrypt || volume.ownFilesystem {
		return luks.Header{}, rpc.FailedPrecondition(
			"volume %s: disk %s has no LUKS header, and the publish context does not say that the disk is encrypted: publish the volume through the controller",
			volume.id,
			dev,
		)
	}
	if err := volume.checkMayFormat("LUKS header"); err != nil {
		return luks.Header{}, err
	}
	blank, err := device.ProveBlank(ctx, dev, device.BlankOptions{
		VolumeID: volume.id, Origin: volume.origin, RawBlock: volume.rawBlock, Encrypted: true,
		ScanLimit: n.blankScanLimit, Interrupted: interrupted,
	})
	if err != nil {
		return luks.Header{}, err
	}
	defer func() { err = errors.Join(err, blank.Close()) }()
	n.log.Info("encrypting a blank disk", "volume_id", volume.id.String(), "device", dev.String(),
		"interrupted_before", blank.HasRemains())
	took, err := n.formatter.FormatWith(ctx, blank, mount.Making{
		VolumeID: volume.id,
		Type:     device.TypeLUKS,
		UUID:     luks.HeaderUUID(volume.id),
		Make: func(ctx context.Context, path string) error {
			return n.luks.Format(ctx, path, volume.id, volume.secrets.now)
		},
		Verify: func(ctx context.Context) error { return n.luks.Verify(ctx, dev, volume.id) },
	})
	if err != nil {
		return luks.Header{}, err
	}
	n.log.Info("encrypted a disk", "volume_id", volume.id.String(), "luks_format", took)
	return n.luks.ReadHeader(ctx, dev)
}

// checkInClear rejects an encrypted disk, and a passphrase, for a volume that is not encrypted: its data would be
// readable, or destroyed.
func checkInClear(volume *staging) error {
	dev := volume.dev
	headerUUID, _, err := dev.LUKSHeader()
	switch {
	case err != nil:
		return err
	case volume.isOwnHeader(headerUUID):
		return rpc.FailedPrecondition(
			"volume %s: disk %s is encrypted, and the contexts do not say so: set %s: %s in the volume's context", volume.id,
			dev, rpc.KeyEncryption, rpc.EncryptionLUKS2)
	case len(volume.secrets.now) > 0:
		return rpc.FailedPrecondition(
			"volume %s is not encrypted, but the request has a passphrase: set %s: %s at the volume's creation, or give no passphrase",
			volume.id,
			rpc.KeyEncryption,
			rpc.EncryptionLUKS2,
		)
	}
	return nil
}

// ensureEncryptedFilesystem is [Service.ensureFilesystem] inside an encrypted disk. mkfs runs only while the header has
// the label [device.LabelUnformatted]. The label is removed before the first mount.
func (n *Service) ensureEncryptedFilesystem(ctx context.Context, volume *staging) (fsType string, err error) {
	if volume.unformatted {
		if err := n.checkNeverWritten(ctx, volume); err != nil {
			return "", err
		}
		fsType, err = n.format(ctx, volume, device.BlankOptions{
			VolumeID: volume.id, Origin: device.OriginBlank, NeverWritten: true,
		})
		if err != nil {
			return "", err
		}
		return fsType, n.luks.ClearLabel(ctx, volume.dev)
	}
	content, err := device.Probe(ctx, volume.content())
	if err != nil {
		return "", err
	}
	if content.Empty() {
		return "", rpc.FailedPrecondition(
			"volume %s: encrypted disk %s was used before and has no filesystem inside: use the volume as raw block, or use another volume",
			volume.id,
			volume.dev,
		)
	}
	return n.checkFilesystem(ctx, volume, content)
}

// checkNeverWritten rejects an encrypted disk with data whose label says "unformatted": an old header was restored. The
// remains of an mkfs that did not end, or was never followed by a mount, are allowed.
func (n *Service) checkNeverWritten(ctx context.Context, volume *staging) error {
	dev, inside := volume.dev, volume.content()
	content, err := device.Probe(ctx, inside)
	if err != nil {
		return err
	}
	made := mount.FilesystemUUID(volume.id)
	interrupted, err := n.formatter.InterruptedFormat(volume.id, made, inside, content)
	if err != nil || interrupted != nil {
		return err
	}
	if strings.EqualFold(content.UUID, made.String()) {
		if never, err := device.NeverMounted(inside, content); err != nil || never {
			return err
		}
	}
	err = device.CheckNeverWritten(ctx, dev, volume.dataOffset, device.BlankOptions{
		RawBlock: volume.rawBlock, ScanLimit: n.blankScanLimit,
	})
	if errors.Is(err, device.ErrNotBlank) {
		n.log.Info("an encrypted disk holds data", "volume_id", volume.id.String(), "error", err)
		return rpc.FailedPrecondition(
			"volume %s: encrypted disk %s is labelled unused but holds data: restore its header, or clear the label with cryptsetup config --label= %s",
			volume.id,
			dev,
			dev.Path,
		)
	}
	return err
}
