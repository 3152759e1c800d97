package rack

import (
	"strings"
	"testing"
	"unicode/utf8"
)

// These vectors are permanent: a plugin that names disks otherwise does not find the volumes of its predecessor.
func TestNamesArePermanent(t *testing.T) {
	for _, test := range []struct {
		cluster, volume, claim, name, description string
	}{
		{
			cluster: "prod", volume: "pvc-2f1b6a3e-0d1c-4b7e-9c55-0f6d2a7f9e10", claim: "db/data-postgres-0",
			name:        "csi-vavmkwdnq2g7hyu5",
			description: `{"v":1,"cluster":"prod","h":"qCrFWG2GjfPinTzT72BPcghLIRO5hw8plT2vcMLhA0Q=","name":"pvc-2f1b6a3e-0d1c-4b7e-9c55-0f6d2a7f9e10","pvc":"db/data-postgres-0"}`,
		},
		{
			cluster: "prod", volume: "postgres",
			name:        "csi-qwtvoyyqn2mu2sd5",
			description: `{"v":1,"cluster":"prod","h":"hadXYxBumU1IfW7T1FB5VxzyqehYoa/nBPnd+23WuO0=","name":"postgres"}`,
		},
	} {
		if got := DiskName(test.cluster, test.volume); got != test.name {
			t.Errorf("disk name of %q in %q is %q, want %q", test.volume, test.cluster, got, test.name)
		}
		if got := NewDescription(test.cluster, test.volume, test.claim).Encode(); got != test.description {
			t.Errorf("description of %q in %q is\n%s, want\n%s", test.volume, test.cluster, got, test.description)
		}
	}
}

func TestDiskNameIsTheSerial(t *testing.T) {
	for _, volume := range []string{"a", "pvc-1", strings.Repeat("x", 128), "Ünïcode", " "} {
		name := DiskName("cluster", volume)
		if len(name) != SerialBytes || Serial(name) != name {
			t.Errorf("disk name %q of volume %q is not a whole serial", name, volume)
		}
		if strings.Trim(name[len(diskPrefix):], "abcdefghijklmnopqrstuvwxyz234567") != "" || !strings.HasPrefix(name, diskPrefix) {
			t.Errorf("disk name %q has characters that a rack refuses", name)
		}
	}
	if DiskName("ab", "c") == DiskName("a", "bc") {
		t.Error("cluster and volume run together")
	}
}

func TestDescriptionFits(t *testing.T) {
	for _, test := range []struct {
		name, cluster, volume, claim string
	}{
		{"longest legal values", strings.Repeat("c", 63), strings.Repeat("v", 128), strings.Repeat("n", 63) + "/" + strings.Repeat("p", 253)},
		{"characters of several bytes", strings.Repeat("c", 63), strings.Repeat("ü", 64), strings.Repeat("日本", 60)},
		{"characters that are escaped", strings.Repeat("c", 63), strings.Repeat("\x01", 128), strings.Repeat("\"", 253)},
	} {
		t.Run(test.name, func(t *testing.T) {
			want := NewDescription(test.cluster, test.volume, test.claim)
			text := want.Encode()
			if len(text) > descriptionBytes || !utf8.ValidString(text) {
				t.Fatalf("%d bytes, valid %t", len(text), utf8.ValidString(text))
			}
			got, ours := ParseDescription(text)
			if !ours || !got.SameVolume(want) || got.Version != 1 {
				t.Errorf("%q is not recognised", text)
			}
			if !strings.HasPrefix(test.volume, got.Name) || !strings.HasPrefix(test.claim, got.PVC) {
				t.Errorf("name %q or claim %q are not cut from the ones given", got.Name, got.PVC)
			}
		})
	}
}

func TestForeignDescriptions(t *testing.T) {
	for _, text := range []string{"", "my disk", "{}", `{"v":1}`, `{"v":0,"cluster":"a","h":"b"}`, `[1]`, `{"v":1,"cluster":"a"`, `{"v":"1","cluster":"a","h":"b"}`} {
		if d, ours := ParseDescription(text); ours {
			t.Errorf("%q counts as ours: %+v", text, d)
		}
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

func TestMadeHere(t *testing.T) {
	for serial, want := range map[string]bool{
		DiskName("prod", "postgres"): true,
		"csi-abcdefghijklmnop":       true,
		"csi-abcdefghijklmno":        false,
		"csi-abcdefghijklmnopq":      false,
		"csi-abcdefghijklmno1":       false,
		"csi-ABCDEFGHIJKLMNOP":       false,
		"boot-abcdefghijklmno":       false,
		"":                           false,
	} {
		if got := MadeHere(serial); got != want {
			t.Errorf("MadeHere(%q) = %t", serial, got)
		}
	}
}
