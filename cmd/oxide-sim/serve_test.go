// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// binary builds oxide-sim once, with oxide-csi beside it, in a folder where every user may run them.
var binary = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "oxide-sim-test-")
	if err != nil {
		return "", err
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		return "", err
	}
	programs, err := simtest.Build(dir, simtest.RaceDetector())
	return programs.Sim, err
})

func TestMain(m *testing.M) {
	code := m.Run()
	if path, err := binary(); err == nil {
		if err := os.RemoveAll(filepath.Dir(path)); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func command(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	path, err := binary()
	must(t, err)
	return exec.Command(path, args...)
}

// sim is a running oxide-sim serve.
type sim struct {
	t      *testing.T
	cmd    *exec.Cmd
	stdout *bufio.Reader
	stderr bytes.Buffer
	// ready is stdout up to the line "# ready".
	ready string
	ended bool
}

func start(t *testing.T, args ...string) *sim {
	t.Helper()
	s := &sim{t: t, cmd: command(t, append([]string{"serve"}, args...)...)}
	stdout, err := s.cmd.StdoutPipe()
	must(t, err)
	s.stdout = bufio.NewReader(stdout)
	s.cmd.Stderr = &s.stderr
	must(t, s.cmd.Start())
	t.Cleanup(func() {
		if !s.ended {
			s.end(syscall.SIGKILL)
		}
	})
	for !strings.HasSuffix(s.ready, "# ready\n") {
		line, err := s.stdout.ReadString('\n')
		s.ready += line
		if err != nil {
			t.Fatalf("after %q: %v\n%s", s.ready, err, s.stderr.String())
		}
	}
	return s
}

// end sends a signal. It returns the rest of stdout, and the exit code (-1 if killed by the signal).
func (s *sim) end(signal os.Signal) (stdout string, code int) {
	s.t.Helper()
	s.ended = true
	must(s.t, s.cmd.Process.Signal(signal))
	rest, err := io.ReadAll(s.stdout)
	must(s.t, err)
	if err := s.cmd.Wait(); err != nil && s.cmd.ProcessState == nil {
		s.t.Fatal(err)
	}
	return string(rest), s.cmd.ProcessState.ExitCode()
}

// value is the value of the line "<key>=" on stdout.
func (s *sim) value(key string) string {
	s.t.Helper()
	for line := range strings.Lines(s.ready) {
		if value, ok := strings.CutPrefix(strings.TrimSpace(line), key+"="); ok {
			return value
		}
	}
	s.t.Fatalf("no %s in %q", key, s.ready)
	return ""
}

// instance is the ID and the guest's folder of an instance, from stdout.
func (s *sim) instance(name string) (id, dir string) {
	s.t.Helper()
	for line := range strings.Lines(s.ready) {
		if fields := strings.Fields(line); len(fields) == 4 && fields[1] == name {
			return fields[2], fields[3]
		}
	}
	s.t.Fatalf("no instance %s in %q", name, s.ready)
	return "", ""
}

// call makes a request of the API and decodes the answer.
func (s *sim) call(method, path string, body, answer any) {
	s.t.Helper()
	text, err := json.Marshal(body)
	must(s.t, err)
	req, err := http.NewRequest(method, s.value("OXIDE_HOST")+path, bytes.NewReader(text))
	must(s.t, err)
	req.Header.Set("Authorization", "Bearer "+s.value("OXIDE_TOKEN"))
	res, err := http.DefaultClient.Do(req)
	must(s.t, err)
	defer res.Body.Close()
	got, err := io.ReadAll(res.Body)
	must(s.t, err)
	if res.StatusCode > 299 {
		s.t.Fatalf("%s %s: %s %s", method, path, res.Status, got)
	}
	must(s.t, json.Unmarshal(got, answer))
}

type diskView struct {
	ID    string `json:"id"`
	Name  string `json:"name"`
	State struct {
		State    string `json:"state"`
		Instance string `json:"instance"`
	} `json:"state"`
}

// attached creates a disk of 1 GiB and attaches it to an instance. It returns the disk and its device node.
func (s *sim) attached(name, instance string) (diskView, string) {
	s.t.Helper()
	var disk diskView
	s.call("POST", "/v1/disks?project=demo", map[string]any{
		"name":        name,
		"description": "",
		"size":        1 << 30,
		"disk_backend": map[string]any{
			"type":        "distributed",
			"disk_source": map[string]any{"type": "blank", "block_size": 4096},
		},
	}, &disk)
	id, dir := s.instance(instance)
	s.call("POST", "/v1/instances/"+id+"/disks/attach", map[string]any{"disk": disk.ID}, &disk)
	return disk, node(s.t, dir, name)
}

// node finds a disk in a guest as a plugin does.
func node(t *testing.T, dir, name string) string {
	t.Helper()
	serials, err := filepath.Glob(filepath.Join(dir, "sys/block/nvme*/device/serial"))
	must(t, err)
	for _, path := range serials {
		if serial, err := os.ReadFile(path); err == nil && strings.TrimSpace(string(serial)) == name {
			return filepath.Join(dir, "dev", filepath.Base(filepath.Dir(filepath.Dir(path))))
		}
	}
	t.Fatalf("%s shows no disk %s", dir, name)
	return ""
}

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: guests with loop devices and mounts")
	}
}

