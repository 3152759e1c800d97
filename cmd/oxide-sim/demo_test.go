// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"bufio"
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/test/pages"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

var update = flag.Bool("update", false, "write the demo's output to testdata instead of comparing it")

// masks replace what differs from run to run.
var masks = []struct {
	pattern *regexp.Regexp
	with    string
}{
	{regexp.MustCompile(`\S*/oxide-demo-\d+`), "/tmp/oxide-demo-NUMBER"},
	{regexp.MustCompile(`Done in [\d.]+ s\.`), "Done in TIME s."},
}

func mask(text string) string {
	for _, m := range masks {
		text = m.pattern.ReplaceAllString(text, m.with)
	}
	return text
}

// The largest output, so that it fits on a page.
const (
	mostLines   = 45
	mostColumns = 80
)

// compareGolden compares the demo's output, except for times and IDs, with a file in testdata.
func compareGolden(t *testing.T, name, printed string) {
	t.Helper()
	if lines := strings.Count(printed, "\n"); lines > mostLines {
		t.Errorf("%d lines, more than %d", lines, mostLines)
	}
	for line := range strings.Lines(printed) {
		if columns := len(line) - 1; columns > mostColumns {
			t.Errorf("%d columns, more than %d: %s", columns, mostColumns, line)
		}
	}
	path := filepath.Join("testdata", name)
	if *update {
		must(t, os.WriteFile(path, []byte(mask(printed)), 0o644))
	}
	want, err := os.ReadFile(path)
	must(t, err)
	if diff := cmp.Diff(string(want), mask(printed)); diff != "" {
		t.Errorf(
			"the demo's output differs from %s (go test ./cmd/oxide-sim -run Demo -update writes it): -want +got\n%s",
			path,
			diff,
		)
	}
}

// TestDemo runs each form of the demo to its end: on a rack of today and on one with hot-plug, as root and as an
// ordinary user. Both users get the same story without the nodes.
func TestDemo(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		golden string
		root   bool
		args   []string
	}{
		{"demo.txt", true, nil},
		{"demo-hotplug.txt", true, []string{"--hotplug"}},
		{"demo-without-root.txt", false, nil},
		{"demo-hotplug-without-root.txt", false, []string{"--hotplug"}},
	} {
		t.Run(test.golden, func(t *testing.T) {
			t.Parallel()
			cmd := demoProgram(t, test.args...)
			if test.root {
				needRoot(t)
			} else if os.Geteuid() == 0 {
				const nobody = 65534
				cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
			}
			var stderr bytes.Buffer
			cmd.Stderr = &stderr
			out, err := cmd.Output()
			if err != nil || stderr.Len() > 0 {
				t.Fatalf("%v, stderr %q, stdout:\n%s", err, &stderr, out)
			}
			checkNothingLeft(t, printedFolder(t, string(out)))
			compareGolden(t, test.golden, string(out))
		})
	}
}

// TestDemoTutorial compares the output that README.md and docs/tutorials/demo.md show with testdata, with which
// TestDemo compares the program's. With the files of a release it also runs the commands of the page, and compares what
// they print.
func TestDemoTutorial(t *testing.T) {
	blocks := pages.Of(t, "../../docs/tutorials/demo.md")
	want, err := os.ReadFile("testdata/demo.txt")
	must(t, err)
	if diff := cmp.Diff(string(want), mask(blocks[1])); diff != "" {
		t.Errorf("the demo in docs/tutorials/demo.md differs from testdata/demo.txt: -want +got\n%s", diff)
	}
	readme, err := os.ReadFile("../../README.md")
	must(t, err)
	_, shown, _ := strings.Cut(string(readme), "```text\n")
	shown, _, _ = strings.Cut(shown, "```")
	if strings.Count(shown, "\n") < 6 || !strings.Contains(string(want), shown) {
		t.Errorf("README.md shows what the demo does not print:\n%s", shown)
	}
	if simtest.ReleaseFiles() == "" {
		return
	}
	needRoot(t)
	dir := t.TempDir()
	compareGolden(t, "demo.txt", runBlock(t, dir, fromRelease(t, dir, blocks[0])))
}

func TestDemoWithoutThePlugin(t *testing.T) {
	sim, err := binary()
	must(t, err)
	dir := t.TempDir()
	alone := filepath.Join(dir, "oxide-sim")
	content, err := os.ReadFile(sim)
	must(t, err)
	must(t, os.WriteFile(alone, content, 0o755))
	out, err := exec.Command(alone, "demo").CombinedOutput()
	want := fmt.Sprintf(
		"oxide-sim: demo: the plugin is missing: %s/oxide-csi should be beside this binary: \"make demo\" builds both\n",
		dir,
	)
	if err == nil || string(out) != want {
		t.Errorf("%v, printed %q, want %q", err, out, want)
	}
}

