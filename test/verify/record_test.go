// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package verify_test

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
	"github.com/oxidecomputer/oxide-csi-plugin/test/verify"
)

// secrets replaces words of the simulated rack by secrets, and puts secrets into messages, as a proxy in front of a
// rack may.
var secrets = strings.NewReplacer(
	`"silo_name":"sim"`,
	`"silo_name":"geheim-silo"`,
	`"display_name":"collaborator"`,
	`"display_name":"Erika Geheim"`,
	`"description":"simulated"`,
	`"description":"the geheim database"`,
	`disk is attached to another instance`,
	`disk of erika@geheim.example is attached to another instance at geheim.example:443 `+
		`(10.20.30.40, fd00:1122::1:2, geheim-silo), seen with `+token,
)

// The planted secrets, and what any secret of these kinds looks like.
var secret = regexp.MustCompile(
	`(?i)geheim|erika|oxide-token-|10\.20\.30|fd00:|[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-|rack\.invalid`,
)

// TestARecordingHasNoSecrets plants secrets in all that the rack answers, and in the options.
func TestARecordingHasNoSecrets(t *testing.T) {
	t.Parallel()
	w := newWorld(t, simrack.Options{Project: "geheim-project", Instances: []string{"geheim-node"}})
	api := w.rack.API()
	w.wire = http.HandlerFunc(func(out http.ResponseWriter, req *http.Request) {
		answer := httptest.NewRecorder()
		api.ServeHTTP(answer, req)
		out.WriteHeader(answer.Code)
		_, _ = out.Write([]byte(secrets.Replace(answer.Body.String())))
	})
	var recording, said bytes.Buffer
	r := w.run(func(o *verify.Options) {
		o.Project, o.EmptyProject, o.Instance, o.Record, o.Progress = "geheim-project", "geheim-project", "geheim-node", &recording, &said
		o.GuestCommand = "echo geheim-error >&2; exit 1"
		o.Wait = 100_000_000 // of a guest that cannot be looked into
	})
	if got := result(t, r, "A3"); got.Outcome != verify.Different || !strings.Contains(got.Seen, "address-") {
		t.Errorf("the planted message is not in the report: %+v", got)
	}
	if !strings.Contains(said.String(), "geheim-error") {
		t.Error("the user does not see the error of --guest-command")
	}
	var report strings.Builder
	r.Markdown(&report)
	asJSON, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"recording": recording.String(), "report": report.String(), "JSON": string(asJSON)} {
		for line := range strings.Lines(strings.ReplaceAll(text, "00000000-1111-4222-8333-444444444444", "")) {
			if found := secret.FindString(line); found != "" {
				t.Errorf("%s: %q is in %s", name, found, line)
			}
		}
	}
	// What a maintainer needs is there.
	for _, want := range []string{
		`"contains":"the requests of one run`, `"name":"csi-verify-d"`, `"state":"attached"`, "cannot attach disk: instance is not fully stopped",
	} {
		if !strings.Contains(recording.String(), want) {
			t.Errorf("the recording lacks %s", want)
		}
	}
}

// A reason why the run could not begin has no secrets in the report either. The user sees it whole.
func TestAProblemHasNoSecrets(t *testing.T) {
	t.Parallel()
	w := newWorld(t, simrack.Options{Instances: []string{"geheim-node"}})
	w.hook = func(n int, _ *http.Request, serve func() *http.Response) (*http.Response, error) {
		if n == 1 {
			return nil, errors.New("certificate is valid for geheim.example")
		}
		return serve(), nil
	}
	var said strings.Builder
	r := w.run(func(o *verify.Options) { o.Progress = &said })
	if !strings.Contains(said.String(), "instance geheim-node") || secret.MatchString(r.Problem) || r.Problem == "" {
		t.Errorf("said %s, problem %s", said.String(), r.Problem)
	}
}

// recorded is a recording of a run on the simulated rack with the settings that another recording tells.
func recorded(t *testing.T, report *verify.Report, rewrite func(http.Handler) http.Handler) verify.Recording {
	t.Helper()
	w := newWorld(t, simrack.Options{
		APIVersionMax: report.Rack.APIVersion, Hotplug: report.Rack.Hotplug == "yes", QuotaBytes: report.Rack.QuotaBytes,
	})
	if rewrite != nil {
		w.wire = rewrite(w.rack.API())
	}
	var out bytes.Buffer
	w.run(func(o *verify.Options) { o.Record = &out })
	rec, err := verify.ReadRecording(&out)
	if err != nil {
		t.Fatal(err)
	}
	return rec
}

// TestTheSimulatedRackAnswersAsRecorded compares the simulated rack with the recordings in testdata, case by case. A
// maintainer who gets a recording of a real rack puts it there.
func TestTheSimulatedRackAnswersAsRecorded(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("testdata/*.jsonl")
	if err != nil || len(files) == 0 {
		t.Fatal("no recording was found", err)
	}
	for _, path := range files {
		t.Run(filepath.Base(path), func(t *testing.T) {
			file, err := os.Open(path)
			if err != nil {
				t.Fatal(err)
			}
			defer file.Close()
			want, err := verify.ReadRecording(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, difference := range want.Differences(recorded(t, want.Report, nil)) {
				t.Error(difference)
			}
		})
	}
}

// Two recordings of the same rack do not differ. One answer that differs is found, with its case.
func TestRecordingsAreCompared(t *testing.T) {
	t.Parallel()
	plain := &verify.Report{Rack: verify.RackFacts{APIVersion: "2026060800.0.0"}}
	want := recorded(t, plain, nil)
	if got := want.Differences(recorded(t, plain, nil)); len(got) > 0 {
		t.Errorf("the same rack differs: %q", got)
	}
	for name, c := range map[string]change{
		"a message": {request: "/attach$", old: "another instance", new: "an instance", id: "A3, request 1"},
		"a status":  {request: "DELETE /v1/disks/", old: "cannot be deleted", status: 409, id: "X3, request 1"},
		"a field":   {request: "GET /v1/disks/", old: `"read_only"`, new: `"readonly"`, id: "D1, request 2"},
	} {
		got := want.Differences(recorded(t, plain, c.rewrite))
		if len(got) == 0 || !strings.Contains(strings.Join(got, "\n"), c.id) {
			t.Errorf("%s: want a difference in %s, got %q", name, c.id, got)
		}
	}
	few := recorded(t, plain, nil)
	few.Forget("A1")
	if got := want.Differences(few); len(got) != 1 || !strings.Contains(got[0], "A1, request 1: POST") {
		t.Errorf("a case that was not played: %q", got)
	}
}

// Files that are no complete recording are refused.
func TestDamagedRecordings(t *testing.T) {
	for text, says := range map[string]string{
		"": "not complete", "{": "damaged", `{"format":"another"}`: "no oxide-sim verify recording 1",
		`{"format":"oxide-sim verify recording 1"}`: "not complete",
	} {
		if _, err := verify.ReadRecording(
			strings.NewReader(text),
		); !strings.Contains(
			cmp.Or(err, errors.New("")).Error(),
			says,
		) {
			t.Errorf("%q: %v, want %s", text, err, says)
		}
	}
}
