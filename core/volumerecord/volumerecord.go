// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

// Package volumerecord keeps one small file for each volume that this node may hold: <state folder>/volumes/<volume
// UUID>. The record exists from before the first mount or bind until the disk was let go. It tells every later process
// of the plugin which disk that is, also after another program has removed the mounts.
package volumerecord

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/statefile"
)

// Kind says how the volume is staged.
type Kind string

// The kinds of a volume.
const (
	Filesystem Kind = "filesystem"
	Block      Kind = "block"
)

// Step says how far the volume is between stage and unstage.
type Step string

const (
	// Staged means that the volume is being staged, or staged.
	Staged Step = "staged"
	// Leaving means that an unstage has begun. It may have made the filesystem read-only.
	Leaving Step = "leaving"
	// Lingering means that an unstage has succeeded, and that read-only copies of the mount remain in other mount
	// namespaces.
	Lingering Step = "lingering"
)

// format is the version of the format. A later version of the plugin that writes something which this one would misread
// writes a higher version.
const format = 1

// Record says which disk this node may hold for a volume. Its JSON names are permanent.
type Record struct {
	// Version is the version of the format, which [Store.Write] sets.
	Version int       `json:"v"`
	Volume  uuid.UUID `json:"volume"`
	// Serial and Sequence identify the disk while the guest runs. Sequence is 0 before Linux 5.15: then Number does.
	Serial   string        `json:"serial"`
	Sequence uint64        `json:"diskSequence"`
	Number   device.Number `json:"device"`
	// BootID is the guest's boot. In another boot nothing of the record is mounted any more.
	BootID string `json:"bootID"`
	Kind   Kind   `json:"kind"`
	// StagingPath is the path of NodeStageVolume, without symbolic links.
	StagingPath string `json:"stagingPath"`
	// ReadOnly says that the volume was staged read-only.
	ReadOnly bool `json:"readOnly"`
	Step     Step `json:"step"`
	// Small says that the filesystem could not be grown to the size of its disk.
	Small bool `json:"small,omitempty"`
}

// Store is the folder of the records.
type Store struct {
	// StateDir is the plugin's state folder. It outlives the process.
	StateDir string
}

func (s Store) folder() string { return filepath.Join(s.StateDir, "volumes") }

// Path returns the path of a volume's record.
func (s Store) Path(volume uuid.UUID) string { return filepath.Join(s.folder(), volume.String()) }

// SetStep changes the step of a record that exists. Its error is [statefile.ErrFolder].
func (s Store) SetStep(r Record, step Step) error {
	r.Step = step
	return s.Write(r)
}

// Write replaces the volume's record, for this boot, in stable storage. Without the flush, a power cut leaves an empty
// record on some filesystems: it counts as one that cannot be read, not as one of another boot.
// Its error is [statefile.ErrFolder].
func (s Store) Write(r Record) error {
	boot, err := device.BootID()
	if err != nil {
		return err
	}
	r.Version, r.BootID = format, boot
	content, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if err := statefile.Write(s.Path(r.Volume), append(content, '\n')); err != nil {
		return fmt.Errorf("%w: %w", statefile.ErrFolder, err)
	}
	return nil
}

// Read returns the volume's record, or nil if there is none of this boot. It returns [ErrUnreadable] if there is one
// that cannot be read, or that a newer version of the plugin wrote in another format.
func (s Store) Read(volume uuid.UUID) (*Record, error) {
	content, err := os.ReadFile(s.Path(volume))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var r Record
	if err == nil {
		err = json.Unmarshal(content, &r)
	}
	if err == nil && r.Version > format {
		err = fmt.Errorf("it has format %d, not %d: upgrade this node's plugin", r.Version, format)
	}
	if err == nil && (r.Volume != volume || r.Serial == "" || r.BootID == "") {
		err = errors.New("it names another volume, or lacks the disk")
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrUnreadable, s.Path(volume), err)
	}
	boot, err := device.BootID()
	if err != nil || r.BootID != boot {
		return nil, err
	}
	return &r, nil
}

// List returns the readable records of this boot.
func (s Store) List() []Record {
	entries, err := os.ReadDir(s.folder())
	if err != nil {
		return nil // no record was written, or none can be read
	}
	var records []Record
	for _, entry := range entries {
		volume, err := uuid.Parse(entry.Name())
		if err != nil {
			continue
		}
		if r, err := s.Read(volume); err == nil && r != nil {
			records = append(records, *r)
		}
	}
	return records
}

// Remove removes the volume's record. A missing record is no error.
func (s Store) Remove(volume uuid.UUID) error {
	if err := os.Remove(s.Path(volume)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: %w", statefile.ErrFolder, err)
	}
	return nil
}