// loopsBelow lists loop devices with a backing file below the folder, including deleted files.
func loopsBelow(t *testing.T, dir string) (found []string) {
	t.Helper()
	paths, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	must(t, err)
	for _, path := range paths {
		if text, err := os.ReadFile(path); err == nil && strings.HasPrefix(string(text), dir+"/") {
			found = append(found, string(text))
		}
	}
	return found
}

func execute(t *testing.T, name string, args ...string) {
	t.Helper()
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
}

// unmount unmounts a path. It waits while the mount is busy: a program that starts at the same time has copies of all
// open files until it executes.
func unmount(t *testing.T, path string) {
	t.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		err := unix.Unmount(path, 0)
		if err == nil {
			return
		}
		if !errors.Is(err, unix.EBUSY) || time.Now().After(end) {
			t.Fatalf("unmount %s: %v", path, err)
		}
	}
}

// makeFile formats the device, mounts it at a new folder, and writes and flushes a file.
func makeFile(t *testing.T, node, text string) (dir string) {
	t.Helper()
	execute(t, "mkfs.ext4", "-q", node)
	dir = t.TempDir()
	must(t, unix.Mount(node, dir, "ext4", 0, ""))
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil && err != unix.EINVAL {
			t.Errorf("unmount %s: %v", dir, err)
		}
	})
	f, err := os.Create(filepath.Join(dir, "file"))
	must(t, err)
	_, err = f.WriteString(text)
	must(t, err)
	must(t, f.Sync())
	must(t, f.Close())
	return dir
}

const anyUUID = `[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}`

// TestStdout compares all of stdout with the format that scripts rely on.
func TestStdout(t *testing.T) {
	tests := []struct {
		name string
		args []string
		want string
	}{
		{"defaults but the port", []string{"--listen=127.0.0.1:0"}, `OXIDE_HOST=http://127\.0\.0\.1:[1-9]\d*
OXIDE_TOKEN=oxide-token-demo
OXIDE_PROJECT=demo
# node-a ` + anyUUID + ` -
# node-b ` + anyUUID + ` -
# ready
`},
		{"everything", []string{
			"--listen", "127.0.0.1:0", "--control", "127.0.0.1:0", "--token", "oxide-token-x", "--project", "p",
			"--instances", "one", "--hotplug=async", "--max-disks", "8", "--quota", "10GiB", "--space", "1073741824",
			"--latency", "1ms", "--state-time", "1ms", "--api-version-max", "2026021301.0.0",
		}, `OXIDE_HOST=http://127\.0\.0\.1:[1-9]\d*
OXIDE_TOKEN=oxide-token-x
OXIDE_PROJECT=p
OXIDE_SIM_CONTROL=http://127\.0\.0\.1:[1-9]\d*
# one ` + anyUUID + ` -
# ready
`},
		{"no instances", []string{"--listen=127.0.0.1:0", "--instances="}, `OXIDE_HOST=http://127\.0\.0\.1:[1-9]\d*
OXIDE_TOKEN=oxide-token-demo
OXIDE_PROJECT=demo
# ready
`},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			s := start(t, test.args...)
			var pong struct{ Status string }
			if test.name != "everything" { // it serves an older API than this test uses
				s.call("GET", "/v1/ping", nil, &pong)
			}
			rest, code := s.end(syscall.SIGTERM)
			if !regexp.MustCompile(`^` + test.want + `$`).MatchString(s.ready + rest) {
				t.Errorf("stdout is\n%s%s\nwant a match of\n%s", s.ready, rest, test.want)
			}
			if code != 0 {
				t.Errorf("exit code after SIGTERM: got %d, want 0\n%s", code, s.stderr.String())
			}
		})
	}
}

