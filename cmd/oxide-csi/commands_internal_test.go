// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/oxidecomputer/oxide-csi-plugin/admin"
)

// eachCommand visits every command that the program declares. Those of completion and help are cobra's.
func eachCommand(t *testing.T, visit func(*cobra.Command)) {
	t.Helper()
	visited := 0
	var walk func(*cobra.Command)
	walk = func(cmd *cobra.Command) {
		visited++
		visit(cmd)
		for _, sub := range cmd.Commands() {
			walk(sub)
		}
	}
	walk(command(nil, io.Discard, io.Discard))
	if visited < 25 {
		t.Fatalf("%d commands were visited", visited)
	}
}

// Each command has examples, which begin with the command itself and name only flags that it has.
func TestEveryCommandHasExamples(t *testing.T) {
	flag := regexp.MustCompile(` --([a-z-]+)`)
	eachCommand(t, func(cmd *cobra.Command) {
		if !strings.Contains(cmd.Example, cmd.CommandPath()) {
			t.Errorf("%s has the examples %q", cmd.CommandPath(), cmd.Example)
		}
		for line := range strings.Lines(cmd.Example) {
			if line != "\n" && !strings.HasPrefix(line, "  ") || len(strings.TrimRight(line, "\n")) > usageWidth+20 {
				t.Errorf("%s: the line %q of the examples", cmd.CommandPath(), line)
			}
			_, own, found := strings.Cut(line, cmd.CommandPath()+" ")
			if !found || strings.ContainsAny(own, "|$") || strings.Contains(own, " -- ") {
				continue
			}
			for _, name := range flag.FindAllStringSubmatch(" "+own, -1) {
				if cmd.Flag(name[1]) == nil && !cmd.HasSubCommands() {
					t.Errorf("%s: the examples have --%s", cmd.CommandPath(), name[1])
				}
			}
		}
	})
}

// Each argument and flag that takes an existing volume, snapshot, orphan or node completes it. Nothing completes files
// where no file is expected.
func TestEveryArgumentIsCompleted(t *testing.T) {
	files := []string{"support-bundle"}
	eachCommand(t, func(cmd *cobra.Command) {
		takesArgument := regexp.MustCompile(`[A-Z]{2,}`).MatchString(cmd.Use)
		if takesArgument && cmd.ValidArgsFunction == nil && !slices.Contains(files, cmd.Name()) {
			t.Errorf("%s completes no argument", cmd.Use)
		}
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			if !regexp.MustCompile(`\b(VOLUME|SNAPSHOT|NODE)\b`).MatchString(f.Usage) {
				return
			}
			if _, has := cmd.GetFlagCompletionFunc(f.Name); !has {
				t.Errorf("%s --%s is not completed", cmd.CommandPath(), f.Name)
			}
		})
	})
}

// No escape sequence reaches the terminal, wherever it comes from.
func TestOutputIsPrintable(t *testing.T) {
	for _, args := range [][]string{{"--no-such-\x1b[2Jflag"}, {"volume", "list", "--socket=/none/\x1b]0;title\a"}} {
		var out, err strings.Builder
		if code := run("oxide-csi", args, nil, &out, &err); code == 0 {
			t.Errorf("%q succeeded", args)
		}
		if text := out.String() + err.String(); text == "" || strings.ContainsAny(text, "\x1b\a") {
			t.Errorf("%q printed %q", args, text)
		}
	}
}

