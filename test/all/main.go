// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Command all runs every test of the module and evaluates the skips. As root it counts a skipped test as failed. As an
// ordinary user it lists the skipped tests with their reasons. With RACE=1 in the environment it uses the race
// detector.
//
// One skip is always allowed: the checks against the API schema are skipped if OXIDE_OPENAPI does not name the schema
// file, which is not part of the repository.
//
// gotestsum 1.13 is not used: it lists skipped tests, and cannot count them as failed.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"time"
)

// event is a line of go test -json.
type event struct {
	Action, Package, Test, Output, FailedBuild, ImportPath string
	Elapsed                                                float64
}

type result struct {
	passed, failed int
	// skipped maps tests to the reason of the skip.
	skipped map[string]string
	// output of tests and packages that have not passed.
	output map[string]*strings.Builder
	// failures has the first messages of each failed test. They are printed once more at the end, where a reader looks
	// first: a test may log a whole journal after its message.
	failures []string
}

func main() {
	// Most tests wait for disks and timers: with one package for each core a third of the machine is idle.
	args := []string{"test", "-json", "-timeout=30m", fmt.Sprintf("-p=%d", 2*runtime.NumCPU())}
	if os.Getenv("RACE") != "" {
		args = append(args, "-race")
	}
	if os.Geteuid() == 0 {
		// Each package gets its own mount namespace, because packages run in parallel: mkfs.btrfs reads all mounts, and
		// mounts of other packages would come and go.
		args = append(args, "-exec=unshare --mount --propagation=private")
	}
	args = append(args, targets(os.Args[1:])...)
	go watchMachine()
	code, err := run(args)
	if code != 0 {
		time.Sleep(2 * tick) // the watch may be a tick behind
	}
	if code != 0 && stoodStill.Load() {
		fmt.Println("The machine stood still during these tests, so they run once more.")
		code, err = run(args)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "test: %v\n", err)
		code = 1
	}
	os.Exit(code)
}

// targets returns the packages to test, all of them if no arguments are given. The packages that take longest begin
// first: otherwise they run alone at the end.
func targets(args []string) []string {
	if len(args) == 0 {
		return []string{"./core/controller", "./core/node", "./cmd/oxide-csi", "./core/mount", "./..."}
	}
	return args
}

func run(args []string) (int, error) {
	fmt.Printf("go %s\n", strings.Join(args, " "))
	cmd := exec.Command("go", args...)
	cmd.Stderr = os.Stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return 0, err
	}
	start := time.Now()
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	r := result{skipped: map[string]string{}, output: map[string]*strings.Builder{}}
	lines := bufio.NewScanner(stdout)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		var e event
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			fmt.Println(lines.Text())
			continue
		}
		r.take(e)
	}
	if err := lines.Err(); err != nil {
		return 0, err
	}
	failedRun := cmd.Wait() != nil
	return r.report(failedRun, time.Since(start)), nil
}

// stoodStill says that the whole machine stood still for so long that a test may have waited in vain. The clock of a
// paused virtual machine can jump: every deadline is then over at once, and a failure says nothing about the code.
var stoodStill atomic.Bool

const tick = time.Second

// watchMachine prints what a reader of a failure should know of the machine: each long pause, and a lack of memory.
func watchMachine() {
	const worthALine, tooLong = 5 * time.Second, 30 * time.Second
	const littleMemory = 512 // MiB
	last, short := time.Now(), false
	for now := range time.Tick(tick) {
		gap := now.Sub(last)
		if gap > worthALine {
			fmt.Printf("The machine stood still for %s.\n", gap.Round(time.Second))
		}
		if gap > tooLong {
			stoodStill.Store(true)
		}
		left, known := availableMemory()
		if !short && known && left < littleMemory {
			fmt.Printf("The machine has only %d MiB of memory left.\n", left)
			short = true
		}
		last = now
	}
}

// availableMemory returns how many MiB of memory programs can still get.
func availableMemory() (mebibytes int, known bool) {
	text, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, false
	}
	_, rest, found := strings.Cut(string(text), "MemAvailable:")
	var kib int
	if _, err := fmt.Sscan(rest, &kib); !found || err != nil {
		return 0, false
	}
	return kib >> 10, true
}

