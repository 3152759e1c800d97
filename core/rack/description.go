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
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
)

// descriptionBytes is less than the rack's limit of 512 bytes and leaves room for a later field. An encrypted disk with
// the longest cluster ID and the longest lineage has a few bytes more.
const descriptionBytes = 480

// Description is the JSON text that this plugin writes into the description of a disk or a snapshot: a rack has no
// labels, and a description never changes. Its fields are permanent.
type Description struct {
	// Version of this format.
	Version int `json:"v"`
	// Cluster is the ID of the cluster that created the disk or snapshot.
	Cluster string `json:"cluster"`
	// Hash is the whole hash, in base64, of kind, cluster and the name that the orchestrator gave. The name of the
	// disk or snapshot contains only its beginning.
	Hash string `json:"h"`
	// Lineage names the disks whose filesystem this disk may carry because it was made from their data, see [Lineage].
	Lineage []string `json:"fs,omitempty"`
	// Clone marks a disk that was made as a copy of the first disk of its lineage. The snapshot that the rack names as
	// its source was temporary. A disk that was made from a requested snapshot is not a clone.
	Clone bool `json:"clone,omitempty"`
	// RawBlock marks a disk that was made for use as raw block. Data on it can be anywhere.
	RawBlock bool `json:"raw,omitempty"`
	// LUKS is the version of LUKS with which a node encrypts the disk, 2, or 0. A snapshot has that of its disk.
	LUKS int `json:"luks,omitempty"`
	// Fixed says that the filesystem, which a node makes on the disk, may never grow. A snapshot has that of its disk.
	Fixed bool `json:"fixed,omitempty"`
	// Volume is the ID of the volume, for a disk that replaced the volume's first disk and for a snapshot of such a disk.
	// CreatedBytes, SourceSnapshot and SourceImage are the size and the source of the first disk.
	Volume         string `json:"vol,omitempty"`
	CreatedBytes   int64  `json:"size,omitempty"`
	SourceSnapshot string `json:"src,omitempty"`
	SourceImage    string `json:"img,omitempty"`
	// CreatedAt is when the first disk was made, in seconds since 1970 by the rack's clock. Older versions left it out.
	CreatedAt int64 `json:"made,omitempty"`
	// Name is the name of the volume or snapshot, for people. It may be cut.
	Name string `json:"name,omitempty"`
	// PVC is namespace/name of the claim, for people. It may be cut or left out.
	PVC string `json:"pvc,omitempty"`
}

// NewDescription describes the disk of a volume. claim may be empty.
func NewDescription(cluster, volume, claim string) Description {
	d := describe(diskname.Volume, cluster, volume)
	d.PVC = claim
	return d
}

// NewSnapshotDescription describes a snapshot that an orchestrator requested. lineage is that of the snapshot's disk.
func NewSnapshotDescription(cluster, snapshot string, lineage []string) Description {
	d := describe(diskname.Snapshot, cluster, snapshot)
	d.Lineage = lineage
	return d
}

// NewTemporaryDescription describes the snapshot through which a volume is cloned. Only this description proves that
// the plugin may delete the snapshot.
func NewTemporaryDescription(cluster, volume string, lineage []string) Description {
	d := describe(diskname.Clone, cluster, volume)
	d.Lineage = lineage
	return d
}

func describe(kind diskname.Kind, cluster, name string) Description {
	sum := diskname.Hash(kind, cluster, name)
	return Description{
		Version: record.Format,
		Cluster: cluster,
		Hash:    base64.StdEncoding.EncodeToString(sum[:]),
		Name:    name,
	}
}

// A lineage has at most lineageLength disks: a description has room for no more beside the longest cluster ID. A
// longer lineage keeps its nearest and its oldest disks.
const (
	lineageNearest = 4
	lineageOldest  = 4
	lineageLength  = lineageNearest + lineageOldest
)

// Lineage returns the lineage of a disk made from the data of diskID, whose own lineage is ancestors: first
// diskID, then its ancestors, the oldest last. Of more than eight disks the four nearest and the four oldest stay: the
// filesystem was made on the oldest, or on one of the first copies if the oldest had none yet. A node also mounts the
// filesystem of an ancestor that was dropped, and logs it. Entries that are not IDs are dropped, because any user may
// write a description.
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

// Encode returns the text for the rack, at most 480 bytes, see descriptionBytes. If it is too long, the fields for
// people are cut between characters or dropped, the claim first.
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

// cut removes at least n bytes from the end of text, in whole characters. JSON escapes make some characters longer
// than they are here, so one cut may not be enough, but each cut removes something.
func cut(text string, n int) string {
	end := max(0, len(text)-n)
	for end > 0 && !utf8.RuneStart(text[end]) {
		end--
	}
	return text[:end]
}

// FullNames returns the name of the volume or snapshot and the volume's claim from a description, each as the
// orchestrator gave it, or "" if it may have been cut. [Description.Encode] cuts the claim first, and then the text is
// as long as it can be.
func FullNames(kind diskname.Kind, text string) (name, claim string) {
	d, _ := ParseDescription(text)
	sum := diskname.Hash(kind, d.Cluster, d.Name)
	if d.Hash == base64.StdEncoding.EncodeToString(sum[:]) {
		name = d.Name
	}
	if len(text) < descriptionBytes {
		claim = d.PVC
	}
	return name, claim
}

// checkFormat returns [record.ErrFormat] for the text of a newer format, with the name of the object that has it.
func checkFormat(object, text string) error {
	var written struct {
		Version int    `json:"v"`
		Cluster string `json:"cluster"`
	}
	if !strings.HasPrefix(text, "{") || json.Unmarshal([]byte(text), &written) != nil ||
		written.Cluster == "" || written.Version <= record.Format {
		return nil
	}
	return fmt.Errorf("%s has format %d, not %d: it %w", object, written.Version, record.Format, record.ErrFormat)
}

// ParseDescription reads a description that this plugin wrote. It returns false for any other text, also for that of a
// newer format: in a list, such a disk or snapshot has no owner, so nothing deletes it. A lookup returns
// [record.ErrFormat].
func ParseDescription(text string) (Description, bool) {
	var d Description
	if err := json.Unmarshal(
		[]byte(text),
		&d,
	); err != nil || d.Version < 1 || d.Version > record.Format ||
		d.Cluster == "" ||
		d.Hash == "" {
		return Description{}, false
	}
	return d, true
}

// SameObject reports whether both descriptions are of the same volume or snapshot of the same cluster.
func (d Description) SameObject(other Description) bool {
	return d.Cluster == other.Cluster && d.Hash == other.Hash
}
