// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package config

import (
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"
)

// problemsOf returns the lines of an error of Load. It replaces names of files, which differ in every run, by FILE.
func problemsOf(t *testing.T, err error, files ...string) []string {
	t.Helper()
	if err == nil {
		return nil
	}
	var problems Problems
	if !errors.As(err, &problems) || len(problems) == 0 {
		t.Fatalf("the error is not a Problems: %v", err)
	}
	var lines []string
	for _, p := range problems {
		line := p.String()
		if strings.ContainsAny(line, "\n\r") {
			t.Errorf("not one line: %q", line)
		}
		for _, file := range files {
			line = strings.ReplaceAll(line, file, "FILE")
		}
		lines = append(lines, line)
	}
	return lines
}

func TestProblemsOfOneSetting(t *testing.T) {
	long := "/" + strings.Repeat("s", 107)
	for _, tt := range []struct {
		args string // replaces the same flag of complete
		want string
	}{
		{"--endpoint=", "config: --endpoint: is required; set --endpoint or CSI_ENDPOINT"},
		{"--endpoint=tcp://127.0.0.1:10000", `config: --endpoint: "tcp://127.0.0.1:10000" is not a unix socket; write unix:///csi/csi.sock`},
		{"--endpoint=tcp:127.0.0.1:10000", `config: --endpoint: "tcp:127.0.0.1:10000" is not an absolute path; write one such as unix:///csi/csi.sock`},
		{"--endpoint=csi.sock", `config: --endpoint: "csi.sock" is not an absolute path; write one such as unix:///csi/csi.sock`},
		{"--endpoint=unix://./csi.sock", `config: --endpoint: "unix://./csi.sock" is relative; write the whole path, such as unix:///csi/csi.sock`},
		{"--endpoint=unix:///csi/", `config: --endpoint: "unix:///csi/" names a directory; name the socket in it, such as unix:///csi/csi.sock`},
		{"--endpoint=unix://", `config: --endpoint: "unix://" names a directory; name the socket in it, such as unix:///csi/csi.sock`},
		{"--endpoint=" + long, "config: --endpoint: the path has 108 bytes, more than the limit of 107; use a shorter path"},
		{"--endpoint=/a\x00b", `config: --endpoint: "/a\x00b" holds a NUL byte`},
		{"--mode=", "config: --mode: is required; set --mode or OXIDE_CSI_MODE to controller, node or all"},
		{"--mode=nod", `config: --mode: "nod" is not one of controller, node, all`},
		{"--oxide-host=", "config: --oxide-host: is required in modes controller and all; set --oxide-host or OXIDE_HOST"},
		{"--oxide-host=https://rack.example.com/v1", `config: --oxide-host: "https://rack.example.com/v1" has more than a host and a port; write https://name or https://name:port`},
		{"--oxide-host=rack?x=1", `config: --oxide-host: "rack?x=1" has more than a host and a port; write https://name or https://name:port`},
		{"--oxide-host=https://me:hunter2@rack", "config: --oxide-host: must not hold a user or password; access comes from the token"},
		{"--oxide-host=me:hun/ter2@rack", "config: --oxide-host: must not hold a user or password; access comes from the token"},
		{"--oxide-host=ftp://rack", `config: --oxide-host: "ftp://rack" is not an https URL`},
		{"--oxide-host=https://", `config: --oxide-host: "https://" names no host; write https://name or https://name:port`},
		{"--oxide-host=rack:99999", `config: --oxide-host: "rack:99999" names no host; write https://name or https://name:port`},
		{"--oxide-host=rack:", `config: --oxide-host: "rack:" names no host; write https://name or https://name:port`},
		{"--oxide-project=", "config: --oxide-project: is required in modes controller and all; set --oxide-project or OXIDE_PROJECT"},
		{"--oxide-project=My/Project", `config: --oxide-project: "My/Project" is neither an Oxide name (a-z, 0-9 and '-', beginning with a letter, at most 63) nor an ID`},
		{"--oxide-token-file=/none/token", "config: --oxide-token-file: open /none/token: no such file or directory; name a file that holds the API token and that the plugin may read"},
		{"--oxide-token-file=/dev/null", "config: --oxide-token-file: /dev/null is not a regular file; name a file that holds the API token and that the plugin may read"},
		{"--cluster-id=", "config: --cluster-id: is required in modes controller and all; set --cluster-id or OXIDE_CSI_CLUSTER_ID"},
		{"--cluster-id=oxide-token-abc", "config: --cluster-id: looks like an API token, which is a secret: a name belongs here"},
		{"--oxide-project=Oxide-Token-abc", "config: --oxide-project: looks like an API token, which is a secret: a name belongs here"},
		{"--oxide-host=oxide-token-abc", "config: --oxide-host: looks like an API token, which is a secret: a name belongs here"},
		{"--oxide-host=https://oxide-token-abc:443", "config: --oxide-host: looks like an API token, which is a secret: a name belongs here"},
		{"--endpoint=unix://oxide-token-abc", "config: --endpoint: looks like an API token, which is a secret: a name belongs here"},
		{"--node-name=oxide-token-abc", "config: --node-name: looks like an API token, which is a secret: a name belongs here"},
		{"--rack-label=example.com/oxide-token-abc", "config: --rack-label: looks like an API token, which is a secret: a name belongs here"},
		{"--startup-taint=oxide-token-abc", "config: --startup-taint: looks like an API token, which is a secret: a name belongs here"},
		{"--log-format=oxide-token-abc", "config: --log-format: looks like an API token, which is a secret: a name belongs here"},
		{"--rack=oxide-token-abc", "config: --rack: looks like an API token, which is a secret: a name belongs here"},
		{"--cluster-id=Prod", `config: --cluster-id: "Prod" is not 1 to 63 of a-z, 0-9 and '-'`},
		{"--cluster-id=" + strings.Repeat("c", 64), `config: --cluster-id: "` + strings.Repeat("c", 64) + `" is not 1 to 63 of a-z, 0-9 and '-'`},
		{"--rack=", "config: --rack: the rack name is empty"},
		{"--rack=${meta.oxide.rack}", `config: --rack: the rack name is "${meta.oxide.rack}", a template that the orchestrator did not fill in`},
		{"--rack=a/b", `config: --rack: the rack name "a/b" is not 1 to 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends`},
		{"--attach-mode=restart", `config: --restart-shutdown: "guest" needs Kubernetes or Nomad to reach the nodes; run under one of them, or use hard, which cuts the power`},
		{"--restart-shutdown=soft", `config: --restart-shutdown: "soft" is not one of guest, drain, hard`},
		{"--restart-window=61s", "config: --restart-window: 1m1s is not between 0s and 1m0s"},
		{"--restart-max-down=0", "config: --restart-max-down: 0 is not between 1 and 16"},
		{"--restart-max-down=17", "config: --restart-max-down: 17 is not between 1 and 16"},
		{"--restart-cool-down=25h", "config: --restart-cool-down: 25h0m0s is not between 0s and 24h0m0s"},
		{"--restart-halt-timeout=0s", "config: --restart-halt-timeout: 0s is not between 1s and 1h0m0s"},
		{"--restart-wait=11m", "config: --restart-wait: 11m0s is not between 0s and 10m0s"},
		{"--restart-hours=Sat", `config: --restart-hours: "Sat" has no time after it, such as 01:00-05:00`},
		{"--restart-hours=Sat 1:00-5:00", `config: --restart-hours: "1:00-5:00" is not a time; write it as in 22:00-04:00`},
		{"--restart-hours=24:00-05:00 Sat", `config: --restart-hours: "24:00-05:00" is not a day or days; write them as in Mon-Fri,Sun`},
		{"--restart-hours=Sat 01:00-05:00 UTC", `config: --restart-hours: "Sat 01:00-05:00 UTC" is not days and a time, such as Sat,Sun 01:00-05:00`},
		{"--attach-mode=plan", `config: --attach-mode: "plan" is not one of hot, restart`},
		{"--restart-poweroff=SIGUSR2", `config: --restart-poweroff: "SIGUSR2" is neither systemd nor signal:NAME with a signal such as SIGUSR2 or SIGRTMIN+4`},
		{"--restart-poweroff=signal:", `config: --restart-poweroff: "signal:" is neither systemd nor signal:NAME with a signal such as SIGUSR2 or SIGRTMIN+4`},
		{"--max-disks=1", "config: --max-disks: 1 is not between 2 and 64"},
		{"--max-disks=65", "config: --max-disks: 65 is not between 2 and 64"},
		{"--max-disks=eight", `config: --max-disks: "eight" is not a whole number`},
		{"--max-disks=", `config: --max-disks: "" is not a whole number`},
		{"--max-disks=8.0", `config: --max-disks: "8.0" is not a whole number`},
		{"--reserve-disks=-1", "config: --reserve-disks: -1 is not between 0 and 6: of --max-disks 8, one is the boot disk and one must be left for a volume"},
		{"--reserve-disks=7", "config: --reserve-disks: 7 is not between 0 and 6: of --max-disks 8, one is the boot disk and one must be left for a volume"},
		{"--metadata=kubernetes", "config: --node-name: is required with --metadata=kubernetes; set OXIDE_CSI_NODE_NAME from spec.nodeName by the downward API"},
		{"--metadata=none", "config: --metadata: none is only for mode controller: a node must know its instance; use auto"},
		{"--metadata=aws", `config: --metadata: "aws" is not one of auto, static, guest, kubernetes, nomad, none`},
		{"--node-name=$(NODE_NAME)", `config: --node-name: "$(NODE_NAME)" is not the name of a Kubernetes Node (a-z, 0-9, '-' and '.')`},
		{"--rack-label=a/b/c", `config: --rack-label: "a/b/c" is not the name of a Kubernetes label, such as example.com/rack`},
		{"--instance-id=${meta.oxide.instance_id}", `config: --instance-id: the instance ID is "${meta.oxide.instance_id}", a template that the orchestrator did not fill in`},
		{"--instance-id=node-a", `config: --instance-id: the instance ID "node-a" is not a UUID`},
		{"--startup-taint=a/b/c", `config: --startup-taint: "a/b/c" is not the key of a taint, such as csi.oxide.computer/agent-not-ready`},
		{"--startup-taint=csi.oxide.computer/agent-not-ready", "config: --startup-taint: needs the Node's name; set OXIDE_CSI_NODE_NAME from spec.nodeName by the downward API"},
		{"--http-endpoint=9808", `config: --http-endpoint: "9808" is not host:port; write 127.0.0.1:9808, or :9808 for every address`},
		{"--http-endpoint=:http", `config: --http-endpoint: ":http" is not host:port; write 127.0.0.1:9808, or :9808 for every address`},
		{"--http-endpoint=:65536", `config: --http-endpoint: ":65536" is not host:port; write 127.0.0.1:9808, or :9808 for every address`},
		{"--pprof", "config: --pprof: needs --http-endpoint"},
		{"--pprof=yes", `config: --pprof: "yes" is neither true nor false`},
		{"--state-dir=state", `config: --state-dir: "state" is not an absolute path`},
		{"--state-dir=", `config: --state-dir: "" is not an absolute path`},
		{"--luks-memory=5GiB", `config: --luks-memory: 5GiB is not between 1MiB and 4GiB`},
		{"--luks-memory=64KiB", `config: --luks-memory: 64KiB is not between 1MiB and 4GiB`},
		{"--blank-scan-limit=32", `config: --blank-scan-limit: "32" is not a size: write a whole number with a unit, such as 20GiB, 20Gi or 20G`},
		{"--blank-scan-limit=-1", `config: --blank-scan-limit: "-1" is not a size: write a whole number with a unit, such as 20GiB, 20Gi or 20G`},
		{"--device-timeout=60", `config: --device-timeout: "60" is not a duration; write a number and a unit such as 60s or 5m`},
		{"--device-timeout=0s", "config: --device-timeout: 0s is not positive"},
		{"--detach-grace=-1s", "config: --detach-grace: -1s is negative"},
		{"--log-level=verbose", `config: --log-level: "verbose" is not one of debug, info, warn, error`},
		{"--log-format=xml", `config: --log-format: "xml" is not one of text, json`},
		{"--dev-root=dev", `config: --dev-root: "dev" is not an absolute path`},
		{"--sys-root=", `config: --sys-root: "" is not an absolute path`},
	} {
		t.Run(tt.args, func(t *testing.T) {
			flag, _, _ := strings.Cut(strings.TrimPrefix(tt.args, "--"), "=")
			_, _, err := load(t, append(without(complete, flag), tt.args), tokenEnv, "")
			if diff := cmp.Diff([]string{tt.want}, problemsOf(t, err)); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

func TestKubeletRegistration(t *testing.T) {
	in := func(dir string) []string { return append(slices.Clone(complete), "--kubelet-registration-dir="+dir) }
	longest := "/" + strings.Repeat("r", 78)
	for _, tt := range []struct {
		name       string
		args       []string
		socket     string
		wantErrors []string
	}{
		{"none", complete, "", nil},
		{"a folder", in("/registration/"), "/registration/csi.oxide.computer-reg.sock", nil},
		{"the longest folder", in(longest), longest + "/csi.oxide.computer-reg.sock", nil},
		{"a folder too long", in(longest + "r"), "", []string{"config: --kubelet-registration-dir: the path of the socket in it has 108 bytes, more than the limit of 107; use a shorter path"}},
		{"a relative folder", in("registration"), "", []string{`config: --kubelet-registration-dir: "registration" is not an absolute path`}},
		{"a controller", append(in("/registration"), "--mode=controller"), "", nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, _, err := load(t, tt.args, tokenEnv, "")
			if diff := cmp.Diff(tt.wantErrors, problemsOf(t, err)); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
			if got := c.KubeletSocket(); got != tt.socket {
				t.Errorf("socket %q, want %q", got, tt.socket)
			}
		})
	}
}

// --metadata=none is for a controller outside the rack. No other setting may then name an instance.
func TestControllerOutsideTheRack(t *testing.T) {
	args := append(without(without(complete, "instance-id"), "mode"), "--mode=controller", "--metadata=none")
	if _, _, err := load(t, args, tokenEnv, ""); err != nil {
		t.Error(err)
	}
	want := []string{
		"config: --metadata: none cannot be combined with --instance-id (OXIDE_INSTANCE_ID) or --metadata-file (OXIDE_CSI_METADATA_FILE); remove one of them",
	}
	for _, other := range []string{"--instance-id=" + instanceA, "--metadata-file=/run/id.env"} {
		_, _, err := load(t, append(slices.Clone(args), other), tokenEnv, "")
		if diff := cmp.Diff(want, problemsOf(t, err)); diff != "" {
			t.Errorf("%s: -want +got:\n%s", other, diff)
		}
	}
}

func TestStaticNeedsAnIdentity(t *testing.T) {
	args := append(without(complete, "instance-id"), "--metadata=static")
	_, _, err := load(t, args, tokenEnv, "")
	want := []string{
		"config: --metadata: static needs --instance-id (OXIDE_INSTANCE_ID) or --metadata-file (OXIDE_CSI_METADATA_FILE); set one of them, or use auto",
	}
	if diff := cmp.Diff(want, problemsOf(t, err)); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if _, _, err := load(t, append(args, "--mode=controller"), tokenEnv, ""); err != nil {
		t.Errorf("a controller needs no identity: %v", err)
	}
}

func TestProblemsOfTheEnvironmentAndFileSayWhere(t *testing.T) {
	yaml := "# first\nlogLevel: loud\ncluster-id: x\nclusterid: y\nracks: {}\nmaxDisks: [8]\nnodeName: a\nnodeName: b\noxideToken: " + token + "\nconfig: /x\n"
	file := write(t, yaml)
	environ := append(
		[]string{"OXIDE_CSI_CONFIG=" + file, "OXIDE_CSI_DEVICE_TIMEOUT=soon", "OXIDE_CSI_LOG_FORMAT=xml"},
		tokenEnv...)
	_, _, err := load(t, complete, environ, "")
	want := []string{
		`config: --config: FILE line 3: unknown key "cluster-id"; it is written "clusterID"`,
		`config: --config: FILE line 4: unknown key "clusterid"; it is written "clusterID"`,
		`config: racks: FILE line 5: must be a list of {name, host, tokenFile, project, caFile}`,
		`config: --config: FILE line 6: maxDisks must be a single value`,
		`config: --config: FILE line 8: key "nodeName" is on line 7 already`,
		`config: --config: FILE line 9: unknown key "oxideToken"`,
		`config: --config: FILE line 10: unknown key "config"`,
		`config: --device-timeout: "soon" is not a duration; write a number and a unit such as 60s or 5m (set by OXIDE_CSI_DEVICE_TIMEOUT)`,
		`config: --log-level: "loud" is not one of debug, info, warn, error (set by FILE line 2)`,
		`config: --log-format: "xml" is not one of text, json (set by OXIDE_CSI_LOG_FORMAT)`,
	}
	if diff := cmp.Diff(want, problemsOf(t, err, file)); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestInvalidFiles(t *testing.T) {
	dir := t.TempDir()
	for name, tt := range map[string]struct{ yaml, want string }{
		"a list":         {"- a\n", `FILE is not a YAML file of settings: line 1 is not "key: value"`},
		"a word":         {"hello\n", `FILE is not a YAML file of settings: line 1 is not "key: value"`},
		"not YAML":       {"a: b: c\n", "FILE is not a YAML file of settings: yaml: mapping values are not allowed in this context"},
		"two documents":  {"mode: all\n---\nmode: node\n", "FILE is not a YAML file of settings: it holds a second document at line 2"},
		"bad at the end": {"mode: all\n---\n\t", "FILE is not a YAML file of settings: yaml: line 3: found character that cannot start any token"},
		"huge":           {strings.Repeat("# nothing\n", 200000), "FILE is larger than 1048576 bytes; name a YAML file that the plugin may read"},
		"merge key":      {"a: &a {mode: all}\n<<: *a\n", `FILE line 1: unknown key "a"` + "\n" + `config: --config: FILE line 2: unknown key "<<"`},
		"rack entries":   {"racks: [7]\n", "must be {name, host, tokenFile, project, caFile}"},
	} {
		t.Run(name, func(t *testing.T) {
			file := write(t, tt.yaml)
			_, _, err := load(t, append(complete, "--config="+file), tokenEnv, "")
			if got := strings.Join(problemsOf(t, err, file), "\n"); !strings.Contains(got, tt.want) {
				t.Errorf("got %s\nwant %s", got, tt.want)
			}
		})
	}
	_, _, err := load(t, append(complete, "--config="+dir), tokenEnv, "")
	if got := problemsOf(
		t,
		err,
		dir,
	); len(got) != 1 ||
		got[0] != "config: --config: FILE is not a regular file; name a YAML file that the plugin may read" {
		t.Errorf("a directory: %q", got)
	}
	for _, empty := range []string{"# nothing\n", "---\n", "~\n", "{}\n"} {
		if _, _, err := load(t, complete, tokenEnv, empty); err != nil {
			t.Errorf("%q: %v", empty, err)
		}
	}
	anchors := "logFormat: &f json\nnodeName: *f\n"
	if c, _, err := load(t, complete, tokenEnv, anchors); err != nil || c.NodeName != "json" {
		t.Errorf("%q: %q, %v", anchors, c.NodeName, err)
	}
}

func TestProblemsOfRacks(t *testing.T) {
	good, bad := write(t, token), write(t, "hunter2")
	entry := func(name string) string {
		return fmt.Sprintf("- {name: %s, host: h, tokenFile: %s, project: p}\n", name, good)
	}
	other := func(name, host string) string {
		return fmt.Sprintf("- {name: %s, host: '%s', tokenFile: %s, project: p}\n", name, host, good)
	}
	base := []string{"--endpoint=/csi/csi.sock", "--mode=all", "--cluster-id=c1", "--instance-id=" + instanceA}
	for name, tt := range map[string]struct {
		args, environ []string
		racks         string
		want          []string
	}{
		"same name": {racks: entry("a") + other("b", "i") + other("a", "j"), want: []string{
			`config: racks[2].name: "a" is the name of racks[0] too; names tell racks apart in the topology`,
		}},
		"same rack": {racks: entry("a") + other("b", "i") + other("c", "https://h/"), want: []string{
			`config: racks[2].project: is "p" on https://h, which racks[0] has already; leave one of the two`,
		}},
		"problems of two racks": {racks: entry("a") + "- {name: b, host: h h, tokenFile: " + bad + "}\n" + "- {host: j, tokenFile: " + good + ", project: p, caFile: " + good + "}\n", want: []string{
			`config: racks[1].host: "h h" names no host; write https://name or https://name:port`,
			"config: racks[1].tokenFile: FILE holds no API token: one begins with oxide-token-",
			"config: racks[1].project: is required; set the name or ID of the project that holds the disks",
			"config: racks[2].name: the rack name is empty",
			"config: racks[2].caFile: GOOD holds no certificate; write the CA's certificates in PEM, which begin with -----BEGIN CERTIFICATE-----",
		}},
		"empty entry": {racks: "- {}\n", want: []string{
			"config: racks[0].name: the rack name is empty",
			"config: racks[0].host: is required; write https://name",
			"config: racks[0].tokenFile: is required; name the file with this rack's API token",
			"config: racks[0].project: is required; set the name or ID of the project that holds the disks",
		}},
		"four problems": {racks: "- {name: a/b, host: 'ftp://h', tokenFile: " + bad + ", project: P}\n", want: []string{
			`config: racks[0].name: the rack name "a/b" is not 1 to 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends`,
			`config: racks[0].host: "ftp://h" is not an https URL`,
			"config: racks[0].tokenFile: FILE holds no API token: one begins with oxide-token-",
			`config: racks[0].project: "P" is neither an Oxide name (a-z, 0-9 and '-', beginning with a letter, at most 63) nor an ID`,
		}},
		"unknown keys": {racks: "- {name: a, host: h, token-file: x, tokenFile: " + good + ", project: p, colour: red}\n", want: []string{
			`config: --config: CONFIG line 2: unknown key "racks[0].token-file"; it is written "racks[0].tokenFile"`,
			`config: --config: CONFIG line 2: unknown key "racks[0].colour"`,
		}},
		"with the settings of one rack": {
			args: []string{"--oxide-project=p", "--oxide-ca-file=/none"}, environ: []string{"OXIDE_HOST=h", "OXIDE_TOKEN_FILE=" + good}, racks: entry("a"), want: []string{
				"config: --oxide-host: cannot be combined with racks in the file; remove one of the two (set by OXIDE_HOST)",
				"config: --oxide-token-file: cannot be combined with racks in the file; remove one of the two (set by OXIDE_TOKEN_FILE)",
				"config: --oxide-project: cannot be combined with racks in the file; remove one of the two",
				"config: --oxide-ca-file: cannot be combined with racks in the file; remove one of the two",
			},
		},
		"another rack's name": {args: []string{"--rack=b"}, racks: entry("a"), want: []string{
			`config: --rack: "b" is not the name of any entry of racks`,
		}},
	} {
		t.Run(name, func(t *testing.T) {
			file := write(t, "racks:\n"+tt.racks)
			_, _, err := load(t, append(append(tt.args, base...), "--config="+file), tt.environ, "")
			got := problemsOf(t, err, bad)
			for i := range got {
				got[i] = strings.ReplaceAll(strings.ReplaceAll(got[i], file, "CONFIG"), good, "GOOD")
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

func TestNothingConfigured(t *testing.T) {
	for mode, want := range map[string][]string{
		"controller": {"--endpoint", "--oxide-host", "--oxide-project", "--oxide-token-file", "--cluster-id"},
		"all":        {"--endpoint", "--oxide-host", "--oxide-project", "--oxide-token-file", "--cluster-id"},
		"node":       {"--endpoint"},
		"":           {"--mode", "--endpoint", "--oxide-host", "--oxide-project", "--oxide-token-file", "--cluster-id"},
		"everything": {"--mode", "--endpoint", "--oxide-host", "--oxide-project", "--oxide-token-file", "--cluster-id"},
	} {
		config, _, err := load(t, []string{"--mode=" + mode}, nil, "")
		var got []string
		var problems Problems
		if errors.As(err, &problems) {
			for _, p := range problems {
				got = append(got, p.Flag)
			}
		}
		if diff := cmp.Diff(want, got); diff != "" || !cmp.Equal(config, Config{}) {
			t.Errorf("mode %s: -want +got:\n%s", mode, diff)
		}
	}
}

// One error of Load has a problem for each invalid setting, from all sources.
func TestAllProblemsAtOnce(t *testing.T) {
	environ := []string{
		"CSI_ENDPOINT=tcp://x", "OXIDE_HOST=ftp://x", "OXIDE_PROJECT=/", "OXIDE_TOKEN=hunter2", "OXIDE_CSI_CLUSTER_ID=_",
		"OXIDE_CSI_CA_FILE=/none", "OXIDE_RACK=-", "OXIDE_CSI_ATTACH_MODE=cold", "OXIDE_CSI_MAX_DISKS=eight",
	}
	args := []string{
		"--mode=x",
		"--metadata=aws",
		"--instance-id=x",
		"--node-name=-",
		"--rack-label=-",
		"--reserve-disks=x",
		"--kubelet-registration-dir=x",
		"--startup-taint=-",
		"--restart-poweroff=x",
		"--boot-id-file=x",
		"--restart-shutdown=x",
		"--restart-window=x",
		"--restart-max-down=x",
		"--restart-cool-down=x",
		"--restart-halt-timeout=x",
		"--restart-wait=x",
		"--restart-hours=x",
		"--http-endpoint=x",
		"--pprof=x",
		"--state-dir=x",
		"--luks-memory=x",
		"--blank-scan-limit=x",
	}
	yaml := "deviceTimeout: x\ndetachGrace: x\nlogLevel: x\nlogFormat: x\ndevRoot: x\nsysRoot: x\nunknown: x\n"
	_, _, err := load(t, args, environ, yaml)
	got := strings.Join(problemsOf(t, err), "\n")
	for _, s := range settings() {
		switch s.flag {
		case "", "metadata-file", "kubeconfig", "nomad-token-file":
			continue // Load does not check these, because the file may appear later
		}
		if n := strings.Count("\n"+got, "\nconfig: --"+s.flag+": "); n != 1 {
			t.Errorf("--%s is named in %d lines, want one", s.flag, n)
		}
	}
	if t.Failed() {
		t.Log(got)
	}
}

func TestCAFiles(t *testing.T) {
	der, certificate := testCA(t)
	key := "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"
	for name, tt := range map[string]struct {
		text string
		// want is the beginning of the error after the file's name. If it is empty, the CA is in the pool.
		want string
	}{
		"one certificate": {string(certificate), ""},
		"among others":    {"# ours\n" + key + string(certificate) + "trailing\n", ""},
		"empty":           {"", " holds no certificate"},
		"a key":           {key, " holds no certificate"},
		"not in PEM":      {string(der), " holds no certificate"},
		"a bad one after": {string(certificate) + "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", ": certificate 2: x509: "},
		"too large":       {strings.Repeat("x", maxCABytes+1), " is larger than 1048576 bytes"},
	} {
		file := write(t, tt.text)
		pool, err := ReadCAs(file)
		if tt.want != "" {
			if err == nil || !strings.HasPrefix(err.Error(), file+tt.want) || pool != nil {
				t.Errorf("%s: error %v, want %s", name, err, tt.want)
			}
			continue
		}
		want := x509.NewCertPool()
		want.AppendCertsFromPEM(certificate)
		if err != nil || !pool.Equal(want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if pool, err := ReadCAs(""); pool != nil || err != nil {
		t.Errorf("without a file: %v, %v", pool, err)
	}
	if _, err := ReadCAs(
		filepath.Join(t.TempDir(), "none"),
	); err == nil ||
		!strings.Contains(err.Error(), "name a file with the CA's certificate") {
		t.Errorf("a missing file: %v", err)
	}
}

func TestTokenFiles(t *testing.T) {
	dir := t.TempDir()
	for name, tt := range map[string]struct{ text, want string }{
		"plain":          {token, ""},
		"with a newline": {"  " + token + "\r\n", ""},
		"empty":          {"", "is empty; it must hold an API token"},
		"only space":     {" \n", "is empty; it must hold an API token"},
		"no prefix":      {"hunter2", "holds no API token: one begins with oxide-token-"},
		"prefix only":    {"oxide-token-\n", "holds no API token: one begins with oxide-token-"},
		"two lines":      {token + "\n" + token + "\n", "holds more than an API token: it must be one word of printable ASCII"},
		"not ASCII":      {token + "é", "holds more than an API token: it must be one word of printable ASCII"},
		"too large":      {token + strings.Repeat("x", maxTokenBytes), "is larger than 16384 bytes"},
	} {
		file := filepath.Join(dir, "token")
		if err := os.WriteFile(file, []byte(tt.text), 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := readToken(file)
		if tt.want == "" {
			if err != nil || got.Reveal() != token {
				t.Errorf("%s: %q, %v", name, got.Reveal(), err)
			}
		} else if err == nil || !strings.HasPrefix(err.Error(), file+" "+tt.want) || !got.Empty() {
			t.Errorf("%s: error %v, want %s", name, err, tt.want)
		}
	}
}

func TestCommandLineProblems(t *testing.T) {
	for name, tt := range map[string]struct {
		args []string
		want string
	}{
		"unknown flag":     {[]string{"--max-disk=8"}, "config: --max-disk: unknown flag; see --help"},
		"token by flag":    {[]string{"--oxide-token=" + token}, "config: --oxide-token: unknown flag; see --help"},
		"token as flag":    {[]string{"--" + token}, "config: --(redacted): unknown flag; see --help"},
		"token, one dash":  {[]string{"-" + token}, "config: -o: unknown flag; see --help, flags begin with two dashes"},
		"one dash":         {[]string{"-mode=all"}, "config: -m: unknown flag; see --help, flags begin with two dashes"},
		"value left out":   {[]string{"--mode"}, "config: --mode: needs a value; see --help"},
		"bad syntax":       {[]string{"--=" + token}, "config: command line: bad flag syntax: --=(redacted)"},
		"boolean, no text": {[]string{"--pprof"}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			fs := pflag.NewFlagSet("oxide-csi", pflag.ContinueOnError)
			Flags(fs)
			err := fs.Parse(tt.args)
			if err == nil {
				if tt.want != "" {
					t.Errorf("accepted, want %s", tt.want)
				}
				return
			}
			if got := FlagProblem(err).String(); got != tt.want {
				t.Errorf("got %s, want %s", got, tt.want)
			}
		})
	}
}
