// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package guest is the metadata provider that reads the virtual machine's firmware. An Oxide rack writes the instance's
// ID into the firmware tables (SMBIOS) of every instance (docs/reference/rack.md §9). Linux shows them below /sys. The
// provider needs no configuration, no network and no credentials.
//
// It rejects a machine of another vendor, whose firmware holds a UUID too. It also rejects a machine whose firmware and
// cloud-init name different instances. The firmware does not know the rack.
package guest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

const (
	// vendor is the content of sys_vendor on every rack. The product name and the serial number may change in a later
	// release; the UUID is always the instance's (docs/reference/rack.md §9).
	vendor = "Oxide"
	// CloudInit is the file in which cloud-init stores the data of this boot. Its copies below /var/lib prove nothing:
	// they are copied with an image.
	CloudInit = "/run/cloud-init/instance-data.json"
	// maxBytes is a limit far above the size of these files.
	maxBytes = 1 << 20
)

// Options holds the paths to read.
type Options struct {
	// Sys is the path of the guest's /sys.
	Sys string
	// CloudInit is the path of cloud-init's instance-data.json. The file is optional, and only compared with the
	// firmware.
	CloudInit string
	// Log gets a line if the file of cloud-init cannot be read. Nil means no log.
	Log *slog.Logger
}

// Provider is a [metadata.Provider].
type Provider struct{ options Options }

// New makes a provider. It does no I/O.
func New(options Options) *Provider {
	if options.Log == nil {
		options.Log = slog.New(slog.DiscardHandler)
	}
	return &Provider{options: options}
}

// Instance implements [metadata.Provider].
func (p *Provider) Instance(ctx context.Context) (metadata.Instance, error) {
	if err := ctx.Err(); err != nil {
		return metadata.Instance{}, metadata.NotReady("the firmware was not read", err, "try again")
	}
	if err := p.checkVendor(); err != nil {
		return metadata.Instance{}, err
	}
	firmware, err := p.firmwareID()
	if err != nil {
		return metadata.Instance{}, err
	}
	if other := p.cloudInitID(); other.id != "" && other.id != firmware.id {
		return metadata.Instance{}, conflict(firmware, other)
	}
	return metadata.Instance{ID: firmware.id}, nil
}

// foundID is an instance ID and the file that holds it.
type foundID struct{ id, path string }

func conflict(a, b foundID) error {
	return metadata.Invalid(
		fmt.Sprintf("%s says that this is instance %s, and %s that it is %s", a.path, a.id, b.path, b.id),
		metadata.ErrConflict,
		"find out which is right (the rack lists its instances) and remove the other, or set --instance-id")
}

// dmi is the path of one of the firmware's values.
func (p *Provider) dmi(name string) string {
	return filepath.Join(p.options.Sys, "class", "dmi", "id", name)
}

// checkVendor returns an error on a machine that is not an Oxide instance.
func (p *Provider) checkVendor() error {
	path := p.dmi("sys_vendor")
	found, err := readLine(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return metadata.Invalid(
			"the firmware tells nothing: there is no "+path,
			nil,
			"check that the plugin sees the host's /sys and that this is an Oxide instance, or choose another source by --metadata",
		)
	case err != nil:
		return unreadable(path, err)
	case found != vendor:
		return metadata.Invalid(fmt.Sprintf("this is no Oxide instance: %s is %.40q, not %q", path, found, vendor), nil,
			"choose another source by --metadata, or set --instance-id")
	}
	return nil
}

// firmwareID is the instance ID in the firmware's tables. They hold it twice: as the UUID and as the serial number. The
// serial number may be something else in a later release.
func (p *Provider) firmwareID() (foundID, error) {
	uuid, serial := foundID{path: p.dmi("product_uuid")}, foundID{path: p.dmi("product_serial")}
	text, err := readLine(uuid.path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return foundID{}, unreadable(uuid.path, err)
	}
	if text != "" {
		if uuid.id, err = metadata.ParseInstanceID(text); err != nil {
			return foundID{}, metadata.Invalid(uuid.path, err, "set --instance-id, and report this to the rack's operator")
		}
	}
	if text, err = readLine(serial.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return foundID{}, unreadable(serial.path, err)
	}
	if id, err := metadata.ParseInstanceID(text); err == nil {
		serial.id = id
	}
	switch {
	case uuid.id == "" && serial.id == "":
		return foundID{}, metadata.Invalid(
			fmt.Sprintf("the firmware names no instance: neither %s nor %s holds a UUID", uuid.path, serial.path), nil,
			"set --instance-id, or choose another source by --metadata")
	case uuid.id == "":
		return serial, nil
	case serial.id != "" && serial.id != uuid.id:
		return foundID{}, conflict(uuid, serial)
	}
	return uuid, nil
}

// cloudInitID is the instance ID that cloud-init got at this boot. It is empty if cloud-init did not run, got another
// kind of ID, or if its file cannot be read: the file is only compared with the firmware.
func (p *Provider) cloudInitID() foundID {
	path := p.options.CloudInit
	if path == "" {
		return foundID{}
	}
	text, err := readFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return foundID{}
	}
	var data struct {
		V1 struct {
			InstanceID string `json:"instance_id"`
		} `json:"v1"`
	}
	if err == nil {
		err = json.Unmarshal(text, &data)
	}
	if err != nil {
		p.options.Log.Debug("metadata: cloud-init's data cannot be read", "file", path, "type", fmt.Sprintf("%T", err))
		return foundID{}
	}
	id, err := metadata.ParseInstanceID(data.V1.InstanceID)
	if err != nil {
		return foundID{}
	}
	return foundID{id: id, path: path}
}

// unreadable turns an error of reading a file into a [metadata.Error].
func unreadable(path string, err error) error {
	e := metadata.Invalid("read "+path, err, "check what is mounted there")
	if wrapped := (*fs.PathError)(nil); errors.As(err, &wrapped) {
		e.Cause = wrapped.Err // The path is in What.
	}
	if errors.Is(err, fs.ErrPermission) {
		e.Next = "run the plugin as the host's root: no other user may read this file"
	}
	return e
}

// readLine reads one of the firmware's values.
func readLine(path string) (string, error) {
	text, err := readFile(path)
	return strings.TrimSpace(string(text)), err
}

func readFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	text, err := io.ReadAll(io.LimitReader(f, maxBytes))
	return text, errors.Join(err, f.Close())
}
