// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
)

// descriptionBytes keeps a description below the rack's 512 bytes, with room for a later field.
const descriptionBytes = 480

// Description is what we write into the description of a disk or a snapshot, as JSON: a rack has no labels, and a
// description never changes. Its fields are permanent.
type Description struct {
	// Version of this format.
	Version int `json:"v"`
	// Cluster is the ID of the cluster that made the thing.
	Cluster string `json:"cluster"`
	// Hash is the whole hash of kind, cluster and the name that the orchestrator gave, in base64: the thing's own name has
	// only the beginning of it.
	Hash string `json:"h"`
	// Lineage names the disks whose filesystem this one may carry, since it was made from their data, see [Lineage].
	Lineage []string `json:"fs,omitempty"`
	// Clone says that a disk was made as a copy of the first disk of its lineage, not from a snapshot that somebody asked
	// for: the snapshot that the rack names as its source was temporary.
	Clone bool `json:"clone,omitempty"`
	// Name is the name of the volume or snapshot, perhaps cut; for people.
	Name string `json:"name,omitempty"`
	// PVC is namespace/name of the claim, perhaps cut or left out; for people.
	PVC string `json:"pvc,omitempty"`
}

// NewDescription describes the disk of a volume. The claim may be empty.
func NewDescription(cluster, volume, claim string) Description {
	d := describe(diskname.Volume, cluster, volume)
	d.PVC = claim
	return d
}

// NewSnapshotDescription describes a snapshot that an orchestrator asked for, of the data of these disks.
func NewSnapshotDescription(cluster, snapshot string, lineage []string) Description {
	d := describe(diskname.Snapshot, cluster, snapshot)
	d.Lineage = lineage
	return d
}

// NewTemporaryDescription describes the snapshot through which a volume is made as a clone. Only it proves that the
// snapshot is ours to delete.
func NewTemporaryDescription(cluster, volume string, lineage []string) Description {
	d := describe(diskname.Clone, cluster, volume)
	d.Lineage = lineage
	return d
}

func describe(kind diskname.Kind, cluster, name string) Description {
	sum := diskname.Hash(kind, cluster, name)
	return Description{Version: 1, Cluster: cluster, Hash: base64.StdEncoding.EncodeToString(sum[:]), Name: name}
}

// A lineage has at most lineageLength disks, which is what a description has room for beside the longest cluster ID. Of a
// longer one these ends are kept.
const (
	lineageNearest = 4
	lineageOldest  = 4
	lineageLength  = lineageNearest + lineageOldest
)

// Lineage is the lineage of what is made from the data of a disk that has this lineage itself: that disk first, its
// ancestors after it, the oldest last. Of more than eight the four nearest and the four oldest stay: the filesystem was
// made on the oldest, or on one of the first copies where the oldest held none yet. A node mounts the filesystem of an
// ancestor that was dropped as well, with a line in its log. What is no ID among the ancestors is dropped too, since
// anybody may write a description.
func Lineage(diskID string, ancestors []string) []string {
	lineage := []string{diskID}
	for _, text := range ancestors {
		if id, ok := diskname.ParseID(text); ok {
			lineage = append(lineage, id)
		}
	}
	if over := len(lineage) - lineageLength; over > 0 {
		lineage = slices.Delete(lineage, lineageNearest, lineageNearest+over)
	}
	return lineage
}

// Encode gives the text for the rack, at most 480 bytes: the fields meant for people are cut between characters, the
// claim first, or dropped.
func (d Description) Encode() string {
	for {
		text := d.marshal()
		over := len(text) - descriptionBytes
		switch {
		case over <= 0:
			return text
		case d.PVC != "":
			d.PVC = cut(d.PVC, over)
		case d.Name != "":
			d.Name = cut(d.Name, over)
		default:
			return text
		}
	}
}

func (d Description) marshal() string {
	var text strings.Builder
	encoder := json.NewEncoder(&text)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(d); err != nil {
		panic(fmt.Sprintf("a description of strings and numbers always encodes: %v", err))
	}
	return strings.TrimSuffix(text.String(), "\n")
}

// cut removes at least n bytes from the end of text, and whole characters only. Escaped characters are longer encoded
// than they are here, so one cut may not suffice, but each removes something.
func cut(text string, n int) string {
	end := max(0, len(text)-n)
	for end > 0 && !utf8.RuneStart(text[end]) {
		end--
	}
	return text[:end]
}

// ParseDescription reads a description of ours. False means that somebody else made the disk.
func ParseDescription(text string) (Description, bool) {
	var d Description
	if err := json.Unmarshal([]byte(text), &d); err != nil || d.Version < 1 || d.Cluster == "" || d.Hash == "" {
		return Description{}, false
	}
	return d, true
}

// SameThing reports whether both describe the disk of one volume of one cluster, or one snapshot of it.
func (d Description) SameThing(other Description) bool {
	return d.Cluster == other.Cluster && d.Hash == other.Hash
}
