// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package guest_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/guest"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/metadatatest"
)

const (
	idA    = "6f3a1c9e-2b7d-4e58-9a41-0d5c8e7f1a23"
	idB    = "b81d0f42-77c3-4c0a-8e6f-93a5d2b4c716"
	secret = "oxide-token-canary"
)

// files are the files of a guest by name: the firmware's strings, and cloud-init's data.
type files map[string]string

const cloudInit = "instance-data.json"

// write writes the files into a new folder.
func (f files) write(t *testing.T) guest.Options {
	t.Helper()
	o := guest.Options{Sys: t.TempDir()}
	o.CloudInit = filepath.Join(o.Sys, cloudInit)
	f.replace(t, o)
	return o
}

// replace replaces the files of an earlier write.
func (f files) replace(t *testing.T, o guest.Options) {
	t.Helper()
	dmi := filepath.Join(o.Sys, "class/dmi/id")
	if err := errors.Join(os.RemoveAll(dmi), os.RemoveAll(o.CloudInit), os.MkdirAll(dmi, 0o755)); err != nil {
		t.Error(err)
	}
	for name, text := range f {
		path := filepath.Join(dmi, name)
		if name == cloudInit {
			path = o.CloudInit
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Error(err)
		}
	}
}

// oxide returns the files of an instance on a rack, with changes. An empty value removes a file.
func oxide(changes files) files {
	f := files{
		"sys_vendor": "Oxide\n", "product_name": "OxVM\n", "bios_vendor": "Oxide\n", "product_version": "\n",
		"product_uuid": idA + "\n", "product_serial": idA + "\n",
	}
	for name, text := range changes {
		if text == "" {
			delete(f, name)
		} else {
			f[name] = text
		}
	}
	return f
}

// TestConformance runs the suite with cloud-init's data beside the firmware, because users keep secrets there.
func TestConformance(t *testing.T) {
	metadatatest.Run(t, func(t *testing.T) metadatatest.Harness {
		beside := `{"ds": {"user_data": "` + secret + `"}}`
		options := oxide(files{"product_uuid": "", "product_serial": "", cloudInit: beside}).write(t)
		var denied atomic.Bool
		uuid := filepath.Join(options.Sys, "class/dmi/id/product_uuid")
		mode := func(mode os.FileMode, deny bool) {
			denied.Store(deny)
			if err := os.Chmod(uuid, mode); err != nil {
				t.Error(err)
			}
		}
		return metadatatest.Harness{
			New: func() metadata.Provider { return metadatatest.Unprivileged(guest.New(options), &denied) },
			Set: func(w metadatatest.Content) {
				changes := files{"product_uuid": "", "product_serial": "", cloudInit: beside}
				if w.ID != nil {
					changes["product_uuid"] = *w.ID + "\n"
				}
				oxide(changes).replace(t, options)
			},
			Break:   func(metadatatest.Fault) { mode(0, true) },
			Repair:  func() { mode(0o400, false) },
			Secrets: []string{secret},
			Cannot: map[metadatatest.Ability]string{
				metadatatest.CanDown:      "the firmware's tables are there before any program runs",
				metadatatest.CanSlow:      "the kernel answers from memory",
				metadatatest.CanKnowRack:  "the rack's name is not in the firmware",
				metadatatest.CanKnowParts: "the provider knows only the ID",
				metadatatest.CanChange:    "the tables are fixed when the machine starts, and are several files",
			},
		}
	})
}