func TestDemoInAFolderInUse(t *testing.T) {
	dir := t.TempDir()
	kept := filepath.Join(dir, "kept")
	must(t, os.WriteFile(kept, nil, 0o600))
	out, err := demoProgram(t, "--state="+dir).CombinedOutput()
	want := fmt.Sprintf("oxide-sim: demo: --state: %s is not empty: name a new or an empty directory\n", dir)
	if err == nil || string(out) != want {
		t.Errorf("%v, printed %q, want %q", err, out, want)
	}
	if _, err := os.Stat(kept); err != nil {
		t.Error(err)
	}
}

// TestDemoWithACorruptedDisk changes the disk while the volume moves. The demo must detect the changed data.
func TestDemoWithACorruptedDisk(t *testing.T) {
	t.Parallel()
	needRoot(t)
	// An existing folder must remain. Its name needs quoting in a shell.
	dir := filepath.Join(t.TempDir(), "it's mine")
	must(t, os.Mkdir(dir, 0o755))
	d := startDemo(t, dir, "--hotplug")
	d.until("volume expand orders")
	corrupt(t, filepath.Join(dir, "rack", "disks"))
	d.finish()
	want := regexp.MustCompile(
		`^oxide-sim: demo: step 7 \(Move orders to node-b, while it runs\.\): this was expected instead: 16 MiB, sha256 \w{20}\n$`,
	)
	if d.code != 1 || !want.MatchString(d.stderr.String()) {
		t.Errorf("exit code %d, stderr %q, want 1 and %q", d.code, &d.stderr, want)
	}
	if !strings.HasSuffix(d.seen.String(), "has been taken away.\n") {
		t.Errorf("the end of the story:\n%s", &d.seen)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) > 0 {
		t.Errorf("%v, the folder holds %v", err, entries)
	}
	checkNoTraces(t, dir)
}

// corrupt changes a byte of the file in the backing files of all disks that hold it.
func corrupt(t *testing.T, dir string) {
	t.Helper()
	block := make([]byte, 4096)
	_, err := io.ReadFull(fileContent(), block)
	must(t, err)
	disks, err := filepath.Glob(filepath.Join(dir, "*.disk"))
	must(t, err)
	found := false
	for _, disk := range disks {
		f, err := os.OpenFile(disk, os.O_RDWR, 0)
		must(t, err)
		for end := int64(0); ; {
			start, err := unix.Seek(int(f.Fd()), end, unix.SEEK_DATA)
			if err != nil {
				break // no more data
			}
			end, err = unix.Seek(int(f.Fd()), start, unix.SEEK_HOLE)
			must(t, err)
			data := make([]byte, end-start)
			_, err = f.ReadAt(data, start)
			must(t, err)
			if i := bytes.Index(data, block); i >= 0 {
				_, err := f.WriteAt([]byte{^block[100]}, start+int64(i)+100)
				must(t, err)
				found = true
			}
		}
		must(t, f.Close())
	}
	if !found {
		t.Fatal("what was written to the volume is on no disk")
	}
}

// TestDemoWithAForeignDisk creates a disk on the rack behind the plugin's back. The demo must see it in the rack's
// listing: in the middle of the story, and at the end.
func TestDemoWithAForeignDisk(t *testing.T) {
	t.Parallel()
	for after, want := range map[string]string{
		"volume attach orders":   "step 3 .*: this was expected instead: orders .*",
		"snapshot delete monday": `left behind: the rack has the disks \[foreign .*\]; at the start it had \[node-a-boot node-b-boot\]`,
	} {
		t.Run(after, func(t *testing.T) {
			t.Parallel()
			dir := filepath.Join(t.TempDir(), "demo")
			d := startDemo(t, dir, "--hotplug", "--controller-only")
			d.until(after)
			d.createDisk("foreign")
			d.finish()
			if d.code != 1 || !regexp.MustCompile("^oxide-sim: demo: "+want+"\n$").MatchString(d.stderr.String()) {
				t.Errorf("exit code %d, stderr %q, want 1 and %q", d.code, &d.stderr, want)
			}
			checkNothingLeft(t, dir)
		})
	}
}

