// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package config

import (
	"strings"
	"testing"
)

func TestSocketPath(t *testing.T) {
	for in, want := range map[string]string{
		"unix:///a/csi.sock":             "/a/csi.sock",
		"unix://csi/csi.sock":            "/csi/csi.sock",
		"unix:/csi/csi.sock":             "/csi/csi.sock",
		"UNIX:///csi/csi.sock":           "/csi/csi.sock",
		"/csi/csi.sock":                  "/csi/csi.sock",
		"unix:///csi//x/../csi.sock":     "/csi/csi.sock",
		"/csi/no-ending":                 "/csi/no-ending",
		"/" + strings.Repeat("s", 106):   "/" + strings.Repeat("s", 106),
		"unix:////csi/with space ä.sock": "/csi/with space ä.sock",
	} {
		got, err := socketPath(in)
		if err != nil || got != want {
			t.Errorf("socketPath(%q) = %q, %v; want %q", in, got, err, want)
		}
		if again, err := socketPath(got); err != nil || again != got {
			t.Errorf("socketPath(%q) = %q, %v; want it unchanged", got, again, err)
		}
	}
}

func TestHostURL(t *testing.T) {
	for in, want := range map[string]string{
		"silo.sys.example.com":         "https://silo.sys.example.com",
		"silo.sys.example.com:8443":    "https://silo.sys.example.com:8443",
		"https://silo.sys.example.com": "https://silo.sys.example.com",
		"https://silo/":                "https://silo",
		"HTTPS://silo":                 "https://silo",
		"http://127.0.0.1:12220":       "http://127.0.0.1:12220",
		"[::1]:443":                    "https://[::1]:443",
		"https://[fe80::1%25eth0]:443": "https://[fe80::1%25eth0]:443",
		"[fe80::1%25eth0]":             "https://[fe80::1%25eth0]",
	} {
		got, err := hostURL(in)
		if err != nil || got != want {
			t.Errorf("hostURL(%q) = %q, %v; want %q", in, got, err, want)
		}
		if again, err := hostURL(got); err != nil || again != got {
			t.Errorf("hostURL(%q) = %q, %v; want it unchanged", got, again, err)
		}
	}
}

// An address of this machine may have a zone.
func TestLoopback(t *testing.T) {
	for in, want := range map[string]bool{
		"http://127.0.0.1:1": true, "http://localhost": true, "http://[::1]:1": true, "http://[::1%25lo]:1": true,
		"http://[fe80::1%25lo]:1": false, "http://rack": false, "http://10.0.0.1": false,
	} {
		if got := isLoopback(in); got != want {
			t.Errorf("isLoopback(%q) = %t", in, got)
		}
	}
}

func TestSize(t *testing.T) {
	for in, want := range map[string]Size{
		"0": 0, "1B": 1, "1536B": 1536, "2KiB": 2 << 10, "3MiB": 3 << 20, "32GiB": 32 << 30, "1023TiB": 1023 << 40,
		"9223372036854775807B": 1<<63 - 1, "8388607TiB": 8388607 << 40, "5Gi": 5 << 30, "5G": 5e9, "5GB": 5e9, "1k": 1000,
	} {
		got, err := parseSize(in)
		if err != nil || got != want {
			t.Errorf("parseSize(%q) = %d, %v; want %d", in, got, err, want)
		}
		if again, err := parseSize(got.String()); err != nil || again != got {
			t.Errorf("parseSize(%q) = %d, %v; want %d", got, again, err, got)
		}
	}
	for _, in := range []string{
		"", "GiB", "1", "20", "1073741824", "-1GiB", "+1GiB", "1.5GiB", "1 GiB", "1gib", "1g", "1m", "0x10", "1_000", "9223372036854775808B", "8388608TiB", "32GiBGiB",
	} {
		if got, err := parseSize(in); err == nil {
			t.Errorf("parseSize(%q) = %d, want an error", in, got)
		}
	}
	for in, want := range map[Size]string{0: "0", 1: "1B", 1024: "1KiB", 1536: "1536B", 32 << 30: "32GiB", 1 << 40: "1TiB"} {
		if got := in.String(); got != want {
			t.Errorf("Size(%d).String() = %q, want %q", int64(in), got, want)
		}
	}
}

func FuzzSize(f *testing.F) {
	for _, s := range []string{"32GiB", "0", "1KiB", "8388608TiB", "x"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, in string) {
		got, err := parseSize(in)
		if err != nil {
			return
		}
		if again, err := parseSize(got.String()); got < 0 || err != nil || again != got {
			t.Errorf("parseSize(%q) = %d, and of %q %d, %v", in, got, got, again, err)
		}
	})
}