// A release has the scripts with which shells complete the program's commands.
func TestCompletion(t *testing.T) {
	for _, shell := range []string{"bash", "fish", "powershell", "zsh"} {
		out, err := command(t, "completion", shell).CombinedOutput()
		if err != nil || !strings.Contains(string(out), "__complete") {
			t.Errorf("%s: %v, %.200s", shell, err, out)
		}
	}
}

// TestSettings compares the settings in the control endpoint with the flags.
func TestSettings(t *testing.T) {
	s := start(
		t,
		"--listen=127.0.0.1:0",
		"--control=localhost:0",
		"--hotplug",
		"--max-disks=8",
		"--quota=10GiB",
		"--space=20",
		"--latency=50ms",
		"--latency-max=70ms",
		"--state-time=2s",
		"--api-version-max=2026021301.0.0",
	)
	res, err := http.Get(s.value("OXIDE_SIM_CONTROL") + "/v0/settings")
	must(t, err)
	defer res.Body.Close()
	var got map[string]any
	must(t, json.NewDecoder(res.Body).Decode(&got))
	want := map[string]any{
		"hotplug":         true,
		"hotplug_async":   false,
		"max_disks":       8.0,
		"latency_ms":      50.0,
		"latency_max_ms":  70.0,
		"state_ms":        2000.0,
		"quota_bytes":     10.0 * (1 << 30),
		"cpu_quota":       0.0,
		"space_bytes":     20.0,
		"api_version_max": "2026021301.0.0",
		"guests":          false,
		"creating_ms":     0.0, "messages": "", "pantry": false, "plug_delay_ms": 0.0, "plug_fails": 0.0,
		"snapshot_ms": 0.0, "space_returns_ms": 0.0, "start_refusal": "", "unplug": true,
		"guests_off": "the simulator was started without --guest-root",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("settings (-want +got):\n%s", diff)
	}
}