// TestInterruptedDemo interrupts the story in several ways. Everything must be removed each time.
func TestInterruptedDemo(t *testing.T) {
	t.Parallel()
	needRoot(t)
	tests := []struct {
		name string
		// interrupt is called while the volume is mounted.
		interrupt func(t *testing.T, d *runningDemo)
		stderr    string
	}{
		{"interrupted alone", func(t *testing.T, d *runningDemo) { must(t, d.cmd.Process.Signal(os.Interrupt)) },
			`^oxide-sim: demo: interrupted: .*interrupt.*\n$`},
		{
			"Ctrl-C at the terminal, for all processes",
			func(t *testing.T, d *runningDemo) { must(t, syscall.Kill(-d.cmd.Process.Pid, syscall.SIGINT)) },
			`^oxide-sim: demo: interrupted: .*interrupt.*\n$`,
		},
		{"terminated", func(t *testing.T, d *runningDemo) { must(t, d.cmd.Process.Signal(syscall.SIGTERM)) },
			`^oxide-sim: demo: interrupted: .*terminated.*\n$`},
		{
			"a node plugin is killed",
			func(t *testing.T, d *runningDemo) { d.killPart("--mode=node") },
			`^oxide-sim: demo: step 5 \(.*\): oxide-csi volume unmount orders data: .*cannot open /proc/.*\n$`,
		},
		{
			"the controller is killed",
			func(t *testing.T, d *runningDemo) { d.killPart("--mode=controller") },
			`^oxide-sim: demo: step 4 \(.*\): oxide-csi snapshot create .*no plugin responds at .*; demo: left behind: .*signal: killed.*\n$`,
		},
		{"the rack is killed", func(t *testing.T, d *runningDemo) { d.killPart("serve") },
			`^oxide-sim: demo: step 4 \(.*\): oxide-csi snapshot create .*; demo: left behind: .*signal: killed.*\n$`},
		{"the reader closes stdout", func(t *testing.T, d *runningDemo) { must(t, d.stdout.Close()) },
			`^oxide-sim: demo: step 4 .*: write /dev/stdout: broken pipe\n$`},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			dir := filepath.Join(t.TempDir(), "demo")
			d := startDemo(t, dir, "--hotplug")
			d.until("volume mount orders")
			found, err := findTraces(dir)
			must(t, err)
			for _, kind := range []string{"the loop device ", "the process "} {
				if !slices.ContainsFunc(found, func(trace string) bool { return strings.HasPrefix(trace, kind) }) {
					t.Errorf("in the middle of the story there is no %s: %s", kind, found)
				}
			}
			test.interrupt(t, d)
			d.finish()
			if d.code != 1 || !regexp.MustCompile(test.stderr).MatchString(d.stderr.String()) {
				t.Errorf("exit code %d, stderr %q, want 1 and %q", d.code, &d.stderr, test.stderr)
			}
			checkNothingLeft(t, dir)
		})
	}
}

// TestDemoOnATerminal marks the step under way on a terminal, and removes the mark when the step is over. The mark is
// bold unless NO_COLOR is set. A file gets plain lines.
func TestDemoOnATerminal(t *testing.T) {
	for _, test := range []struct {
		path, noColor, want string
	}{
		{"/dev/ptmx", "", "\x1b[1m> 1. Do.\x1b[0m\r\x1b[K1. Do.\n   done\n"},
		{"/dev/ptmx", "1", "> 1. Do.\r\x1b[K1. Do.\n   done\n"},
		{filepath.Join(t.TempDir(), "file"), "", "1. Do.\n   done\n"},
	} {
		t.Setenv("NO_COLOR", test.noColor)
		file, err := os.OpenFile(test.path, os.O_RDWR|os.O_CREATE, 0o600)
		must(t, err)
		n := newNarrator(file, nil, false)
		var printed bytes.Buffer
		n.w = &printed
		n.begin("1. Do.")
		n.end([]string{"done"})
		must(t, file.Close())
		if printed.String() != test.want {
			t.Errorf("%s with NO_COLOR=%s got %q, want %q", test.path, test.noColor, &printed, test.want)
		}
	}
}

// demoProgram is the demo without the environment of the test, so that its folder is in the default temporary folder.
func demoProgram(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	sim, err := binary()
	must(t, err)
	cmd := exec.Command(sim, append([]string{"demo"}, args...)...)
	// Programs with the race detector would sleep for a second before they exit.
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "GORACE=atexit_sleep_ms=0"}
	return cmd
}

// runningDemo is a demo with --step that the test controls.
type runningDemo struct {
	t      *testing.T
	cmd    *exec.Cmd
	dir    string
	stdin  io.WriteCloser
	stdout io.ReadCloser
	lines  *bufio.Scanner
	// seen is what the test has read of its stdout.
	seen, stderr bytes.Buffer
	code         int
}

