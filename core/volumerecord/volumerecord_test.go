// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package volumerecord_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/statefile"
	"github.com/oxidecomputer/oxide-csi-plugin/core/volumerecord"
	"github.com/oxidecomputer/oxide-csi-plugin/test/pages"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func record() volumerecord.Record {
	return volumerecord.Record{
		Volume: uuid.New(), Serial: "csi-aaaaaaaaaaaaaaaa", Sequence: 7, Number: device.Number{Major: 259, Minor: 3},
		Kind: volumerecord.Filesystem, StagingPath: "/staging", Step: volumerecord.Staged,
	}
}

func TestRecordOutlivesTheStore(t *testing.T) {
	t.Parallel()
	dir, want := filepath.Join(t.TempDir(), "state"), record()
	if found, err := (volumerecord.Store{StateDir: dir}).Read(want.Volume); found != nil || err != nil {
		t.Errorf("before the first record: %v, %v", found, err)
	}
	must(t, volumerecord.Store{StateDir: dir}.Write(want))
	must(t, volumerecord.Store{StateDir: dir}.SetStep(want, volumerecord.Leaving))
	boot, err := device.BootID()
	must(t, err)
	want.Version, want.BootID, want.Step = 1, boot, volumerecord.Leaving
	store := volumerecord.Store{StateDir: dir}
	found, err := store.Read(want.Volume)
	must(t, err)
	if diff := cmp.Diff(&want, found); diff != "" {
		t.Errorf("record (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]volumerecord.Record{want}, store.List()); diff != "" {
		t.Errorf("records (-want +got):\n%s", diff)
	}
	for range 2 {
		must(t, store.Remove(want.Volume))
	}
	if found, err := store.Read(want.Volume); found != nil || err != nil || len(store.List()) > 0 {
		t.Errorf("after its removal: %v, %v", found, err)
	}
	if left, err := os.ReadDir(filepath.Join(dir, "volumes")); err != nil || len(left) > 0 {
		t.Errorf("left in the folder: %v, %v", left, err)
	}
}

// A record that cannot be read never counts as none. One of another boot does.
func TestRecordThatCannotBeUsed(t *testing.T) {
	t.Parallel()
	store, r := volumerecord.Store{StateDir: t.TempDir()}, record()
	must(t, store.Write(r))
	content, err := os.ReadFile(store.Path(r.Volume))
	must(t, err)
	for name, changed := range map[string]string{
		"empty":          "",
		"torn":           string(content[:len(content)/2]),
		"of another one": strings.ReplaceAll(string(content), r.Volume.String(), uuid.NewString()),
		"without a disk": strings.ReplaceAll(string(content), r.Serial, ""),
	} {
		must(t, os.WriteFile(store.Path(r.Volume), []byte(changed), 0o600))
		if found, err := store.Read(r.Volume); !errors.Is(err, volumerecord.ErrUnreadable) {
			t.Errorf("%s: %v, %v, want ErrUnreadable", name, found, err)
		}
	}
	boot, err := device.BootID()
	must(t, err)
	past := strings.ReplaceAll(string(content), boot, uuid.NewString())
	must(t, os.WriteFile(store.Path(r.Volume), []byte(past), 0o600))
	if found, err := store.Read(r.Volume); found != nil || err != nil {
		t.Errorf("of another boot: %v, %v", found, err)
	}
}

func TestRecordWithoutAFolder(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "file")
	must(t, os.WriteFile(file, nil, 0o600))
	store, r := volumerecord.Store{StateDir: file}, record()
	if err := store.Write(r); !errors.Is(err, statefile.ErrFolder) {
		t.Errorf("write: %v, want ErrFolder", err)
	}
	if found, err := store.Read(r.Volume); !errors.Is(err, volumerecord.ErrUnreadable) {
		t.Errorf("read: %v, %v, want ErrUnreadable", found, err)
	}
}

// Since 0.1.0. Records are read by later versions of the plugin, and by earlier ones after a rollback.
func TestRecordIsPermanent(t *testing.T) {
	t.Parallel()
	store, r := volumerecord.Store{StateDir: t.TempDir()}, record()
	r.Volume = uuid.MustParse("0f9c5a0e-8c1f-4c6b-9f58-5d2f0b6f2a11")
	must(t, store.Write(r))
	boot, err := device.BootID()
	must(t, err)
	content, err := os.ReadFile(filepath.Join(store.StateDir, "volumes", "0f9c5a0e-8c1f-4c6b-9f58-5d2f0b6f2a11"))
	must(t, err)
	golden := `{"v":1,"volume":"0f9c5a0e-8c1f-4c6b-9f58-5d2f0b6f2a11","serial":"csi-aaaaaaaaaaaaaaaa","diskSequence":7,` +
		`"device":{"Major":259,"Minor":3},"bootID":"` + boot + `","kind":"filesystem","stagingPath":"/staging",` +
		`"readOnly":false,"step":"staged"}` + "\n"
	if diff := cmp.Diff(golden, string(content)); diff != "" {
		t.Errorf("record (-want +got):\n%s", diff)
	}
	pages.Shows(t, "../../docs/reference/formats.md", strings.ReplaceAll(golden, boot, "BOOT-ID"))
	r.Small = true
	must(t, store.Write(r))
	content, err = os.ReadFile(store.Path(r.Volume))
	must(t, err)
	if want := strings.Replace(golden, `}`+"\n", `,"small":true}`+"\n", 1); string(content) != want {
		t.Errorf("of a small filesystem: %s, want %s", content, want)
	}
	// Development versions before 0.1.0 wrote no version.
	without := strings.Replace(golden, `"v":1,`, "", 1)
	must(t, os.WriteFile(store.Path(r.Volume), []byte(without), 0o600))
	if found, err := store.Read(r.Volume); err != nil || found == nil || found.Serial != r.Serial {
		t.Errorf("without a version: %v, %v", found, err)
	}
	newer := strings.Replace(golden, `"v":1,`, `"v":2,`, 1)
	must(t, os.WriteFile(store.Path(r.Volume), []byte(newer), 0o600))
	found, err := store.Read(r.Volume)
	if !errors.Is(err, volumerecord.ErrUnreadable) || !strings.Contains(err.Error(), "format 2, not 1") {
		t.Errorf("of format 2: %v, %v", found, err)
	}
}
