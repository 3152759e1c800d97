// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/test/pages"
	"github.com/oxidecomputer/oxide-csi-plugin/test/verify"
)

// verify makes the command oxide-sim verify for this rack.
func (s *sim) verify(args ...string) *exec.Cmd {
	s.t.Helper()
	token := filepath.Join(s.t.TempDir(), "token")
	must(s.t, os.WriteFile(token, []byte(s.value("OXIDE_TOKEN")), 0o600))
	return command(s.t, append([]string{
		"verify", "--oxide-host=" + s.value("OXIDE_HOST"), "--oxide-project=demo", "--empty-project=demo",
		"--oxide-token-file=" + token, "--pause=20ms", "--wait=30s",
	}, args...)...)
}

// verified runs oxide-sim verify --json to its end. It returns the report, what it said, and the exit code.
func (s *sim) verified(args ...string) (report verify.Report, said string, code int) {
	s.t.Helper()
	cmd := s.verify(append(args, "--json")...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil && cmd.ProcessState == nil {
		s.t.Fatal(err)
	}
	if stdout.Len() > 0 {
		must(s.t, json.Unmarshal(stdout.Bytes(), &report))
	}
	return report, stderr.String(), cmd.ProcessState.ExitCode()
}

// TestVerifyWithAGuest verifies a rack with a guest: what the guest shows of disks that were attached while it was
// stopped, and while it ran. Then the instance runs as before, with its own disk.
func TestVerifyWithAGuest(t *testing.T) {
	needRoot(t)
	for _, test := range []struct{ hotplug, says string }{{"off", "no"}, {"on", "yes"}, {"async", "yes"}} {
		t.Run("hot-plug "+test.hotplug, func(t *testing.T) {
			t.Parallel()
			args := []string{"--listen=127.0.0.1:0", "--instances=node", "--guest-root=" + t.TempDir(), "--state-time=50ms"}
			if test.hotplug != "off" {
				args = append(args, "--hotplug="+test.hotplug, "--latency=5ms")
			}
			s := start(t, args...)
			_, dir := s.instance("node")
			path, err := binary()
			must(t, err)
			report, said, code := s.verified("--instance=node", "--only=Y1,Y2,§9a,§9b,§9c,§9d,§9e", fmt.Sprintf(
				"--guest-command=%s verify-guest --sys-root=%s/sys --dev-root=%s/dev",
				filepath.Join(filepath.Dir(path), "oxide-csi"),
				dir,
				dir,
			))
			if code != 0 || len(report.Results) != 7 {
				t.Fatalf("exit code %d\n%s", code, said)
			}
			t.Log(said)
			for _, r := range report.Results {
				if skipped := r.ID == "§9c" && test.says == "no"; r.Outcome != verify.AsAssumed && !skipped {
					t.Errorf("%+v", r)
				}
			}
			if report.Rack.Hotplug != test.says || report.Rack.HotUnplug != test.says {
				t.Errorf("hot-plug %q, hot-unplug %q, want %q", report.Rack.Hotplug, report.Rack.HotUnplug, test.says)
			}
			checkGuest(t, report.Guest)
			var disks struct{ Items []diskView }
			s.call("GET", "/v1/disks?project=demo", nil, &disks)
			var instance struct {
				RunState string `json:"run_state"`
			}
			s.call("GET", "/v1/instances/node?project=demo", nil, &instance)
			if len(disks.Items) != 1 || instance.RunState != "running" {
				t.Errorf("disks %v, the instance is %s", disks.Items, instance.RunState)
			}
		})
	}
}

// checkGuest checks what oxide-csi verify-guest printed last, when one of the run's disks was left.
func checkGuest(t *testing.T, raw json.RawMessage) {
	t.Helper()
	type disk struct {
		Serial, PCI, Controller string
		Size                    int64
		BlockSize               int `json:"block_size"`
		Sequence                uint64
	}
	var guest struct {
		Kernel string
		DMI    map[string]string
		Disks  []disk
		Tools  map[string]string
	}
	must(t, json.Unmarshal(raw, &guest))
	i := slices.IndexFunc(guest.Disks, func(d disk) bool { return d.Serial == "csi-verify-big" })
	if i < 0 {
		t.Fatalf("%s", raw)
	}
	d := guest.Disks[i]
	if d.Size != 2<<30 || d.BlockSize != 512 || d.Sequence == 0 || !strings.HasPrefix(d.PCI, "0000:00:1") ||
		d.Controller != "live" {
		t.Errorf("%+v", d)
	}
	if guest.Kernel == "" || guest.DMI["sys_vendor"] != "Oxide" ||
		!strings.HasPrefix(guest.DMI["product_uuid"], "uuid-") ||
		!strings.Contains(guest.Tools["mkfs.ext4"], "mke2fs") {
		t.Errorf("%s", raw)
	}
}

// objects are the names of all that the project has.
func (s *sim) objects() (names []string) {
	s.t.Helper()
	for _, kind := range []string{"disks", "snapshots", "instances", "anti-affinity-groups"} {
		var list struct{ Items []struct{ Name string } }
		s.call("GET", "/v1/"+kind+"?project=demo", nil, &list)
		for _, item := range list.Items {
			names = append(names, item.Name)
		}
	}
	return names
}

// TestVerifyIsInterrupted sends signals to the program in the middle of its cases.
func TestVerifyIsInterrupted(t *testing.T) {
	for _, test := range []struct {
		signal syscall.Signal
		code   int
		cleans bool
	}{{syscall.SIGINT, 2, true}, {syscall.SIGTERM, 2, true}, {syscall.SIGKILL, -1, false}} {
		t.Run(test.signal.String(), func(t *testing.T) {
			t.Parallel()
			s := start(t, "--listen=127.0.0.1:0", "--instances=")
			cmd := s.verify("--start-instances")
			stderr, err := cmd.StderrPipe()
			must(t, err)
			must(t, cmd.Start())
			lines := bufio.NewScanner(stderr)
			for sent := false; lines.Scan(); {
				if !sent && strings.Contains(lines.Text(), " A3 ") {
					must(t, cmd.Process.Signal(test.signal))
					sent = true
				}
			}
			_ = cmd.Wait() // the exit code is what counts
			if got := cmd.ProcessState.ExitCode(); got != test.code {
				t.Errorf("exit code %d, want %d", got, test.code)
			}
			if left := s.objects(); (len(left) == 0) != test.cleans {
				t.Errorf("left after the signal: %q", left)
			}
			report, said, code := s.verified("--only=T1")
			if left := s.objects(); code != 0 || len(left) > 0 || len(report.Results) != 1 {
				t.Errorf("then exit code %d, left %q\n%s", code, left, said)
			}
		})
	}
}

// TestVerifyExitCodes compares exit codes and output with what the help says.
func TestVerifyExitCodes(t *testing.T) {
	s := start(t, "--listen=127.0.0.1:0", "--instances=", "--max-disks=4")
	for _, test := range []struct {
		name string
		args []string
		code int
		says string
	}{
		{"as assumed", []string{"--only=D1,D2"}, 0, "D2 make a disk whose name is taken: as assumed"},
		{"different", []string{"--only=A5"}, 1, "A5 attach a 13th disk: different"},
		{"another project", []string{"--empty-project=other"}, 2, "--empty-project=other is not the project's name"},
		{"no project", []string{"--empty-project="}, 2, "config: --empty-project: is required"},
		{"an unknown case", []string{"--only=A99"}, 2, `config: --only: there is no case "A99"`},
		{"a command without an instance", []string{"--guest-command=true"}, 2, "config: --guest-command: needs --instance"},
		{"no size", []string{"--budget=much"}, 2, `config: --budget: "much" is not a size`},
		{"no host", []string{"--oxide-host="}, 2, "config: --oxide-host: is required"},
	} {
		if _, said, code := s.verified(test.args...); code != test.code || !strings.Contains(said, test.says) {
			t.Errorf("%s: exit code %d, want %d, and %q in\n%s", test.name, code, test.code, test.says, said)
		}
	}
	cmd := s.verify("--only=T1")
	text, err := cmd.Output()
	must(t, err)
	if !strings.HasPrefix(string(text), "# oxide-sim verify\n\n1 cases as assumed, 0 different, 0 not tried.") {
		t.Errorf("the report is\n%s", text)
	}
}

// TestVerifyOverTLS verifies a rack with a certificate of its own, over HTTP/2.
func TestVerifyOverTLS(t *testing.T) {
	s := start(t, "--listen=127.0.0.1:0", "--instances=", "--tls="+filepath.Join(t.TempDir(), "tls"))
	cmd := s.verify("--only=T1,D1", "--oxide-ca-file="+s.value("OXIDE_CSI_CA_FILE"))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	if out, err := s.verify("--only=T1", "--pause=1ms").
		CombinedOutput(); err == nil ||
		!strings.Contains(string(out), "certificate") {
		t.Errorf("without the CA: %v\n%s", err, out)
	}
}

// TestVerifyPage runs the commands of docs/how-to/verify-a-rack.md on a simulated rack.
func TestVerifyPage(t *testing.T) {
	t.Parallel()
	s := start(t, "--listen=127.0.0.1:0", "--instances=", "--project=csi-test")
	dir := t.TempDir()
	path, err := binary()
	must(t, err)
	must(t, os.Symlink(filepath.Dir(path), filepath.Join(dir, "bin")))
	must(t, os.WriteFile(filepath.Join(dir, "token"), []byte(s.value("OXIDE_TOKEN")), 0o600))
	commands := pages.Fill(t, pages.Of(t, "../../docs/how-to/verify-a-rack.md")[0],
		"https://silo.sys.example.com", s.value("OXIDE_HOST"), " --start-instances", " --start-instances --pause=20ms")
	shown := runBlock(t, dir, commands)
	report, err := os.ReadFile(filepath.Join(dir, "report.md"))
	must(t, err)
	recording, err := os.Open(filepath.Join(dir, "recording.jsonl"))
	must(t, err)
	defer recording.Close()
	if _, err := verify.ReadRecording(recording); err != nil || !strings.Contains(string(report), ", 0 different,") {
		t.Errorf("%v\n%s\n%s", err, shown, report)
	}
}
