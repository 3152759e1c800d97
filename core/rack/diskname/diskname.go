// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package diskname has the rules for the names and IDs of disks and snapshots. Controller and node both need them, and the
// node must not link the rack's client.
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

// SerialBytes is how many bytes of a disk's name the guest sees as the NVMe serial (docs/reference/rack.md §9). A guest
// shows only one of two disks whose names agree in these bytes.
const SerialBytes = 20

const (
	diskPrefix      = "csi-"
	snapshotPrefix  = "csi-snap-"
	temporaryPrefix = "csi-tmp-"
	// hashLetters fill a disk's name up to SerialBytes, so that the whole name is the serial.
	hashLetters = SerialBytes - len(diskPrefix)
	// No guest sees a snapshot's name, so it takes more letters of the hash.
	snapshotHashLetters = 32
)

// Kind says what a name is for. It is part of the hash: a volume and a snapshot of the same name get different hashes.
type Kind string

// The kinds of hashed names. They are permanent.
const (
	Volume   Kind = "volume"
	Snapshot Kind = "snapshot"
	Clone    Kind = "clone"
	restart  Kind = "restart"
)

const base32Letters = "abcdefghijklmnopqrstuvwxyz234567"

var lowerBase32 = base32.NewEncoding(base32Letters).WithPadding(base32.NoPadding)

// Hash is the SHA-256 hash from which names are made. The cluster ID keeps apart clusters that share a project.
func Hash(kind Kind, cluster, name string) [sha256.Size]byte {
	return sha256.Sum256([]byte(string(kind) + "\x00" + cluster + "\x00" + name))
}

func hashText(kind Kind, cluster, name string, letters int) string {
	sum := Hash(kind, cluster, name)
	return lowerBase32.EncodeToString(sum[:])[:letters]
}

// ForVolume returns the name of the disk of a volume.
func ForVolume(cluster, volume string) string {
	return diskPrefix + hashText(Volume, cluster, volume, hashLetters)
}

// ForSnapshot returns the name of a snapshot that an orchestrator asked for.
func ForSnapshot(cluster, snapshot string) string {
	return snapshotPrefix + hashText(Snapshot, cluster, snapshot, snapshotHashLetters)
}

// ForClone returns the name of the temporary snapshot from which a clone is made. It follows from the new volume's name, so
// that a repeated CreateVolume finds the snapshot that an earlier call left behind.
func ForClone(cluster, volume string) string {
	return temporaryPrefix + hashText(Clone, cluster, volume, snapshotHashLetters)
}

// ForCluster returns the text that stands for a cluster in the names of restart records.
func ForCluster(cluster string) string {
	return hashText(restart, cluster, "", hashLetters)
}

// Temporary reports whether a snapshot's name is one that [ForClone] makes.
func Temporary(snapshotName string) bool {
	return strings.HasPrefix(snapshotName, temporaryPrefix)
}

// Serial returns the NVMe serial that the guest shows for a disk of this name.
func Serial(diskName string) string {
	return diskName[:min(len(diskName), SerialBytes)]
}

// OfVolume reports whether a serial is the name of a disk that this plugin made, for any cluster.
func OfVolume(serial string) bool {
	letters, ok := strings.CutPrefix(serial, diskPrefix)
	return ok && len(letters) == hashLetters && strings.Trim(letters, base32Letters) == ""
}

// ParseID reads the ID of a disk, a snapshot or an instance, and returns it in lower case, as racks write it. Only the
// hyphenated form of a UUID is an ID: a rack takes its other forms for the same ID, and every other text for a name
// (docs/reference/rack.md §1).
func ParseID(text string) (string, bool) {
	id, err := uuid.Parse(text)
	if err != nil || len(text) != len("00000000-0000-0000-0000-000000000000") {
		return "", false
	}
	return id.String(), true
}