func (r *result) take(e event) {
	key := e.Package + " " + e.Test
	if e.Package == "" {
		key = e.ImportPath + " "
	}
	switch e.Action {
	case "output", "build-output":
		if r.output[key] == nil {
			r.output[key] = &strings.Builder{}
		}
		r.output[key].WriteString(e.Output)
	case "pass":
		if e.Test == "" {
			fmt.Printf("ok      %-70s %6.1fs\n", e.Package, e.Elapsed)
		} else {
			r.passed++
			r.printMeasured(key)
		}
		delete(r.output, key)
	case "fail", "build-fail":
		if e.Test != "" {
			r.failed++
			r.failures = append(r.failures, e.Package+" "+e.Test+messages(r.output[key]))
			fmt.Printf("FAILED  %s %s\n", e.Package, e.Test)
		} else if e.Action == "fail" {
			fmt.Printf("FAILED  %-70s %6.1fs\n", e.Package, e.Elapsed)
		}
		if e.FailedBuild != "" {
			r.print(e.FailedBuild + " ")
		}
		r.print(key)
		if e.Test == "" {
			r.printUnfinished(e.Package)
		}
	case "skip":
		if e.Test != "" { // otherwise a package without tests
			r.skipped[key] = reason(r.output[key])
		}
		delete(r.output, key)
	}
}

func (r *result) print(key string) {
	if output := r.output[key]; output != nil {
		fmt.Print(output)
		delete(r.output, key)
	}
}

// printUnfinished prints the output of the tests that had neither passed nor failed when their package's process ended.
// The reason of a timeout or a panic is in there: go test reports it as output of a test that runs.
func (r *result) printUnfinished(pkg string) {
	for _, key := range slices.Sorted(maps.Keys(r.output)) {
		if strings.HasPrefix(key, pkg+" ") {
			fmt.Printf("NOT ENDED  %s\n", key)
			r.print(key)
		}
	}
}

// measured is the prefix of log lines that are printed although the test has passed.
const measured = "measured: "

func (r *result) printMeasured(key string) {
	if r.output[key] == nil {
		return
	}
	for line := range strings.Lines(r.output[key].String()) {
		if _, text, found := strings.Cut(line, measured); found {
			fmt.Printf("        %s: %s", key[strings.LastIndexByte(key, ' ')+1:], text)
		}
	}
}

// reason is the message with which a test was skipped.
func reason(output *strings.Builder) string {
	if output == nil {
		return "no reason given"
	}
	for _, line := range strings.Split(output.String(), "\n") {
		if _, text, found := strings.Cut(strings.TrimSpace(line), ".go:"); found {
			_, text, _ = strings.Cut(text, ": ")
			return text
		}
	}
	return "no reason given"
}

// messages returns the beginnings of the lines that a test wrote itself, the newest of them, with a line break before
// each.
func messages(output *strings.Builder) string {
	const atMost, longest = 6, 300
	if output == nil {
		return ""
	}
	var own []string
	for line := range strings.Lines(output.String()) {
		line = strings.TrimRight(line, "\n")
		if !position.MatchString(line) {
			continue
		}
		if len(line) > longest {
			line = line[:longest] + "…"
		}
		own = append(own, line)
	}
	own = own[max(0, len(own)-atMost):]
	return strings.Join(append([]string{""}, own...), "\n    ")
}

// position matches a line that begins with the place of a call to t.Error, t.Fatal or t.Log. What such a call prints
// below its first line is indented further.
var position = regexp.MustCompile(`^ {4}(?: {4})*\w+\.go:\d+: `)

// report prints the result and returns the exit code.
func (r *result) report(failedRun bool, took time.Duration) int {
	notAllowed := 0
	for _, key := range slices.Sorted(maps.Keys(r.skipped)) {
		verdict := "skipped"
		if !allowed(r.skipped[key]) {
			verdict = "SKIPPED, which counts as failed as root"
			notAllowed++
		}
		fmt.Printf("%s: %s: %s\n", verdict, key, r.skipped[key])
	}
	for _, failure := range r.failures {
		fmt.Printf("failed: %s\n", failure)
	}
	if failedRun && r.failed == 0 {
		r.failed++ // a package that did not build, or a timeout
	}
	fmt.Printf(
		"%s\n%d passed, %d failed, %d skipped\n",
		took.Round(time.Second),
		r.passed,
		r.failed+notAllowed,
		len(r.skipped)-notAllowed,
	)
	if r.failed > 0 || notAllowed > 0 {
		return 1
	}
	return 0
}

func allowed(reason string) bool {
	if os.Geteuid() != 0 {
		return true
	}
	return strings.Contains(reason, "OXIDE_OPENAPI") && os.Getenv("OXIDE_OPENAPI") == ""
}
