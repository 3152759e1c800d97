// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package diskname

import (
	"strings"
	"testing"
)

func TestDiskNameIsTheSerial(t *testing.T) {
	for _, volume := range []string{"a", "pvc-1", strings.Repeat("x", 128), "Ünïcode", " "} {
		name := ForVolume("cluster", volume)
		if len(name) != SerialBytes || Serial(name) != name {
			t.Errorf("disk name %q of volume %q is not a whole serial", name, volume)
		}
		if strings.Trim(name[len(diskPrefix):], "abcdefghijklmnopqrstuvwxyz234567") != "" ||
			!strings.HasPrefix(name, diskPrefix) {
			t.Errorf("disk name %q has characters that a rack refuses", name)
		}
	}
	if ForVolume("ab", "c") == ForVolume("a", "bc") {
		t.Error("cluster and volume run together")
	}
}

func TestParseID(t *testing.T) {
	const id = "6f1b2c3d-4e5f-4a6b-8c7d-9e0f1a2b3c4d"
	for text, want := range map[string]string{
		id:                                     id,
		strings.ToUpper(id):                    id,
		strings.ReplaceAll(id, "-", ""):        "",
		"urn:uuid:" + id:                       "",
		"{" + id + "}":                         "",
		"":                                     "",
		"postgres":                             "",
		"csi-abcdefghijklmnop":                 "",
		"6f1b2c3d-4e5f-4a6b-8c7d-9e0f1a2b3c4g": "",
		"6f1b2c3d-4e5f-4a6b-8c7d9e0f1a2b3c4d-": "",
	} {
		if got, ok := ParseID(text); got != want || ok != (want != "") {
			t.Errorf("ParseID(%q) = %q, %t, want %q", text, got, ok, want)
		}
	}
}

func TestValid(t *testing.T) {
	const id = "f61b2c3d-4e5f-4a6b-8c7d-9e0f1a2b3c4d" // its first character can begin a name
	for name, want := range map[string]bool{
		ForVolume("cluster", "a"):       true,
		"d":                             true,
		"disk-1":                        true,
		strings.Repeat("z", 63):         true,
		strings.Repeat("z", 64):         false,
		"":                              false,
		"Disk":                          false,
		"disk_1":                        false,
		"di sk":                         false,
		"disk\n":                        false,
		"1disk":                         false,
		"-disk":                         false,
		"disk-":                         false,
		"dìsk":                          false,
		id:                              false,
		strings.ReplaceAll(id, "-", ""): false,
		strings.Replace(id, "-", "", 1): true,
		"urn:uuid:" + id:                false,
	} {
		if got := Valid(name); got != want {
			t.Errorf("Valid(%q) = %t", name, got)
		}
	}
}

func TestIsVolumeSerial(t *testing.T) {
	for serial, want := range map[string]bool{
		ForVolume("prod", "postgres"): true,
		"csi-abcdefghijklmnop":        true,
		"csi-abcdefghijklmno":         false,
		"csi-abcdefghijklmnopq":       false,
		"csi-abcdefghijklmno1":        false,
		"csi-ABCDEFGHIJKLMNOP":        false,
		"boot-abcdefghijklmno":        false,
		"":                            false,
	} {
		if got := IsVolumeSerial(serial); got != want {
			t.Errorf("IsVolumeSerial(%q) = %t", serial, got)
		}
	}
}
