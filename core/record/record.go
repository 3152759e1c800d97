// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package record has the records that the plugin keeps on a rack: their names, their texts, and the one rule by which
// all of them are read. formats.go has every kind of record.
//
// A record is an anti-affinity group without members, which affects nothing and counts against no quota
// (docs/reference/rack.md §8). Creating one is atomic, because names are unique. Nothing else is atomic. Any user of
// the project may make such groups, too, and several clusters may share a project. So:
//
//   - A list is filtered by name before anything is parsed. The name of a record that belongs to a cluster has the
//     cluster's hash. Records of a volume belong to no cluster, because the volume may be adopted.
//   - A group whose name is that of a record and whose text is not is ignored. [Unread] finds these groups. Only who
//     needs that very name refuses its call, with [ErrNoRecord].
//   - A record of a newer format concerns the volume or instance that it is about, and nothing else: [ErrFormat].
package record

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
)

// Record is a small text that the rack keeps under a name, visible to all users of the project.
type Record struct {
	ID   string
	Name string
	// Text has at most 512 bytes.
	Text string
	// Created and Modified are by the rack's clock. Each update moves Modified.
	Created, Modified time.Time
}

// Seen is the text of a record, and since when a process has known the record with this text.
type Seen struct {
	Text  string
	Since time.Time
}

// Prefix begins the names of all records.
const Prefix = "csi-"

// Format is the version of the format of records and descriptions. A later version of the plugin that writes something
// which this one would misread writes a higher version. It keeps the names of records, the fields v and cluster, and
// those that name the volume, the disk or the instance.
const Format = 1

var (
	// ErrFormat means that a newer version of the plugin wrote the record or the description, in a format that this
	// version would misread.
	ErrFormat = fault.FormatNewer.New("was written by a newer version of the plugin, upgrade this one")
	// ErrNoRecord means that the rack has a group with the name of a record and with another text.
	ErrNoRecord = fault.NoRecord.New("is no record of this plugin: delete it")
)

// Kind is a kind of record with the fields F.
type Kind[F any, P fields[F]] struct {
	prefix string
	// ofCluster says that the records belong to a cluster. Its hash follows the prefix.
	ofCluster bool
}

// fields is what the fields of every kind have in common.
type fields[F any] interface {
	*F
	// base returns where the version, the cluster, and the record as it was read are.
	base() (version *int, cluster *string, stored *Record)
	// key is the end of the record's name.
	key() string
	// setKey takes the key of a name over, and returns false if the record is about something else.
	setKey(key string) bool
}

// Name returns the name of the record with these fields.
func (k Kind[F, P]) Name(f F) string {
	_, cluster, _ := P(&f).base()
	return k.begin(*cluster) + P(&f).key()
}

// Named returns the name of the record of a volume or a disk. The cluster is that of the records that belong to one.
func (k Kind[F, P]) Named(cluster, id string) string { return k.begin(cluster) + id }

// begin returns the beginning of the names of a cluster's records.
func (k Kind[F, P]) begin(cluster string) string {
	if k.ofCluster {
		return k.prefix + diskname.ForCluster(cluster) + "-"
	}
	return k.prefix
}

// Text encodes the fields, in the format of this version.
func (k Kind[F, P]) Text(f F) string {
	version, _, _ := P(&f).base()
	*version = Format
	text, err := json.Marshal(f)
	if err != nil {
		panic(fmt.Sprintf("a struct of strings, numbers and booleans always encodes: %v", err))
	}
	return string(text)
}

// Create creates a record. Its errors are those of the rack, which says if the name is taken.
func (k Kind[F, P]) Create(
	ctx context.Context, rack interface {
		CreateRecord(ctx context.Context, name, text string) (Record, error)
	}, f F,
) (F, error) {
	made, err := rack.CreateRecord(ctx, k.Name(f), k.Text(f))
	if err == nil {
		version, _, stored := P(&f).base()
		*version, *stored = Format, made
	}
	return f, err
}

// Replace replaces the text of a record, and returns its fields as they are stored then. It returns false if the record
// was deleted.
func (k Kind[F, P]) Replace(
	ctx context.Context, rack interface {
		UpdateRecord(ctx context.Context, id, text string) (found bool, err error)
	}, f F,
) (F, bool, error) {
	_, _, stored := P(&f).base()
	text := k.Text(f)
	found, err := rack.UpdateRecord(ctx, stored.ID, text)
	if found {
		stored.Text = text
	}
	return f, found, err
}

// Get reads the record with this name. It returns [ErrFormat] and [ErrNoRecord] for one that cannot be read.
func (k Kind[F, P]) Get(
	ctx context.Context, rack interface {
		RecordNamed(ctx context.Context, name string) (r Record, found bool, err error)
	}, cluster, id string,
) (f F, found bool, err error) {
	r, found, err := rack.RecordNamed(ctx, k.Named(cluster, id))
	if err != nil || !found {
		return f, false, err
	}
	read, err := k.parse(r, cluster)
	if err != nil {
		return f, false, err // without the fields of what is no record
	}
	return read, true, nil
}

// Newer is a record of a newer format, with an [ErrFormat]. Of its fields only those count that every version keeps.
type Newer[F any] struct {
	Fields F
	Err    error
}

// In finds the records of this kind in a list. Of records that belong to a cluster it finds those of this one.
func (k Kind[F, P]) In(list []Record, cluster string) (found []F, newer []Newer[F]) {
	begin := k.begin(cluster)
	for _, r := range list {
		if !strings.HasPrefix(r.Name, begin) {
			continue
		}
		switch f, err := k.parse(r, cluster); {
		case err == nil:
			found = append(found, f)
		case errors.Is(err, ErrFormat):
			newer = append(newer, Newer[F]{f, err})
		}
	}
	return found, newer
}

// parse is the rule for all records: the text is a JSON object with a version and a cluster, and it is about the same
// as the name.
func (k Kind[F, P]) parse(r Record, cluster string) (f F, err error) {
	version, of, stored := P(&f).base()
	decoded := json.Unmarshal([]byte(r.Text), &f)
	*stored = r
	newer := *version > Format
	switch {
	case *version < 1,
		*of == "",
		k.ofCluster && *of != cluster,
		!P(&f).setKey(strings.TrimPrefix(r.Name, k.begin(cluster))),
		!newer && decoded != nil:
		return f, fmt.Errorf("anti-affinity group %q %w", r.Name, ErrNoRecord)
	case newer:
		return f, fmt.Errorf("anti-affinity group %q has format %d, not %d: it %w", r.Name, *version, Format, ErrFormat)
	}
	return f, nil
}

// unread adds an error for each group in a list that has the name of such a record and cannot be read.
func (k Kind[F, P]) unread(errs []error, list []Record, cluster string) []error {
	begin := k.begin(cluster)
	for _, r := range list {
		if !strings.HasPrefix(r.Name, begin) {
			continue
		}
		f, err := k.parse(r, cluster)
		_, of, _ := P(&f).base()
		if errors.Is(err, ErrNoRecord) || err != nil && *of == cluster {
			errs = append(errs, err)
		}
	}
	return errs
}

// Unread returns an error for each group in a list that only looks like a record of this cluster or of a volume
// ([ErrNoRecord]), and for each record that this cluster wrote in a newer format ([ErrFormat]).
func Unread(list []Record, cluster string) []error {
	errs := Restarts.unread(nil, list, cluster)
	errs = Deferrals.unread(errs, list, cluster)
	errs = Holds.unread(errs, list, cluster)
	errs = Intents.unread(errs, list, cluster)
	errs = Replacements.unread(errs, list, cluster)
	return Adoptions.unread(errs, list, cluster)
}
