// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package diskname has the rules for the names and IDs of disks and snapshots. Controller and node both need these
// rules, and the node must not link the rack's client.
//
// A name is "csi-" and the beginning of a hash of the cluster ID and the orchestrator's name. Names are permanent: a
// repeated CreateVolume finds its disk by name.
package diskname

import (
	"crypto/sha256"
	"encoding/base32"
	"strings"

	"github.com/google/uuid"
)

// SerialBytes is how many bytes of a disk's name the guest sees as the NVMe serial (docs/reference/rack.md §9). If the
// names of two disks agree in these bytes, the guest shows only one of the disks.
const SerialBytes = 20

const (
	diskPrefix      = "csi-"
	snapshotPrefix  = "csi-snap-"
	temporaryPrefix = "csi-tmp-"
	expansionPrefix = "csi-grow-"
	// hashLetters is what fits into SerialBytes, so that the serial is the whole name.
	hashLetters = SerialBytes - len(diskPrefix)
	// A guest never sees the name of a snapshot, so the name can contain more of the hash.
	snapshotHashLetters = 32
)

// DiskID is the ID that the rack has for one disk. The ID of a volume is a plain string, as in CSI: it stays the same
// while the volume gets one larger disk after another. With two types the compiler keeps them apart.
type DiskID string

// Kind says what a name is for. It is part of the hash: a volume and a snapshot with the same name have different
// hashes.
type Kind string

// The kinds of hashed names. They are permanent.
const (
	Volume   Kind = "volume"
	Snapshot Kind = "snapshot"
	Clone    Kind = "clone"
	restart  Kind = "restart"
	work     Kind = "work"
)

const base32Letters = "abcdefghijklmnopqrstuvwxyz234567"

var lowerBase32 = base32.NewEncoding(base32Letters).WithPadding(base32.NoPadding)

// Hash is the SHA-256 hash that names are made from. It includes the cluster ID, because clusters may share a project.
func Hash(kind Kind, cluster, name string) [sha256.Size]byte {
	return sha256.Sum256([]byte(string(kind) + "\x00" + cluster + "\x00" + name))
}

func hashText(kind Kind, cluster, name string, letters int) string {
	sum := Hash(kind, cluster, name)
	return lowerBase32.EncodeToString(sum[:])[:letters]
}

// ForVolume returns the name of the disk of a volume.
func ForVolume(cluster, volume string) string {
	sum := Hash(Volume, cluster, volume)
	return ForVolumeHash(sum[:])
}

// ForVolumeHash returns the name of the disk of a volume by the volume's [Hash].
func ForVolumeHash(sum []byte) string {
	return diskPrefix + lowerBase32.EncodeToString(sum)[:hashLetters]
}

// ForSnapshot returns the name of a snapshot that an orchestrator requested.
func ForSnapshot(cluster, snapshot string) string {
	return snapshotPrefix + hashText(Snapshot, cluster, snapshot, snapshotHashLetters)
}

// ForClone returns the name of the temporary snapshot through which a volume is cloned. It depends only on the new
// volume's name, so that a repeated CreateVolume finds the snapshot of an earlier call.
func ForClone(cluster, volume string) string {
	return temporaryPrefix + hashText(Clone, cluster, volume, snapshotHashLetters)
}

// ForCluster returns the text that identifies a cluster in the names of its records.
func ForCluster(cluster string) string {
	return hashText(restart, cluster, "", hashLetters)
}

// ForWork returns the text that identifies a disk's name in the name of a record. A disk that a user made may have a
// longer name than a record has room for.
func ForWork(diskName string) string { return hashText(work, "", diskName, snapshotHashLetters) }

// IsTemporary reports whether a snapshot's name has the form of [ForClone].
func IsTemporary(snapshotName string) bool {
	return strings.HasPrefix(snapshotName, temporaryPrefix)
}

// ForExpansion returns the name of the snapshot through which a volume grows. The attempt is a UUID.
func ForExpansion(attempt string) string { return expansionPrefix + attempt }

// IsExpansion reports whether a snapshot's name has the form of [ForExpansion].
func IsExpansion(snapshotName string) bool { return strings.HasPrefix(snapshotName, expansionPrefix) }

// maxNameBytes is the length of the longest name on a rack.
const maxNameBytes = 63

// Valid reports whether a disk on a rack can have this name (docs/reference/rack.md §1).
func Valid(name string) bool {
	const letters = "abcdefghijklmnopqrstuvwxyz"
	if name == "" || len(name) > maxNameBytes || strings.Trim(name[:1], letters) != "" || name[len(name)-1] == '-' ||
		strings.Trim(name, letters+"0123456789-") != "" {
		return false
	}
	return uuid.Validate(name) != nil
}

// Serial returns the NVMe serial that the guest shows for a disk with this name.
func Serial(diskName string) string {
	return diskName[:min(len(diskName), SerialBytes)]
}

// IsVolumeSerial reports whether a serial is the name of a disk that this plugin made, for any cluster.
func IsVolumeSerial(serial string) bool {
	letters, ok := strings.CutPrefix(serial, diskPrefix)
	return ok && len(letters) == hashLetters && strings.Trim(letters, base32Letters) == ""
}

// ParseID reads the ID of a disk, a snapshot or an instance, and returns it in lower case, as racks write it. It
// accepts only the hyphenated form of a UUID. A rack accepts other forms of a UUID for the same ID, and takes any
// other text for a name (docs/reference/rack.md §1).
func ParseID(text string) (string, bool) {
	id, err := uuid.Parse(text)
	if err != nil || len(text) != len("00000000-0000-0000-0000-000000000000") {
		return "", false
	}
	return id.String(), true
}
