// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package metadata_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

const id = "6f3a1c9e-2b7d-4e58-9a41-0d5c8e7f1a23"

func TestParseInstanceIDTakesEveryNotation(t *testing.T) {
	digits := strings.ReplaceAll(id, "-", "")
	for _, in := range []string{
		id, strings.ToUpper(id), digits, strings.ToUpper(digits),
		"urn:uuid:" + id, "URN:UUID:" + strings.ToUpper(id),
		"{" + id + "}", "  " + id + "\r\n", "\t{" + id + "} ",
	} {
		if got, err := metadata.ParseInstanceID(in); got != id || err != nil {
			t.Errorf("ParseInstanceID(%q) = %q, %v; want %q", in, got, err, id)
		}
	}
}

func TestParseInstanceIDRefuses(t *testing.T) {
	for name, tt := range map[string]struct{ in, says string }{
		"nothing":               {"", "empty"},
		"space":                 {" \t\n", "empty"},
		"nomad template":        {"${meta.oxide.instance_id}", "template"},
		"template inside":       {"6f3a1c9e-${rest}", "template"},
		"kubernetes template":   {"$(INSTANCE_ID)", "template"},
		"nil UUID":              {"00000000-0000-0000-0000-000000000000", "none was set"},
		"nil UUID, digits only": {strings.Repeat("0", 32), "none was set"},
		"all ones":              {strings.Repeat("F", 32), "none was set"},
		"a name":                {"node-a", "not a UUID"},
		"one digit short":       {id[:35], "not a UUID"},
		"one digit long":        {id + "0", "not a UUID"},
		"no hexadecimal digit":  {"6f3a1c9e-2b7d-4e58-9a41-0d5c8e7f1a2g", "not a UUID"},
		"hyphens elsewhere":     {"6f3a1c9e2-b7d-4e58-9a41-0d5c8e7f1a23", "not a UUID"},
		"some hyphens":          {"6f3a1c9e-2b7d4e58-9a41-0d5c8e7f1a23", "not a UUID"},
		"brace open":            {"{" + id, "not a UUID"},
		"brace closed":          {id + "}", "not a UUID"},
		"other brackets":        {"[" + id + "]", "not a UUID"},
		"quotes":                {`"` + id + `"`, "not a UUID"},
		"provider ID":           {"oxide://" + id, "not a UUID"},
		"two":                   {id + " " + id, "not a UUID"},
		"non-ASCII digit":       {"６f3a1c9e-2b7d-4e58-9a41-0d5c8e7f1a23", "not a UUID"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := metadata.ParseInstanceID(tt.in)
			if err == nil || got != "" || !strings.Contains(err.Error(), tt.says) {
				t.Fatalf("ParseInstanceID(%q) = %q, %v; want an error that says %q", tt.in, got, err, tt.says)
			}
			oneLine(t, err)
		})
	}
}

func TestCheckRack(t *testing.T) {
	for _, name := range []string{"default", "a", "7", "East.rack_1-b", strings.Repeat("r", 63)} {
		if err := metadata.CheckRack(name); err != nil {
			t.Errorf("CheckRack(%q) = %v, want nil", name, err)
		}
	}
	for _, name := range []string{
		"", " ", "-a", "a-", ".a", "a_", "a b", "a/b", "ä", "a\n", "räck", strings.Repeat("r", 64), "${meta.oxide.rack}", "$(RACK)",
	} {
		err := metadata.CheckRack(name)
		if err == nil {
			t.Errorf("CheckRack(%q) = nil, want an error", name)
			continue
		}
		oneLine(t, err)
	}
}

func TestRefusalsDoNotRepeatAToken(t *testing.T) {
	const token = "oxide-token-canary"
	for _, in := range []string{token, "${" + token + "}", strings.ToUpper(token)} {
		_, err := metadata.ParseInstanceID(in)
		if err == nil || strings.Contains(strings.ToLower(err.Error()), token) {
			t.Errorf("ParseInstanceID(%q): %v", in, err)
		}
	}
	for _, in := range []string{token + "-", "${" + token + "}"} {
		if err := metadata.CheckRack(in); err == nil || strings.Contains(err.Error(), token) {
			t.Errorf("CheckRack(%q): %v", in, err)
		}
	}
}

func TestErrorReadsAndUnwraps(t *testing.T) {
	err := error(&metadata.Error{
		Kind: metadata.ErrNotReady, What: "wait for /run/id.env", Cause: context.Canceled,
		Next: "check that the init container has run",
	})
	const want = "wait for /run/id.env: context canceled; check that the init container has run"
	if err.Error() != want {
		t.Errorf("Error() = %q, want %q", err, want)
	}
	for _, target := range []error{metadata.ErrNotReady, context.Canceled} {
		if !errors.Is(err, target) {
			t.Errorf("errors.Is does not find %v", target)
		}
	}
	if errors.Is(err, metadata.ErrInvalid) {
		t.Error("errors.Is finds the other kind")
	}
	bare := error(&metadata.Error{Kind: metadata.ErrInvalid, What: "no ID", Next: "set one"})
	if bare.Error() != "no ID; set one" || !errors.Is(bare, metadata.ErrInvalid) {
		t.Errorf("without a cause: %q", bare)
	}
}

func FuzzParseInstanceID(f *testing.F) {
	for _, s := range []string{id, "{" + id + "}", "urn:uuid:" + id, "${x}", "", "oxide-token-x"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got, err := metadata.ParseInstanceID(s)
		if err != nil {
			oneLine(t, err)
			return
		}
		again, err := metadata.ParseInstanceID(got)
		if err != nil || again != got || len(got) != 36 || got != strings.ToLower(got) {
			t.Fatalf("ParseInstanceID(%q) = %q, and again %q, %v", s, got, again, err)
		}
	})
}

func oneLine(t *testing.T, err error) {
	t.Helper()
	if s := err.Error(); s == "" || strings.ContainsAny(s, "\r\n") {
		t.Errorf("not one line: %q", s)
	}
}
