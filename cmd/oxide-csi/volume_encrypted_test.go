// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/admin/diagnose"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// TestEncryptedVolume goes as far as a kernel without device-mapper does: mount makes the header and cannot open it, or
// opens it and does not find the mapping in the simulated guest's /sys.
func TestEncryptedVolume(t *testing.T) {
	h := newHostWithGuest(t, true)
	dir := filepath.Dir(h.sim.Instances[0].Guest + "/dev")
	h.environ = append(h.environ, "OXIDE_CSI_DEV_ROOT="+filepath.Join(dir, "dev"))
	id := h.ok(t, "volume", "create", "secret", "--size=1GiB", "--parameter=encryption=luks2")
	plain := h.ok(t, "volume", "create", "plain", "--size=1GiB")
	for _, volume := range []string{id, plain} {
		h.ok(t, "volume", "attach", volume)
	}
	key, target, backup := filepath.Join(h.dir, "key"), filepath.Join(h.dir, "data"), filepath.Join(h.dir, "header")
	must(t, os.WriteFile(key, []byte("canary-passphrase\n"), 0o600))
	must(t, os.WriteFile(key+".empty", []byte("\n"), 0o600))

	for _, test := range []struct {
		code  int
		wants string
		args  []string
	}{
		{5, "the request has no passphrase", []string{"volume", "mount", id, target}},
		{5, "is not encrypted, but the request has a passphrase", []string{"volume", "mount", plain, target, "--passphrase-file=" + key}},
		{2, "--passphrase-file", []string{"volume", "mount", id, target, "--passphrase-file=" + key + ".missing"}},
		{2, "is empty", []string{"volume", "mount", id, target, "--passphrase-file=" + key + ".empty"}},
		{2, "--previous-passphrase-file needs another file", []string{"volume", "mount", id, target, "--previous-passphrase-file=" + key}},
		{5, "mount the volume once", []string{"volume", "header-backup", id, backup}},
		{5, "is not encrypted", []string{"volume", "header-backup", plain, backup}},
	} {
		if said := h.fails(t, test.code, test.args...); !strings.Contains(said, test.wants) {
			t.Errorf("%v: %s, want %q", test.args, said, test.wants)
		}
	}
	mounted := h.run(t, "volume", "mount", id, target, "--passphrase-file="+key)
	if mounted.code == 0 || strings.Contains(mounted.stdout+mounted.stderr, "canary-passphrase") {
		t.Fatalf("mount: %+v", mounted)
	}
	must(t, os.WriteFile(key+".wrong", []byte("wrong"), 0o600))
	must(t, os.WriteFile(key+".other", []byte("wrong too"), 0o600))
	for file, text := range map[string]string{key: "canary-passphrase\n", key + ".wrong": "wrong"} {
		mount := []string{"volume", "mount", id, target, "--previous-passphrase-file=" + key + ".other"}
		want := h.run(t, append(mount, "--passphrase-file="+file)...)
		if got := h.answer(t, text, append(mount, "--passphrase-file=-")...); got != want || got.code == 0 {
			t.Errorf("the passphrase from stdin: %+v, want as from its file: %+v", got, want)
		}
	}
	for reason, said := range map[string]string{
		"PassphraseMissing": h.fails(t, 5, "volume", "mount", id, target),
		"WrongPassphrase": h.fails(t, 5, "volume", "mount", id, target,
			"--passphrase-file="+key+".wrong", "--previous-passphrase-file="+key+".other"),
	} {
		facts := diagnose.Facts{Trace: orchestrator.Trace{Messages: []orchestrator.TraceMessage{{Text: said}}}}
		if got := diagnose.Verdict(facts).Word; got != reason {
			t.Errorf("the verdict on %q is %s, want %s", said, got, reason)
		}
	}
	if said := h.fails(t, 5, "volume", "header-backup", id, backup); !strings.Contains(said, "was never used") {
		t.Errorf("a backup of a header that says that nothing was written: %s", said)
	}
	nodes, err := filepath.Glob(filepath.Join(dir, "dev/nvme*n1"))
	must(t, err)
	for _, node := range nodes {
		if exec.Command("cryptsetup", "isLuks", "--disable-locks", node).Run() == nil {
			must(t, exec.Command("cryptsetup", "config", "--disable-locks", "--label=", node).Run())
		}
	}
	if got := h.run(t, "volume", "header-backup", id, backup); got.code != 0 {
		t.Fatalf("header-backup: %+v", got)
	}
	if info, err := os.Stat(backup); err != nil || info.Size() != 16<<20 {
		t.Errorf("the backup: %+v, %v", info, err)
	}
	if said := h.fails(t, 5, "volume", "header-backup", id, backup); !strings.Contains(said, "exists") {
		t.Errorf("a second backup to the same file: %s", said)
	}
	attachment := filepath.Join(h.dir, "attachment")
	must(t, os.WriteFile(attachment, []byte(h.ok(t, "volume", "attach", id, "--json")), 0o600))
	if got := h.run(t, "volume", "header-backup", id, backup+"2", "--attachment="+attachment,
		"--controller-endpoint="+filepath.Join(h.dir, "none")); got.code != 0 {
		t.Errorf("header-backup without a controller: %+v", got)
	}
	for _, volume := range []string{id, plain} {
		h.ok(t, "volume", "detach", volume)
		h.ok(t, "volume", "delete", volume)
	}
}