// TestInvalidFlags expects one line for each problem, and exit code 2.
func TestInvalidFlags(t *testing.T) {
	tests := []struct {
		name string
		args []string
		want []string
	}{
		{"unknown flag", []string{"serve", "--nope"}, []string{`config: --nope: unknown flag; see --help`}},
		{
			"argument",
			[]string{"serve", "x"},
			[]string{`config: command line: "x" is not understood: see oxide-sim serve --help`},
		},
		{"unknown command", []string{"x"}, []string{`config: command line: "x" is not understood: see oxide-sim --help`}},
		{
			"listen",
			[]string{"serve", "--listen=12220"},
			[]string{`config: --listen: "12220" is not an address with a port: write one such as 127.0.0.1:12220`},
		},
		{
			"listen everywhere",
			[]string{"serve", "--listen=:0"},
			[]string{`config: --listen: ":0" is not a loopback address: write one such as 127.0.0.1:12221, or add --expose`},
		},
		{
			"control everywhere",
			[]string{"serve", "--control=:0"},
			[]string{`config: --control: ":0" is not a loopback address: write one such as 127.0.0.1:12221, or add --expose`},
		},
		{
			"control elsewhere",
			[]string{"serve", "--control=192.0.2.1:0"},
			[]string{
				`config: --control: "192.0.2.1:0" is not a loopback address: write one such as 127.0.0.1:12221, or add --expose`,
			},
		},
		{"token", []string{"serve", "--token=demo"}, []string{`config: --token: token must begin with "oxide-token-"`}},
		{
			"token that breaks a line",
			[]string{"serve", "--token=oxide-token-\n"},
			[]string{`config: --token: must not contain white space`},
		},
		{"project", []string{"serve", "--project="}, []string{`config: --project: must not be empty`}},
		{
			"instances",
			[]string{"serve", "--instances=a,"},
			[]string{`config: --instances: name "": name requires at least one character`},
		},
		{"an instance twice", []string{"serve", "--instances=a,b,a"}, []string{`config: --instances: "a" is given twice`}},
		{
			"hotplug",
			[]string{"serve", "--hotplug=sync"},
			[]string{
				`config: --hotplug: "sync" is not a mode of hot-plug: write --hotplug, --hotplug=async or --hotplug=attach-first`,
			},
		},
		{
			"no disks",
			[]string{"serve", "--max-disks=0"},
			[]string{`config: --max-disks: "0" is not a number of disks: write 1 to 12`},
		},
		{
			"too many disks",
			[]string{"serve", "--max-disks=13"},
			[]string{`config: --max-disks: max_disks is 13: a virtual machine has slots for 1 to 12 disks`},
		},
		{
			"size",
			[]string{"serve", "--quota=10GB"},
			[]string{
				`config: --quota: "10GB" is not a size: write bytes, or a whole number of KiB, MiB, GiB or TiB such as 10GiB`,
			},
		},
		{
			"size out of range",
			[]string{"serve", "--space=8388608TiB"},
			[]string{
				`config: --space: "8388608TiB" is not a size: write bytes, or a whole number of KiB, MiB, GiB or TiB such as 10GiB`,
			},
		},
		{
			"negative size",
			[]string{"serve", "--space=-1"},
			[]string{
				`config: --space: "-1" is not a size: write bytes, or a whole number of KiB, MiB, GiB or TiB such as 10GiB`,
			},
		},
		{
			"boot without guests",
			[]string{"serve", "--guest-boot=/bin/true"},
			[]string{`config: --guest-boot: requires --guest-root`},
		},
		{"several", []string{"serve", "--token=x", "--latency=5", "--state-time=-1s"}, []string{
			`config: --token: token must begin with "oxide-token-"`,
			`config: --latency: "5" is not a time: write one such as 50ms or 2s`,
			`config: --state-time: "-1s" is not a time: write one such as 50ms or 2s`,
		}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			var stdout, stderr bytes.Buffer
			cmd := command(t, test.args...)
			cmd.Stdout, cmd.Stderr = &stdout, &stderr
			if err := cmd.Run(); cmd.ProcessState.ExitCode() != 2 {
				t.Errorf("got %v, want exit code 2", err)
			}
			if diff := cmp.Diff(strings.Join(test.want, "\n")+"\n", stderr.String()); diff != "" {
				t.Errorf("stderr (-want +got):\n%s", diff)
			}
			if stdout.Len() > 0 {
				t.Errorf("stdout: %q", stdout.String())
			}
		})
	}
}

// TestOtherErrors expects one line, and exit code 1.
func TestOtherErrors(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer taken.Close()
	state := t.TempDir()
	start(t, "--listen=127.0.0.1:0", "--state", state)

	check := func(name, want string, asUser bool, args ...string) {
		t.Run(name, func(t *testing.T) {
			cmd := command(t, append([]string{"serve", "--listen=127.0.0.1:0"}, args...)...)
			if asUser && os.Geteuid() == 0 {
				cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
			}
			var stdout, stderr bytes.Buffer
			cmd.Stdout, cmd.Stderr = &stdout, &stderr
			if err := cmd.Run(); cmd.ProcessState.ExitCode() != 1 {
				t.Errorf("got %v, want exit code 1", err)
			}
			if !strings.HasPrefix(stderr.String(), "oxide-sim: ") || !strings.Contains(stderr.String(), want) ||
				strings.Count(stderr.String(), "\n") != 1 {
				t.Errorf("stderr is %q, want one line with %q", stderr.String(), want)
			}
			if stdout.Len() > 0 {
				t.Errorf("stdout: %q", stdout.String())
			}
		})
	}
	check("address in use", "address already in use", false, "--control", taken.Addr().String())
	check("state in use", "in use", false, "--state", state)
	check(
		"guests without root",
		"guests need root",
		true,
		"--guest-root",
		filepath.Join(os.TempDir(), "oxide-sim-test-nobody"),
	)
}

