// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main_test

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestMetadataCommand(t *testing.T) {
	const other = "b81d0f42-77c3-4c0a-8e6f-93a5d2b4c716"
	sys := instanceSys(t, instanceID)
	nomad := nomadAgent(t, `"oxide.instance_id": "`+instanceID+`", "oxide.rack": "east"`)
	contradicting := nomadAgent(t, `"oxide.instance_id": "`+other+`"`)
	file := filepath.Join(t.TempDir(), "id.env")
	must(t, os.WriteFile(file, []byte("OXIDE_INSTANCE_ID="+instanceID+"\nOXIDE_RACK=west\n"), 0o600))
	token := "NOMAD_TOKEN=" + canary
	const idLine = "OXIDE_INSTANCE_ID=" + instanceID + "\n"
	for _, test := range []struct {
		name    string
		environ []string
		args    []string
		want    result // its stderr is a part of the expected output
	}{
		{"firmware, by default", nil, []string{"--sys-root=" + sys}, result{stdout: idLine}},
		{"firmware, selected", nil, []string{"--provider=guest", "--sys-root=" + sys}, result{stdout: idLine}},
		{"firmware, with a rack", []string{"OXIDE_RACK=west"}, []string{"--sys-root=" + sys}, result{stdout: idLine + "OXIDE_RACK=west\n"}},
		{"Nomad agent", []string{token, "NOMAD_ADDR=" + nomad.URL}, []string{"--provider=nomad"}, result{stdout: idLine + "OXIDE_RACK=east\n"}},
		{"firmware and Nomad agent", []string{token, "NOMAD_ADDR=" + nomad.URL}, []string{"--sys-root=" + sys}, result{stdout: idLine + "OXIDE_RACK=east\n"}},
		{"Nomad agent on the task API's socket", []string{token, "NOMAD_UNIX_ADDR=unix://" + serveUnix(t, nomad.Config.Handler)}, []string{"--sys-root=" + sys}, result{stdout: idLine + "OXIDE_RACK=east\n"}},
		{"sources contradict each other", []string{token, "NOMAD_ADDR=" + contradicting.URL}, []string{"--sys-root=" + sys}, result{code: 1, stderr: "sources contradict each other"}},
		{"explicit instance ID wins", []string{token, "NOMAD_ADDR=" + nomad.URL, "OXIDE_INSTANCE_ID=" + other}, []string{"--sys-root=" + sys}, result{stdout: "OXIDE_INSTANCE_ID=" + other + "\nOXIDE_RACK=east\n", stderr: "two sources differ about the instance ID"}},
		{"metadata file", []string{"OXIDE_CSI_METADATA_FILE=" + file}, []string{"--provider=static"}, result{stdout: idLine + "OXIDE_RACK=west\n"}},
		{"settings of the rack's API are ignored", []string{"OXIDE_HOST=not a host", "OXIDE_TOKEN=" + canary, "OXIDE_CSI_MODE=controller", "CSI_ENDPOINT=tcp://x"}, []string{"--sys-root=" + sys}, result{stdout: idLine}},

		{"no permission", []string{"NOMAD_ADDR=" + nomad.URL}, []string{"--provider=nomad"}, result{code: 1, stderr: "HTTP 403"}},
		{"no Oxide instance", nil, []string{"--sys-root=" + t.TempDir()}, result{code: 1, stderr: "the firmware tells nothing"}},
		{"no source answers a single attempt", []string{"NOMAD_ADDR=http://127.0.0.1:1"}, []string{"--provider=nomad", "--timeout=0"}, result{code: 3, stderr: "oxide-csi: no source responded: ask the Nomad agent at http://127.0.0.1:1: "}},
		{"no source answers before the timeout", nil, []string{"--provider=static", "--metadata-file=" + file + ".none", "--timeout=300ms"}, result{code: 3, stderr: "oxide-csi: no source responded: wait for " + file + ".none: no such file"}},
		{"invalid settings", nil, []string{"--provider=aws", "--timeout=-1s"}, result{code: 2, stderr: "config: --metadata: "}},
		{"invalid duration", nil, []string{"--timeout=soon"}, result{code: 2, stderr: "--timeout"}},
		{"unexpected argument", nil, []string{"now"}, result{code: 2, stderr: "config: command line: "}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			got := runPlugin(t, test.environ, append([]string{"metadata"}, test.args...)...)
			if got.code != test.want.code || got.stdout != test.want.stdout || !strings.Contains(got.stderr, test.want.stderr) {
				t.Errorf("got %+v, want %+v", got, test.want)
			}
		})
	}
}

func TestMetadataCommandReportsAllProblems(t *testing.T) {
	found := problems(
		t,
		runPlugin(t, nil, "metadata", "--provider=aws", "--timeout=-1s", "--sys-root=sys"),
		2,
	)
	flags := slices.Sorted(maps.Keys(found))
	if diff := cmp.Diff([]string{"--metadata", "--sys-root", "--timeout"}, flags); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// A success replaces the whole file. A failure leaves the file as it was.
func TestMetadataCommandReplacesTheFile(t *testing.T) {
	sys, dir := instanceSys(t, instanceID), t.TempDir()
	output := filepath.Join(dir, "metadata.env")
	for _, args := range [][]string{nil, {"--rack=west"}} {
		got := runPlugin(t, nil, append([]string{"metadata", "--sys-root=" + sys, "--output=" + output}, args...)...)
		info, err := os.Stat(output)
		must(t, err)
		if got.code != 0 || got.stdout != "" || info.Mode() != 0o644 {
			t.Errorf("%v: %+v, mode %s", args, got, info.Mode())
		}
	}
	whole, err := os.ReadFile(output)
	must(t, err)
	if string(whole) != "OXIDE_INSTANCE_ID="+instanceID+"\nOXIDE_RACK=west\n" {
		t.Errorf("the file contains %q", whole)
	}
	// The plugin can read the file.
	if got := runPlugin(t, nil, "metadata", "--provider=static", "--metadata-file="+output); got.stdout != string(whole) {
		t.Errorf("the plugin reads %+v", got)
	}
	folder := filepath.Join(dir, "folder")
	must(t, os.Mkdir(folder, 0o755))
	for name, test := range map[string]struct{ environ, args []string }{
		"no source":   {nil, []string{"--sys-root=" + dir, "--output=" + output}},
		"a folder":    {nil, []string{"--sys-root=" + sys, "--output=" + folder}},
		"no folder":   {nil, []string{"--sys-root=" + sys, "--output=" + filepath.Join(dir, "none", "x")}},
		"not in time": {[]string{"NOMAD_ADDR=http://127.0.0.1:1"}, []string{"--provider=nomad", "--timeout=0", "--output=" + output}},
	} {
		if got := runPlugin(t, test.environ, append([]string{"metadata"}, test.args...)...); got.code == 0 {
			t.Errorf("%s: %+v, want a failure", name, got)
		}
	}
	if text, err := os.ReadFile(output); err != nil || string(text) != string(whole) {
		t.Errorf("after failures the file contains %q, %v", text, err)
	}
	entries, err := os.ReadDir(dir)
	must(t, err)
	if len(entries) != 2 {
		t.Errorf("temporary files are left: %v", entries)
	}
}