func TestFirmware(t *testing.T) {
	swapped := "9e1c3a6f-7d2b-584e-9a41-0d5c8e7f1a23" // idA with its first three groups in the other byte order
	for name, tt := range map[string]struct {
		files files
		want  string // the ID, or what the error says
	}{
		"as a rack writes it":        {oxide(nil), idA},
		"upper case":                 {oxide(files{"product_uuid": strings.ToUpper(idA)}), idA},
		"no serial number":           {oxide(files{"product_serial": ""}), idA},
		"another kind of serial":     {oxide(files{"product_serial": "BRM42220014\n"}), idA},
		"no UUID":                    {oxide(files{"product_uuid": ""}), idA},
		"an empty UUID":              {oxide(files{"product_uuid": "\n"}), idA},
		"another product":            {oxide(files{"product_name": "OxVM2\n"}), idA},
		"cloud-init agrees":          {oxide(files{cloudInit: `{"v1": {"instance_id": "` + strings.ToUpper(idA) + `"}}`}), idA},
		"cloud-init's own kind":      {oxide(files{cloudInit: `{"v1": {"instance_id": "nocloud"}}`}), idA},
		"cloud-init half written":    {oxide(files{cloudInit: `{"v1": {"instance_id": "` + idB}), idA},
		"cloud-init of another form": {oxide(files{cloudInit: `[1]`}), idA},

		"another vendor":         {oxide(files{"sys_vendor": "QEMU\n"}), `no Oxide instance: SYS/class/dmi/id/sys_vendor is "QEMU", not "Oxide"`},
		"nearly the vendor":      {oxide(files{"sys_vendor": "Oxidized\n"}), "no Oxide instance"},
		"an empty vendor":        {oxide(files{"sys_vendor": "\n"}), "no Oxide instance"},
		"no firmware tables":     {nil, "there is no SYS/class/dmi/id/sys_vendor; check that the plugin sees the host's /sys"},
		"no ID at all":           {oxide(files{"product_uuid": "", "product_serial": ""}), "the firmware names no instance"},
		"not a UUID":             {oxide(files{"product_uuid": "Not Settable\n"}), "is not a UUID"},
		"a UUID that is not set": {oxide(files{"product_uuid": "ffffffff-ffff-ffff-ffff-ffffffffffff\n"}), "means that none was set"},
		"UUID and serial differ": {oxide(files{"product_serial": idB}), "product_uuid says that this is instance " + idA + ", and SYS/class/dmi/id/product_serial that it is " + idB},
		"the other byte order":   {oxide(files{"product_uuid": swapped}), "product_uuid says that this is instance " + swapped},
		"cloud-init differs":     {oxide(files{cloudInit: `{"v1": {"instance_id": "` + idB + `"}}`}), "instance-data.json that it is " + idB},
		"vendor is a folder":     {oxide(nil), ""},
	} {
		t.Run(name, func(t *testing.T) {
			options := tt.files.write(t)
			if tt.want == "" {
				vendor := filepath.Join(options.Sys, "class/dmi/id/sys_vendor")
				if err := errors.Join(os.Remove(vendor), os.Mkdir(vendor, 0o755)); err != nil {
					t.Fatal(err)
				}
				tt.want = "read SYS/class/dmi/id/sys_vendor: is a directory; check what is mounted there"
			}
			got, err := guest.New(options).Instance(context.Background())
			if err == nil {
				if got != (metadata.Instance{ID: tt.want}) {
					t.Errorf("answered %+v, want %s", got, tt.want)
				}
				return
			}
			said := strings.ReplaceAll(err.Error(), options.Sys, "SYS")
			if !errors.Is(err, metadata.ErrInvalid) || !strings.Contains(said, tt.want) || tt.want == idA {
				t.Errorf("error %q, want an ErrInvalid that says %q", said, tt.want)
			}
			if conflict := strings.Contains(
				said,
				"says that this is instance",
			); errors.Is(
				err,
				metadata.ErrConflict,
			) != conflict {
				t.Errorf("ErrConflict: got %t, want %t: %v", !conflict, conflict, err)
			}
		})
	}
}

// Only the host's root can read the firmware's IDs. The error tells that to a container that runs as another user.
func TestNotRoot(t *testing.T) {
	options := oxide(nil).write(t)
	for _, dir := range []string{options.Sys, filepath.Dir(options.Sys)} {
		if err := os.Chmod(dir, 0o755); err != nil { // as /sys is
			t.Fatal(err)
		}
	}
	for _, name := range []string{"product_uuid", "product_serial"} {
		path := filepath.Join(options.Sys, "class/dmi/id", name)
		if err := os.Chmod(path, 0); err != nil {
			t.Fatal(err)
		}
		var denied atomic.Bool
		denied.Store(true)
		got, err := metadatatest.Unprivileged(guest.New(options), &denied).Instance(context.Background())
		if !errors.Is(err, metadata.ErrInvalid) ||
			!strings.HasSuffix(
				err.Error(),
				path+": permission denied; run the plugin as the host's root: no other user may read this file",
			) {
			t.Errorf("%s: got %+v, %v", name, got, err)
		}
		if err := os.Chmod(path, 0o444); err != nil {
			t.Fatal(err)
		}
	}
}