// TestEnd ends a simulator whose guest has a filesystem mounted: the guest halts in order, and nothing is left.
func TestEnd(t *testing.T) {
	needRoot(t)
	for _, keep := range []bool{false, true} {
		t.Run(fmt.Sprintf("state kept %v", keep), func(t *testing.T) {
			root, temp := filepath.Join(t.TempDir(), "guests"), t.TempDir()
			t.Setenv("TMPDIR", temp)
			args := []string{"--listen=127.0.0.1:0", "--hotplug", "--guest-root", root}
			if keep {
				args = append(args, "--state", filepath.Join(temp, "state"))
			}
			s := start(t, args...)
			if _, dir := s.instance("node-a"); dir != filepath.Join(root, "node-a") {
				t.Errorf("guest's folder: got %s, want %s", dir, filepath.Join(root, "node-a"))
			}
			_, node := s.attached("volume", "node-a")
			dir := makeFile(t, node, "text")
			if len(loopsBelow(t, temp)) != 3 {
				t.Fatalf("loop devices: got %v, want those of two boot disks and a volume", loopsBelow(t, temp))
			}

			rest, code := s.end(syscall.SIGTERM)
			if code != 0 || rest != "" {
				t.Errorf("got exit code %d, and %q on stdout\n%s", code, rest, s.stderr.String())
			}
			if left := loopsBelow(t, temp); len(left) > 0 {
				t.Errorf("loop devices left: %v", left)
			}
			if err := unix.Unmount(dir, 0); err != unix.EINVAL {
				t.Errorf("the filesystem was still mounted: %v", err)
			}
			if _, err := os.Stat(root); !os.IsNotExist(err) {
				t.Errorf("guests left: %v", err)
			}
			if entries, err := os.ReadDir(temp); !keep && (err != nil || len(entries) > 0) {
				t.Errorf("temporary files left: %v, %v", entries, err)
			}
		})
	}
}

// TestEndWithoutAReader ends a simulator whose stderr is closed, as after the death of its parent.
func TestEndWithoutAReader(t *testing.T) {
	state := filepath.Join(t.TempDir(), "state")
	cmd := command(t, "serve", "--listen=127.0.0.1:0", "--state", state)
	stdout, err := cmd.StdoutPipe()
	must(t, err)
	stderr, err := cmd.StderrPipe()
	must(t, err)
	must(t, cmd.Start())
	for lines := bufio.NewScanner(stdout); lines.Scan() && lines.Text() != "# ready"; {
	}
	must(t, stderr.Close())
	must(t, cmd.Process.Signal(syscall.SIGTERM))
	if err := cmd.Wait(); err != nil {
		t.Errorf("it should end in order: %v", err)
	}
}

// TestEndWithABusyMount ends a simulator while a file on one of its disks is open: it ends and names the mount.
func TestEndWithABusyMount(t *testing.T) {
	needRoot(t)
	temp := t.TempDir()
	t.Setenv("TMPDIR", temp)
	s := start(t, "--listen=127.0.0.1:0", "--hotplug", "--guest-root", filepath.Join(t.TempDir(), "guests"))
	_, node := s.attached("volume", "node-a")
	dir := makeFile(t, node, "text")
	busy, err := os.Open(filepath.Join(dir, "file"))
	must(t, err)
	defer busy.Close()

	if _, code := s.end(syscall.SIGTERM); code != 1 {
		t.Errorf("got exit code %d", code)
	}
	if want := "it is mounted at " + dir; !strings.Contains(s.stderr.String(), want) {
		t.Errorf("stderr lacks %q:\n%s", want, s.stderr.String())
	}
	if _, err := busy.Read(make([]byte, 1)); err == nil {
		t.Error("a filesystem of the ended simulator can still be read")
	}
	must(t, busy.Close())
	unmount(t, dir)
	if left := loopsBelow(t, temp); len(left) > 0 {
		t.Errorf("loop devices left: %v", left)
	}
}