// Words of other programs lead to the command.
func TestSimilarCommandsAreSuggested(t *testing.T) {
	for _, test := range []struct{ args, want string }{
		{"volume ls", "did you mean oxide-csi volume list?"},
		{"volume rm x", "did you mean oxide-csi volume delete?"},
		{"volume remove x", "did you mean oxide-csi volume delete?"},
		{"volume describe x", "did you mean oxide-csi volume show?"},
		{"volume get x", "did you mean oxide-csi volume show?"},
		{"volume umount x", "did you mean oxide-csi volume unmount?"},
		{"volume publish x", "did you mean oxide-csi volume attach?"},
		{"volume lst", "did you mean oxide-csi volume list?"},
		{"volume shrink x", "see oxide-csi volume --help"},
		{"snapshot ls", "did you mean oxide-csi snapshot list?"},
		{"snapshot rm x", "did you mean oxide-csi snapshot delete?"},
		{"volumes", "did you mean oxide-csi volume?"},
		{"snapshots", "did you mean oxide-csi snapshot?"},
		{"explian", "did you mean oxide-csi explain?"},
	} {
		var out, err strings.Builder
		want := admin.ExitUsage
		if !strings.Contains(test.args, " ") {
			want = admin.ExitConfig
		}
		code := run("oxide-csi", strings.Fields(test.args), nil, &out, &err)
		if code != want || out.Len() > 0 || !strings.Contains(err.String(), test.want) {
			t.Errorf("%s: exit code %d, %q", test.args, code, err.String())
		}
	}
	for _, alias := range []string{"resize", "grow", "extend"} {
		var out, err strings.Builder
		if code := run("oxide-csi", []string{"volume", alias, "--help"}, nil, &out, &err); code != 0 ||
			!strings.Contains(out.String(), "oxide-csi volume expand VOLUME") {
			t.Errorf("%s: exit code %d, %q", alias, code, out.String())
		}
	}
}

// A plugin of kubectl uses kubectl's kubeconfig file.
func TestKubectlPluginHasTheKubeconfig(t *testing.T) {
	home := t.TempDir()
	mustWork(t, os.Mkdir(filepath.Join(home, ".kube"), 0o700))
	none := []string{"HOME=" + home}
	if got := withKubeconfig(none); len(got) != 1 {
		t.Errorf("without any: %q", got)
	}
	file := filepath.Join(home, ".kube", "config")
	mustWork(t, os.WriteFile(file, nil, 0o600))
	for want, environ := range map[string][]string{
		file:   none,
		"/one": {"HOME=" + home, "KUBECONFIG=/one:/two"},
		"/own": {"HOME=" + home, "KUBECONFIG=/one", "OXIDE_CSI_KUBECONFIG=/own"},
	} {
		if got := admin.Getenv(withKubeconfig(environ), "OXIDE_CSI_KUBECONFIG"); got != want {
			t.Errorf("%q: %s, want %s", environ, got, want)
		}
	}
}

// As a plugin of kubectl the program names itself so, and serves nothing.
func TestKubectlPlugin(t *testing.T) {
	help := func(args ...string) string {
		t.Helper()
		var out, err strings.Builder
		if code := run("/usr/local/bin/kubectl-oxide", args, nil, &out, &err); code != 0 || err.Len() > 0 {
			t.Errorf("%q: exit code %d, %s", args, code, err.String())
		}
		return out.String()
	}
	for _, test := range []struct {
		args []string
		says []string
	}{
		{nil, []string{"kubectl oxide [command]", "  kubectl oxide explain default/data"}},
		{[]string{"explain", "--help"}, []string{"kubectl oxide explain VOLUME", "  kubectl oxide explain default/data --kubeconfig="}},
		{[]string{"doctor", "--help"}, []string{
			"  kubectl -n oxide-csi exec ds/oxide-csi-node -- /oxide-csi doctor\n", "  kubectl oxide doctor --kubeconfig=",
		}},
		{[]string{"volume", "list", "--help"}, []string{"kubectl oxide volume list [flags]", "  kubectl oxide volume list\n"}},
	} {
		got := help(test.args...)
		for _, says := range test.says {
			if !strings.Contains(got, says) {
				t.Errorf("%q does not say %q:\n%s", test.args, says, got)
			}
		}
		if strings.Contains(got, "  oxide-csi ") || strings.Contains(got, "--oxide-host") && len(test.args) == 0 {
			t.Errorf("%q speaks of oxide-csi:\n%s", test.args, got)
		}
	}
	if got := help("--version"); got != "kubectl oxide version devel\n" {
		t.Errorf("%q", got)
	}
	var out, err strings.Builder
	if code := run("kubectl-oxide", []string{"explian"}, nil, &out, &err); code != admin.ExitConfig ||
		!strings.Contains(err.String(), "did you mean kubectl oxide explain?") {
		t.Errorf("exit code %d, %q", code, err.String())
	}
}
