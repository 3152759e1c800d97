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
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

var update = flag.Bool("update", false, "write the demo's output to testdata instead of comparing it")

// masks replace what differs from run to run, without changing the width of columns.
var masks = []struct {
	pattern *regexp.Regexp
	with    string
}{
	{regexp.MustCompile(anyUUID), "xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx"},
	{regexp.MustCompile(`127\.0\.0\.1:(\d+|PORT)`), "127.0.0.1:PORT"},
	{regexp.MustCompile(`\S*/oxide-demo-\d+`), "/tmp/oxide-demo-NUMBER"},
	{regexp.MustCompile(`Done in [\d.]+ s\.`), "Done in TIME s."},
}

func mask(text string) string {
	for _, m := range masks {
		text = m.pattern.ReplaceAllString(text, m.with)
	}
	return text
}

// compareGolden compares the demo's output, except for times and IDs, with a file in testdata.
func compareGolden(t *testing.T, name, printed string) {
	t.Helper()
	for i, line := range strings.Split(printed, "\n") {
		// Lines with two IDs, or with an ID and a path, may be longer.
		if len(line) > 106 {
			t.Errorf("line %d has %d columns, more than 106: %s", i+1, len(line), line)
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

func TestDemo(t *testing.T) {
	t.Parallel()
	needRoot(t)
	var stderr bytes.Buffer
	cmd := demoProgram(t)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil || stderr.Len() > 0 {
		t.Fatalf("%v, stderr %q, stdout:\n%s", err, &stderr, out)
	}
	checkNothingLeft(t, printedFolder(t, string(out)))
	compareGolden(t, "demo.txt", string(out))
}

// TestDemoTutorial compares the demo between two markers in docs/tutorials/demo.md with testdata.
func TestDemoTutorial(t *testing.T) {
	page, err := os.ReadFile("../../docs/tutorials/demo.md")
	must(t, err)
	_, block, begun := strings.Cut(string(page), "<!-- demo:begin -->\n")
	block, _, ended := strings.Cut(block, "<!-- demo:end -->")
	if !begun || !ended {
		t.Fatal("docs/tutorials/demo.md lacks one of the markers demo:begin and demo:end")
	}
	var shown strings.Builder
	for line := range strings.Lines(block) {
		if !strings.HasPrefix(line, "```") {
			shown.WriteString(line)
		}
	}
	want, err := os.ReadFile("testdata/demo.txt")
	must(t, err)
	if diff := cmp.Diff(string(want), mask(shown.String())); diff != "" {
		t.Errorf("the demo in docs/tutorials/demo.md differs from testdata/demo.txt: -want +got\n%s", diff)
	}
}

func TestDemoWithoutRoot(t *testing.T) {
	t.Parallel()
	var stderr bytes.Buffer
	cmd := demoProgram(t)
	if os.Geteuid() == 0 {
		const nobody = 65534
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	}
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil || stderr.Len() > 0 {
		t.Fatalf("%v, stderr %q, stdout:\n%s", err, &stderr, out)
	}
	checkNothingLeft(t, printedFolder(t, string(out)))
	compareGolden(t, "demo-without-root.txt", string(out))
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
		"oxide-sim: demo: the plugin is missing: %s/oxide-csi should be beside this program: \"make demo\" builds both\n",
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
	want := fmt.Sprintf("oxide-sim: demo: --state: %s is not empty: name a new or an empty folder\n", dir)
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
	d := startDemo(t, "--step", "--state="+dir)
	d.until("volume detach ledger")
	id := regexp.MustCompile("(?m)^ +(" + anyUUID + ")$").FindStringSubmatch(d.seen.String())
	if id == nil {
		t.Fatalf("no volume ID was printed:\n%s", &d.seen)
	}
	corrupt(t, filepath.Join(dir, "rack", "disks", id[1]+".disk"))
	d.finish()
	const want = "oxide-sim: demo: step 7 (The database reads its file.): the checksum of ledger.db on node-b differs from that of the written data\n"
	if d.code != 1 || d.stderr.String() != want {
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

// corrupt changes a byte of the database's file in the backing file of the disk.
func corrupt(t *testing.T, disk string) {
	t.Helper()
	block := make([]byte, 4096)
	_, err := io.ReadFull(fileContent(), block)
	must(t, err)
	f, err := os.OpenFile(disk, os.O_RDWR, 0)
	must(t, err)
	defer func() { must(t, f.Close()) }()
	for end := int64(0); ; {
		start, err := unix.Seek(int(f.Fd()), end, unix.SEEK_DATA)
		if err != nil {
			t.Fatalf("what the database wrote is not on the disk: %v", err)
		}
		end, err = unix.Seek(int(f.Fd()), start, unix.SEEK_HOLE)
		must(t, err)
		data := make([]byte, end-start)
		_, err = f.ReadAt(data, start)
		must(t, err)
		if i := bytes.Index(data, block); i >= 0 {
			_, err := f.WriteAt([]byte{^block[100]}, start+int64(i)+100)
			must(t, err)
			return
		}
	}
}

// TestInterruptedDemo interrupts the story in several ways. Everything must be removed each time.
func TestInterruptedDemo(t *testing.T) {
	t.Parallel()
	needRoot(t)
	tests := []struct {
		name string
		// interrupt is called while the volume is mounted twice.
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
			"a plugin is killed",
			func(t *testing.T, d *runningDemo) { d.killPart("--mode=node") },
			`^oxide-sim: demo: step 5 \(.*\): oxide-csi volume unmount ledger data: oxide-csi: no plugin answers at .*; demo: left behind: .*signal: killed.*\n$`,
		},
		{"the rack is killed", func(t *testing.T, d *runningDemo) { d.killPart("serve") },
			`^oxide-sim: demo: step 3 \(.*\): .*connection refused.*; demo: left behind: .*signal: killed.*\n$`},
		{"the reader closes stdout", func(t *testing.T, d *runningDemo) { must(t, d.stdout.Close()) },
			`^oxide-sim: demo: step 3 .*: write /dev/stdout: broken pipe\n$`},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			dir := filepath.Join(t.TempDir(), "demo")
			d := startDemo(t, "--step", "--state="+dir)
			d.until("volume mount ledger")
			found, err := findTraces(dir)
			must(t, err)
			for _, kind := range []string{"the mount at ", "the loop device ", "the process "} {
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
	stdin  io.WriteCloser
	stdout io.ReadCloser
	lines  *bufio.Scanner
	// seen is what the test has read of its stdout.
	seen, stderr bytes.Buffer
	code         int
}

func startDemo(t *testing.T, args ...string) *runningDemo {
	t.Helper()
	d := &runningDemo{t: t, cmd: demoProgram(t, args...)}
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

// killPart kills a process that the demo has started: the oldest with this argument.
func (d *runningDemo) killPart(argument string) {
	d.t.Helper()
	stats, err := readEach("/proc/[0-9]*/stat")
	must(d.t, err)
	var found []int
	for path, stat := range stats {
		// The fields state and parent follow the program's name in parentheses.
		_, after, _ := strings.Cut(stat, ") ")
		fields := strings.Fields(after)
		if len(fields) < 2 || fields[1] != strconv.Itoa(d.cmd.Process.Pid) {
			continue
		}
		pid, err := strconv.Atoi(strings.Split(path, "/")[2])
		must(d.t, err)
		command, err := os.ReadFile(filepath.Join(filepath.Dir(path), "cmdline"))
		must(d.t, err)
		if slices.Contains(strings.Split(string(command), "\x00"), argument) {
			found = append(found, pid)
		}
	}
	if len(found) == 0 {
		d.t.Fatalf("the demo has started nothing with %s", argument)
	}
	must(d.t, syscall.Kill(slices.Min(found), syscall.SIGKILL))
}

func printedFolder(t *testing.T, out string) string {
	t.Helper()
	found := regexp.MustCompile(`(?m)^ +folder +(\S+)$`).FindStringSubmatch(out)
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
