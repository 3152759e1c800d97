// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// programs are built once, with the race detector if the test has it.
var programs simtest.Programs

func TestMain(m *testing.M) { os.Exit(buildAndRun(m)) }

// buildAndRun builds the programs, runs the tests, and returns the exit code.
func buildAndRun(m *testing.M) int {
	dir, err := os.MkdirTemp("", "oxide-csi")
	if err == nil {
		programs, err = simtest.Build(dir, simtest.RaceDetector())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	code := m.Run()
	if err := os.RemoveAll(dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}

// canary is used as a token. No output may contain it.
const canary = "oxide-token-canary9c1f"

// result is the exit code and the output of a program.
type result struct {
	code           int
	stdout, stderr string
}

// baseEnv returns the environment of every plugin in these tests. Without the second variable, each program that is
// built with the race detector takes a second to end.
func baseEnv() []string { return []string{"PATH=" + os.Getenv("PATH"), "GORACE=atexit_sleep_ms=10"} }

// runPlugin runs the plugin to its end with exactly this environment.
func runPlugin(t *testing.T, environ []string, args ...string) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, programs.Plugin, args...)
	cmd.Env = append(baseEnv(), environ...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	if ctx.Err() != nil {
		t.Fatalf("%v did not end: %s", args, &stderr)
	}
	if strings.Contains(stdout.String()+stderr.String(), canary) {
		t.Errorf("the output contains the token: %s%s", &stdout, &stderr)
	}
	return result{code: cmd.ProcessState.ExitCode(), stdout: stdout.String(), stderr: stderr.String()}
}

func TestHelpAndVersionIgnoreTheConfiguration(t *testing.T) {
	broken := []string{"OXIDE_CSI_MAX_DISKS=many", "CSI_ENDPOINT=tcp://x", "OXIDE_TOKEN=" + canary}
	for name, environ := range map[string][]string{"no configuration": nil, "invalid configuration": broken} {
		t.Run(name, func(t *testing.T) {
			for _, args := range [][]string{{"version"}, {"--version"}} {
				got := runPlugin(t, environ, args...)
				if want := (result{stdout: "oxide-csi version devel\n"}); got != want {
					t.Errorf("%v: %+v, want %+v", args, got, want)
				}
			}
			for _, args := range [][]string{{"--help"}, {"-h"}, {"help"}} {
				got := runPlugin(t, environ, args...)
				if got.code != 0 || got.stderr != "" {
					t.Errorf("%v: %+v", args, got)
				}
				for _, mention := range []string{"--endpoint", "CSI_ENDPOINT", "--oxide-token-file", "--cluster-id", "--instance-id", "--http-endpoint", "--version", "version "} {
					if !strings.Contains(got.stdout, mention) {
						t.Errorf("%v does not mention %s:\n%s", args, mention, got.stdout)
					}
				}
			}
		})
	}
}

// Help begins with examples. It shows the settings in groups, without the settings for tests and orchestrators.
func TestHelpShowsSettingsInGroups(t *testing.T) {
	help := runPlugin(t, nil, "--help").stdout
	headings := []string{
		"Examples",
		"Usage",
		"Available Commands",
		"Serving",
		"Rack",
		"Node identity",
		"Attaching",
		"Kubernetes",
		"Nomad",
		"Diagnostics",
		"Flags",
	}
	var got []string
	for line := range strings.Lines(help) {
		if heading, ok := strings.CutSuffix(line, ":\n"); ok && !strings.HasPrefix(line, " ") {
			got = append(got, heading)
		}
		if len(line) > 121 {
			t.Errorf("a line has %d columns: %s", len(line)-1, line)
		}
	}
	if diff := cmp.Diff(headings, got); diff != "" {
		t.Errorf("headings: -want +got:\n%s", diff)
	}
	if n := strings.Count(help, "  oxide-csi --mode="); n != 2 {
		t.Errorf("%d examples, want a controller and a node:\n%s", n, help)
	}
	if n := strings.Count(help, "\n      --"); n > 36 { // --help and --version have a short form before them
		t.Errorf("%d flags of settings, want at most 36", n)
	}
	if !strings.Contains(help, "Nomad's own variables are read too: NOMAD_ADDR") {
		t.Errorf("Nomad's variables are not mentioned:\n%s", help)
	}
	completion := runPlugin(t, nil, "__complete", "--").stdout
	for _, hidden := range []string{
		"boot-id-file", "dev-root", "sys-root", "device-timeout", "pprof", "restart-wait", "restart-window",
	} {
		if strings.Contains(help, "--"+hidden) || strings.Contains(completion, "--"+hidden) {
			t.Errorf("--%s is shown", hidden)
		}
	}
	if !strings.Contains(completion, "--attach-mode") {
		t.Errorf("completion offers %s", completion)
	}
}

// The examples of the help are valid command lines: they fail only because the socket's folder does not exist here.
func TestExamplesOfTheHelpAreValid(t *testing.T) {
	_, examples, _ := strings.Cut(runPlugin(t, nil, "--help").stdout, "Examples:\n")
	examples, _, _ = strings.Cut(examples, "Usage:")
	tokenFile := filepath.Join(t.TempDir(), "token")
	must(t, os.WriteFile(tokenFile, []byte(canary+"\n"), 0o600))
	examples = strings.NewReplacer(" \\\n", " ", "/etc/oxide-csi/token", tokenFile, "unix:///run/oxide-csi", t.TempDir()+"/none").
		Replace(examples)
	for line := range strings.Lines(examples) {
		args := strings.Fields(line)
		if len(args) == 0 || args[0] != "oxide-csi" {
			continue
		}
		if got := runPlugin(t, nil, args[1:]...); got.code != 1 || !strings.Contains(got.stderr, "directory exists") {
			t.Errorf("%v: %+v, want an error about the socket's directory alone", args, got)
		}
	}
}

var problemLine = regexp.MustCompile(`^config: ([^ ]+|command line): [^ ].*$`)

// problems checks that a process has rejected its configuration, and returns its output lines by flag.
func problems(t *testing.T, got result, code int) map[string]string {
	t.Helper()
	if got.code != code || got.stdout != "" {
		t.Errorf("exit code %d, stdout %q; want code %d and no output", got.code, got.stdout, code)
	}
	found := map[string]string{}
	for line := range strings.Lines(got.stderr) {
		parts := problemLine.FindStringSubmatch(strings.TrimSuffix(line, "\n"))
		if parts == nil {
			t.Errorf("line %q is not of the form config: <flag>: <what>", line)
			continue
		}
		if _, twice := found[parts[1]]; twice {
			t.Errorf("%s is reported twice", parts[1])
		}
		found[parts[1]] = line
	}
	return found
}

func TestInvalidConfigurationIsRejected(t *testing.T) {
	dir := t.TempDir()
	tokenFile, empty := filepath.Join(dir, "token"), filepath.Join(dir, "empty")
	must(t, os.WriteFile(tokenFile, []byte(canary+"\n"), 0o600))
	must(t, os.WriteFile(empty, nil, 0o600))
	controller := []string{
		"--endpoint=" + filepath.Join(dir, "csi.sock"),
		"--mode=controller",
		"--oxide-host=http://127.0.0.1:1",
		"--oxide-project=demo",
		"--oxide-token-file=" + tokenFile,
		"--cluster-id=c",
	}
	for _, test := range []struct {
		name    string
		environ []string
		args    []string
		flags   []string
	}{
		{"no settings of a controller", nil, []string{"--mode=controller"}, []string{"--cluster-id", "--endpoint", "--oxide-host", "--oxide-project", "--oxide-token-file"}},
		{"no settings of a node", nil, []string{"--mode=node"}, []string{"--endpoint"}},
		{"all problems at once", []string{"OXIDE_CSI_MAX_DISKS=1", "OXIDE_CSI_LOG_LEVEL=loud"},
			append(slices.Clone(controller), "--endpoint=tcp://127.0.0.1:1", "--cluster-id=A", "--device-timeout=soon", "--http-endpoint=9808", "--log-format=xml"),
			[]string{"--cluster-id", "--device-timeout", "--endpoint", "--http-endpoint", "--log-format", "--log-level", "--max-disks"}},
		{"a socket path that is too long", nil, append(slices.Clone(controller), "--endpoint=/"+strings.Repeat("a", 107)), []string{"--endpoint"}},
		{"an empty token file", nil, append(slices.Clone(controller), "--oxide-token-file="+empty), []string{"--oxide-token-file"}},
		{"a missing token file", nil, append(slices.Clone(controller), "--oxide-token-file="+dir+"/none"), []string{"--oxide-token-file"}},
		{"a token in another setting", nil, append(slices.Clone(controller), "--max-disks="+canary), []string{"--max-disks"}},
		{"a template that was not filled in", nil, []string{"--endpoint=/x", "--mode=node", "--instance-id=${meta.oxide.instance_id}"}, []string{"--instance-id"}},
		{"an unknown provider", nil, []string{"--endpoint=/x", "--mode=node", "--metadata=aws"}, []string{"--metadata"}},
		{"a node without an instance", nil, []string{"--endpoint=/x", "--mode=node", "--metadata=none"}, []string{"--metadata"}},
		{"a provider without its required setting", nil, []string{"--endpoint=/x", "--mode=node", "--metadata=kubernetes"}, []string{"--node-name"}},
		{"an unknown mode", nil, append(slices.Clone(controller), "--mode=both", "--instance-id=6f3a1c9e-2b7d-4e58-9a41-0d5c8e7f1a23"), []string{"--mode"}},
		{"restarts without an orchestrator or hard shutdown", nil, append(slices.Clone(controller), "--attach-mode=restart"), []string{"--restart-shutdown"}},
		{"a missing configuration file", nil, append(slices.Clone(controller), "--config="+dir+"/none.yaml"), []string{"--config"}},
		{"unknown flag", nil, append(slices.Clone(controller), "--bogus"), []string{"--bogus"}},
		{"unknown short flag", nil, append(slices.Clone(controller), "-z"), []string{"-z"}},
		{"a token as a flag", nil, append(slices.Clone(controller), "--oxide-token="+canary), []string{"--oxide-token"}},
		{"a flag without its value", nil, []string{"--endpoint"}, []string{"--endpoint"}},
		{"unknown command", nil, []string{"serve"}, []string{"command line"}},
		{"a token as a command", nil, []string{canary}, []string{"command line"}},
		{"an argument of a command that takes none", nil, []string{"version", "now"}, []string{"command line"}},
		{"unknown flag of a command", nil, []string{"version", "--bogus"}, []string{"--bogus"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := runPlugin(t, test.environ, test.args...)
			code := 78
			if test.args[0] == "version" { // a command of its own
				code = 2
			}
			found := problems(t, got, code)
			flags := make([]string, 0, len(found))
			for flag := range found {
				flags = append(flags, flag)
			}
			slices.Sort(flags)
			if diff := cmp.Diff(test.flags, flags); diff != "" {
				t.Errorf("problems (-want +got):\n%s\n%s", diff, got.stderr)
			}
		})
	}
	if _, err := os.Stat(filepath.Join(dir, "csi.sock")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a socket was created: %v", err)
	}
}

// Without mode and endpoint the plugin shows its help, then what is missing. A mode or an endpoint from any source, or
// one that is wrong, is a configuration: then only its problems are shown.
func TestHelpWithoutConfiguration(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.yaml")
	must(t, os.WriteFile(file, []byte("mode: node\n"), 0o600))
	for _, test := range []struct {
		name    string
		environ []string
		args    []string
		help    bool
	}{
		{"no settings", nil, nil, true},
		{"other settings", []string{"OXIDE_PROJECT=demo"}, []string{"--max-disks=8"}, true},
		{"empty settings", []string{"OXIDE_CSI_MODE=", "CSI_ENDPOINT="}, nil, true},
		{"a mode in the environment", []string{"OXIDE_CSI_MODE=node"}, nil, false},
		{"an endpoint in the environment", []string{"CSI_ENDPOINT=/x"}, nil, false},
		{"a mode in the file", nil, []string{"--config=" + file}, false},
		{"a wrong mode", nil, []string{"--mode=both"}, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := runPlugin(t, test.environ, test.args...)
			if got.code != 78 || got.stdout != "" || strings.Contains(got.stderr, "Usage:") != test.help {
				t.Errorf("%+v", got)
			}
			if !strings.Contains(got.stderr, "\nconfig: --") && !strings.HasPrefix(got.stderr, "config: --") {
				t.Errorf("no problem is named: %s", got.stderr)
			}
		})
	}
}