// startDemo starts a demo with --step in a folder.
func startDemo(t *testing.T, dir string, args ...string) *runningDemo {
	t.Helper()
	d := &runningDemo{t: t, dir: dir, cmd: demoProgram(t, append(args, "--step", "--state="+dir)...)}
	d.cmd.Stderr = &d.stderr
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // as a shell does
	var err error
	d.stdin, err = d.cmd.StdinPipe()
	must(t, err)
	d.stdout, err = d.cmd.StdoutPipe()
	must(t, err)
	d.lines = bufio.NewScanner(d.stdout)
	must(t, d.cmd.Start())
	return d
}

// until presses Enter until the demo has run this command. The demo then waits for the next Enter.
func (d *runningDemo) until(command string) {
	d.t.Helper()
	there := false
	for d.lines.Scan() {
		line := d.lines.Text()
		fmt.Fprintln(&d.seen, line)
		there = there || strings.Contains(line, command)
		switch {
		case !strings.Contains(line, "press Enter"):
		case there:
			return
		default:
			_, err := io.WriteString(d.stdin, "\n")
			must(d.t, err)
		}
	}
	d.finish()
	d.t.Fatalf("the demo ended before %q: exit code %d, stderr %q, stdout:\n%s", command, d.code, &d.stderr, &d.seen)
}

// finish presses Enter until the demo ends.
func (d *runningDemo) finish() {
	d.t.Helper()
	must(d.t, d.stdin.Close())
	for d.lines.Scan() {
		fmt.Fprintln(&d.seen, d.lines.Text())
	}
	err := d.cmd.Wait()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		d.t.Fatal(err)
	}
	d.code = d.cmd.ProcessState.ExitCode()
}

// part finds a process of the demo: the oldest with this argument and with the demo's folder in its command line.
func (d *runningDemo) part(argument string) (pid int, command string) {
	d.t.Helper()
	commands, err := readEach("/proc/[0-9]*/cmdline")
	must(d.t, err)
	for path, text := range commands {
		if !strings.Contains(text, d.dir+"/") || !slices.Contains(strings.Split(text, "\x00"), argument) {
			continue
		}
		found, err := strconv.Atoi(strings.Split(path, "/")[2])
		must(d.t, err)
		if pid == 0 || found < pid {
			pid, command = found, text
		}
	}
	if pid == 0 {
		d.t.Fatalf("the demo has started nothing with %s", argument)
	}
	return pid, command
}

// killPart kills a process of the demo, and waits until it is gone.
func (d *runningDemo) killPart(argument string) {
	d.t.Helper()
	pid, _ := d.part(argument)
	must(d.t, syscall.Kill(pid, syscall.SIGKILL))
	for {
		if _, err := os.Stat(fmt.Sprintf("/proc/%d", pid)); err != nil {
			return
		}
		time.Sleep(time.Millisecond)
	}
}

// createDisk creates a disk through the rack's API.
func (d *runningDemo) createDisk(name string) {
	d.t.Helper()
	_, command := d.part("--mode=controller")
	host := regexp.MustCompile(`--oxide-host=(http:[\w./:]+)`).FindStringSubmatch(command)
	body := fmt.Sprintf(
		`{"name": %q, "description": "", "size": 1073741824, "disk_backend": {"type": "distributed", "disk_source": {"type": "blank", "block_size": 4096}}}`,
		name,
	)
	req, err := http.NewRequest(http.MethodPost, host[1]+"/v1/disks?project=demo", strings.NewReader(body))
	must(d.t, err)
	req.Header.Set("Authorization", "Bearer oxide-token-demo")
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	must(d.t, err)
	must(d.t, resp.Body.Close())
	if resp.StatusCode != http.StatusCreated {
		d.t.Fatalf("the rack creates no disk: %s", resp.Status)
	}
}

func printedFolder(t *testing.T, out string) string {
	t.Helper()
	found := regexp.MustCompile(`(\S+) is gone\n$`).FindStringSubmatch(out)
	if found == nil {
		t.Fatalf("no folder was printed:\n%s", out)
	}
	return found[1]
}

func checkNothingLeft(t *testing.T, dir string) {
	t.Helper()
	if _, err := os.Lstat(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the folder %s should be gone: %v", dir, err)
	}
	checkNoTraces(t, dir)
}

func checkNoTraces(t *testing.T, dir string) {
	t.Helper()
	found, err := findTraces(dir)
	must(t, err)
	if len(found) > 0 {
		t.Errorf("left behind: %s", strings.Join(found, "\n"))
	}
}
