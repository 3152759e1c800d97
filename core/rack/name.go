package rack

import (
	"crypto/sha256"
	"encoding/base32"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"strings"
	"unicode/utf8"
)

// SerialBytes is how much of a disk's name the guest sees as the NVMe serial (docs/rack.md §9). Two disks of one
// instance whose names agree in these bytes cannot both be seen.
const SerialBytes = 20

const (
	diskPrefix = "csi-"
	// descriptionBytes keeps a description below the rack's 512 with room for a later field.
	descriptionBytes = 480
	// hashLetters fill a disk's name up to SerialBytes, so that the whole name is the serial.
	hashLetters = SerialBytes - len(diskPrefix)
)

const base32Letters = "abcdefghijklmnopqrstuvwxyz234567"

var lowerBase32 = base32.NewEncoding(base32Letters).WithPadding(base32.NoPadding)

// Serial is what the guest shows as the NVMe serial of a disk of this name.
func Serial(diskName string) string {
	return diskName[:min(len(diskName), SerialBytes)]
}

// DiskName names the disk of a volume: "csi-" and 16 letters of the hash of cluster and volume name. It is permanent:
// the name is how a repeated CreateVolume finds its disk again. The cluster ID keeps apart clusters that share a project.
func DiskName(cluster, volume string) string {
	sum := volumeHash(cluster, volume)
	return diskPrefix + lowerBase32.EncodeToString(sum[:])[:hashLetters]
}

// MadeHere reports whether a disk of this serial has the name of one that this plugin made, for whichever cluster.
func MadeHere(serial string) bool {
	letters, ok := strings.CutPrefix(serial, diskPrefix)
	return ok && len(letters) == hashLetters && strings.Trim(letters, base32Letters) == ""
}

func volumeHash(cluster, volume string) [sha256.Size]byte {
	return sha256.Sum256([]byte("volume\x00" + cluster + "\x00" + volume))
}

// Description is what we write into the description of a disk, as JSON: a rack has no labels, and a description never
// changes. Its fields are permanent.
type Description struct {
	// Version of this format.
	Version int `json:"v"`
	// Cluster is the ID of the cluster that made the disk.
	Cluster string `json:"cluster"`
	// Hash is the whole hash of cluster and volume name in base64: the disk's name has only its first 80 bits.
	Hash string `json:"h"`
	// Lineage names the disks whose filesystem this one may carry, since it was made from their data.
	Lineage []string `json:"fs,omitempty"`
	// Name is the volume's name, perhaps cut; for people.
	Name string `json:"name,omitempty"`
	// PVC is namespace/name of the claim, perhaps cut or left out; for people.
	PVC string `json:"pvc,omitempty"`
}

// NewDescription describes the disk of a volume. The claim may be empty.
func NewDescription(cluster, volume, claim string) Description {
	sum := volumeHash(cluster, volume)
	return Description{
		Version: 1,
		Cluster: cluster,
		Hash:    base64.StdEncoding.EncodeToString(sum[:]),
		Name:    volume,
		PVC:     claim,
	}
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

// SameVolume reports whether both describe the disk of one volume of one cluster.
func (d Description) SameVolume(other Description) bool {
	return d.Cluster == other.Cluster && d.Hash == other.Hash
}