// TestKilled kills a simulator and starts it again on the same state: instances, disks and data are the same.
func TestKilled(t *testing.T) {
	needRoot(t)
	root, state := filepath.Join(t.TempDir(), "guests"), t.TempDir()
	args := []string{"--listen=127.0.0.1:0", "--hotplug", "--guest-root", root, "--state", state}
	first := start(t, args...)
	disk, volume := first.attached("volume", "node-a")
	dead := makeFile(t, volume, "text")
	if _, code := first.end(syscall.SIGKILL); code != -1 {
		t.Fatalf("exit code after SIGKILL: %d", code)
	}

	second := start(t, args...)
	for _, name := range []string{"node-a", "node-b"} {
		was, _ := first.instance(name)
		if is, _ := second.instance(name); is != was {
			t.Errorf("instance %s was %s and is %s", name, was, is)
		}
	}
	var again diskView
	second.call("GET", "/v1/disks/"+disk.ID, nil, &again)
	if diff := cmp.Diff(disk, again); diff != "" {
		t.Errorf("the disk (-before +after):\n%s", diff)
	}
	if _, err := os.ReadFile(filepath.Join(dead, "file")); err == nil {
		t.Error("the mount of the killed simulator still works")
	}
	_, dir := second.instance("node-a")
	alive := t.TempDir()
	must(t, unix.Mount(node(t, dir, "volume"), alive, "ext4", 0, ""))
	text, err := os.ReadFile(filepath.Join(alive, "file"))
	if err != nil || string(text) != "text" {
		t.Errorf("the file: got %q, %v", text, err)
	}

	// The second simulator ends in order, and a third one starts.
	if _, code := second.end(syscall.SIGTERM); code != 0 {
		t.Errorf("exit code after SIGTERM: got %d\n%s", code, second.stderr.String())
	}
	if left := loopsBelow(t, state); len(left) > 0 {
		t.Errorf("loop devices left: %v", left)
	}
	third := start(t, args...)
	_, dir = third.instance("node-a")
	must(t, unix.Mount(node(t, dir, "volume"), alive, "ext4", 0, ""))
	if text, err := os.ReadFile(filepath.Join(alive, "file")); err != nil || string(text) != "text" {
		t.Errorf("the file: got %q, %v", text, err)
	}
	unmount(t, alive)
	if _, code := third.end(syscall.SIGTERM); code != 0 {
		t.Errorf("exit code after SIGTERM: got %d\n%s", code, third.stderr.String())
	}
	if left := loopsBelow(t, state); len(left) > 0 {
		t.Errorf("loop devices left: %v", left)
	}
}

// TestParseSize parses sizes as users write them in flags.
func TestParseSize(t *testing.T) {
	for text, want := range map[string]int64{
		"0": 0, "1073741824": 1 << 30, "10GiB": 10 << 30, "1KiB": 1024, "3MiB": 3 << 20, "8388607TiB": 8388607 << 40,
		"9223372036854775807": 1<<63 - 1,
	} {
		if got, err := parseSize(text); err != nil || got != want {
			t.Errorf("%s: got %d, %v, want %d", text, got, err, want)
		}
	}
	for _, text := range []string{"", "GiB", "1.5GiB", "1 GiB", "10gib", "10G", "+1", "-1", "9223372036854775808", "1e3"} {
		if got, err := parseSize(text); err == nil {
			t.Errorf("%q: got %d, want an error", text, got)
		}
	}
}

// With --expose the addresses may be any. The control endpoint answers no request for a foreign name.
func TestExpose(t *testing.T) {
	t.Parallel()
	p := start(t, "--listen=:0", "--control=0.0.0.0:0", "--expose")
	_, control, _ := strings.Cut(p.value("OXIDE_SIM_CONTROL"), "http://")
	_, port, err := net.SplitHostPort(control)
	must(t, err)
	for host, want := range map[string]int{
		"127.0.0.1:" + port: 200, "localhost": 200, "rack.example:" + port: 403, "192.0.2.1": 403,
	} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://127.0.0.1:"+port+"/v0/settings", nil)
		must(t, err)
		req.Host = host
		resp, err := http.DefaultClient.Do(req)
		must(t, err)
		must(t, resp.Body.Close())
		if resp.StatusCode != want {
			t.Errorf("host %s: %d, want %d", host, resp.StatusCode, want)
		}
	}
}