// A node ignores the settings of the rack's API in its environment, and never shows the token.
func TestNodeIgnoresRackSettings(t *testing.T) {
	dir := shortDir(t)
	got := runPlugin(
		t,
		[]string{
			"OXIDE_HOST=not a host",
			"OXIDE_TOKEN=" + canary,
			"OXIDE_PROJECT=-",
			"OXIDE_CSI_PLUGIN_SERVICE_HOST=10.0.0.1",
		},
		"--endpoint="+filepath.Join(
			dir,
			"missing",
			"csi.sock",
		),
		"--mode=node",
		"--instance-id=6f3a1c9e-2b7d-4e58-9a41-0d5c8e7f1a23",
	)
	// The only error is the missing folder of the socket.
	if got.code != 1 || !strings.Contains(got.stderr, "directory exists") {
		t.Errorf("%+v", got)
	}
	if strings.Count(got.stderr, "OXIDE_CSI_PLUGIN_SERVICE_HOST") != 1 {
		t.Errorf("want one warning about the unknown variable: %s", got.stderr)
	}
	lines := strings.Split(strings.TrimSpace(got.stderr), "\n")
	if last := lines[len(lines)-1]; !strings.HasPrefix(last, "oxide-csi: ") {
		t.Errorf("the last line is %q", last)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// shortDir creates a folder with a short path, because the path of a socket has at most 107 bytes.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "oxc")
	must(t, err)
	t.Cleanup(func() { must(t, os.RemoveAll(dir)) })
	return dir
}

// within returns a context that ends after the limit.
func within(t *testing.T, limit time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	t.Cleanup(cancel)
	return ctx
}

// process is a plugin that the test does not expect to become ready.
type process struct {
	cmd    *exec.Cmd
	stderr *simtest.Output
	ended  chan error
}

// startProcess starts a plugin and does not wait until it is ready.
func startProcess(t *testing.T, args ...string) *process {
	t.Helper()
	p := &process{cmd: exec.Command(programs.Plugin, args...), stderr: &simtest.Output{}, ended: make(chan error, 1)}
	p.cmd.Env = baseEnv()
	p.cmd.Stderr = p.stderr
	must(t, p.cmd.Start())
	go func() { p.ended <- p.cmd.Wait() }()
	return p
}

// wait waits until the process ends, and returns its error. It kills a process that does not end.
func (p *process) wait(t *testing.T) error {
	t.Helper()
	select {
	case err := <-p.ended:
		return err
	case <-time.After(2 * time.Minute):
		must(t, p.cmd.Process.Kill())
		return fmt.Errorf("did not end: %w", <-p.ended)
	}
}
