// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package verify_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/openapi"
	"github.com/oxidecomputer/oxide-csi-plugin/test/verify"
)

const (
	gib   = int64(1) << 30
	token = "oxide-token-demo"
)

// world is a simulated rack with a project for verify. Requests of verify pass through wire, in the test's process.
type world struct {
	t       testing.TB
	rack    *simrack.Rack
	wire    http.Handler
	control http.Handler
	token   string
	// hook, if it is not nil, stands between verify and the rack. n counts the requests of verify from 1 on.
	hook func(n int, req *http.Request, serve func() *http.Response) (*http.Response, error)
	sent int
}

func newWorld(t testing.TB, o simrack.Options) *world {
	t.Helper()
	if o.Project == "" {
		o.Project = "csi-test"
	}
	rack, err := simrack.New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := rack.Close(); err != nil {
			t.Error(err)
		}
	})
	return &world{t: t, rack: rack, wire: openapi.Validator(t)(rack.API()), control: rack.Control(), token: token}
}

// RoundTrip serves a request of verify in this process.
func (w *world) RoundTrip(req *http.Request) (*http.Response, error) {
	w.sent++
	serve := func() *http.Response {
		answer := httptest.NewRecorder()
		w.wire.ServeHTTP(answer, req)
		return answer.Result()
	}
	if w.hook != nil {
		return w.hook(w.sent, req, serve)
	}
	return serve(), nil
}

// options are for a run that tries all that needs no guest.
func (w *world) options() verify.Options {
	return verify.Options{
		Host: "http://rack.invalid", Token: w.token, HTTPClient: &http.Client{Transport: w}, Version: "v0",
		Project: "csi-test", EmptyProject: "csi-test", StartInstances: true,
		Pause: time.Millisecond, Wait: 5 * time.Second, Progress: w.t.Output(),
	}
}

func (w *world) run(change ...func(*verify.Options)) *verify.Report {
	w.t.Helper()
	o := w.options()
	for _, f := range change {
		f(&o)
	}
	return verify.Run(w.t.Context(), o)
}

// cleanUpOnly makes a run play one case that makes nothing.
func cleanUpOnly(o *verify.Options) { o.Only = []string{"T4"} }

// call makes a request of the API, or of the control endpoint below /v0, as an operator of the rack.
func (w *world) call(method, path, body string, into any) {
	w.t.Helper()
	req := httptest.NewRequest(method, "http://rack.invalid"+path, strings.NewReader(body))
	req.Header.Set("Authorization", "Bearer "+token)
	handler := w.control
	if strings.HasPrefix(path, "/v1") {
		handler = w.rack.API()
	}
	answer := httptest.NewRecorder()
	handler.ServeHTTP(answer, req)
	if answer.Code > 299 {
		w.t.Fatalf("%s %s %s: %d %s", method, path, body, answer.Code, answer.Body)
	}
	if into != nil {
		if err := json.Unmarshal(answer.Body.Bytes(), into); err != nil {
			w.t.Fatal(err)
		}
	}
}

func (w *world) newToken(role string) string {
	var made struct{ Token string }
	w.call("POST", "/v0/tokens", fmt.Sprintf(`{"role":%q}`, role), &made)
	return made.Token
}

// census is all objects of all projects, as the rack shows them, without the times of instances.
func (w *world) census() (all []string) {
	w.t.Helper()
	var projects struct{ Items []struct{ ID, Name string } }
	w.call("GET", "/v1/projects", "", &projects)
	for _, p := range projects.Items {
		for _, kind := range []string{"disks", "snapshots", "instances", "anti-affinity-groups"} {
			var page struct{ Items []json.RawMessage }
			w.call("GET", "/v1/"+kind+"?limit=1000&project="+p.ID, "", &page)
			for _, item := range page.Items {
				all = append(all, p.Name+" "+kind+" "+updated.ReplaceAllString(string(item), ""))
			}
		}
	}
	return all
}

var updated = regexp.MustCompile(`"time_run_state_updated":"[^"]*"`)

// unchanged fails the test if the census differs from an earlier one.
func (w *world) unchanged(before []string) {
	w.t.Helper()
	if diff := cmp.Diff(before, w.census()); diff != "" {
		w.t.Errorf("the objects of the rack before (-) and after (+):\n%s", diff)
	}
}

// results are the IDs of the cases with an outcome.
func results(r *verify.Report, o verify.Outcome) (ids []string) {
	for _, one := range r.Results {
		if one.Outcome == o {
			ids = append(ids, one.ID)
		}
	}
	return ids
}

func result(t *testing.T, r *verify.Report, id string) verify.Result {
	t.Helper()
	i := slices.IndexFunc(r.Results, func(one verify.Result) bool { return one.ID == id })
	if i < 0 {
		t.Fatalf("no result of %s: %s", id, r.Problem)
	}
	return r.Results[i]
}

// wantAsAssumed fails the test if anything differs or failed.
func wantAsAssumed(t testing.TB, r *verify.Report) {
	t.Helper()
	for _, one := range r.Results {
		if one.Outcome == verify.Different || one.Failed {
			t.Errorf(
				"%s %s: %s: %s: %s: expected %s, seen %s",
				one.ID,
				one.What,
				one.Outcome,
				one.Why,
				one.Request,
				one.Expected,
				one.Seen,
			)
		}
	}
	if r.Problem != "" || len(r.Left) > 0 || r.ExitCode() != 0 {
		t.Errorf("exit code %d: %s %q", r.ExitCode(), r.Problem, r.Left)
	}
}

// settings are the settings of the simulated rack with which verify must find it as assumed.
var settings = []struct {
	name    string
	options simrack.Options
	role    string
	prepare func(*world)
	facts   verify.RackFacts
}{
	{
		name:    "release 18",
		options: simrack.Options{APIVersionMax: "2026021301.0.0"},
		facts:   verify.RackFacts{Release: "18"},
	},
	{
		name:    "release 19",
		options: simrack.Options{APIVersionMax: "2026032500.0.0"},
		facts:   verify.RackFacts{Release: "19"},
	},
	{name: "release 20", facts: verify.RackFacts{Release: "20"}},
	{
		name:    "release 21",
		options: simrack.Options{APIVersionMax: "2026061000.0.0"},
		facts:   verify.RackFacts{Release: "21"},
	},
	{
		name:    "release 22",
		options: simrack.Options{APIVersionMax: "2026073100.0.0"},
		facts:   verify.RackFacts{Release: "22 or later"},
	},
	{name: "limited-collaborator", role: "limited-collaborator", facts: verify.RackFacts{Release: "20"}},
	{name: "viewer", role: "viewer", facts: verify.RackFacts{Release: "20", Hotplug: "", DisksPerInstance: -1}},
	{name: "hot-plug", options: simrack.Options{Hotplug: true}, facts: verify.RackFacts{Release: "20", Hotplug: "yes"}},
	{name: "asynchronous hot-plug", options: simrack.Options{Hotplug: true, HotplugAsync: true, Latency: time.Millisecond},
		facts: verify.RackFacts{Release: "20", Hotplug: "yes"}},
	{name: "quota of 6 GiB", options: simrack.Options{QuotaBytes: 6 * gib},
		facts: verify.RackFacts{Release: "20", QuotaBytes: 6 * gib, FreeBytes: 6 * gib, DisksPerInstance: -1}},
	{name: "quota of 15 GiB", options: simrack.Options{QuotaBytes: 15 * gib},
		facts: verify.RackFacts{Release: "20", QuotaBytes: 15 * gib, FreeBytes: 15 * gib}},
	{
		name:    "no processor is free",
		options: simrack.Options{CPUQuota: 1},
		facts:   verify.RackFacts{Release: "20", Hotplug: "fails"},
		prepare: func(w *world) { w.call("POST", "/v0/instances", `{"name":"busy","project":"other"}`, nil) },
	},
	{
		name:    "slow",
		options: simrack.Options{Latency: 2 * time.Millisecond, StateTime: 25 * time.Millisecond},
		facts:   verify.RackFacts{Release: "20"},
	},
}

// TestSimulatedRackIsAsAssumed plays all cases on the simulated rack in all its settings.
func TestSimulatedRackIsAsAssumed(t *testing.T) {
	var mu sync.Mutex
	tried, played := map[string]bool{}, 0
	t.Run("settings", func(t *testing.T) {
		for _, s := range settings {
			t.Run(s.name, func(t *testing.T) {
				t.Parallel()
				w := newWorld(t, s.options)
				if s.prepare != nil {
					s.prepare(w)
				}
				if s.role != "" {
					w.token = w.newToken(s.role)
				}
				before := w.census()
				r := w.run(func(o *verify.Options) {
					if s.facts.Hotplug == "fails" { // of the cases that start an instance only this one can be played
						o.Only = []string{"Q4"}
					}
				})
				wantAsAssumed(t, r)
				w.unchanged(before)
				mu.Lock()
				defer mu.Unlock()
				played++
				for _, id := range results(r, verify.AsAssumed) {
					tried[id] = true
				}
				if s.facts.Hotplug == "fails" {
					return
				}
				checkFacts(t, r, s.facts, s.role == "viewer")
			})
		}
	})
	if played < len(settings) {
		return // only some were asked for, or some failed
	}
	for _, id := range verify.CaseIDs() {
		if !tried[id] && !strings.HasPrefix(id, "§9") && !slices.Contains([]string{"Y1", "Y2", "R2"}, id) {
			t.Errorf("%s was tried in no setting", id)
		}
	}
}

// checkFacts compares what the report says about the rack with its settings.
func checkFacts(t *testing.T, r *verify.Report, want verify.RackFacts, viewer bool) {
	t.Helper()
	got := r.Rack
	got.APIVersion = ""
	if want.Hotplug == "" && !viewer {
		want.Hotplug = "no"
	}
	want.HotUnplug = want.Hotplug
	switch want.DisksPerInstance {
	case 0:
		want.DisksPerInstance = 12
	case -1:
		want.DisksPerInstance = 0
	}
	if want.QuotaBytes == 0 {
		want.QuotaBytes, want.FreeBytes = 1<<60, 1<<60
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("the rack has (-), the report says (+):\n%s", diff)
	}
	if got := len(r.Times); got != 7 && !viewer {
		t.Errorf("times of %d operations, want 7", got)
	}
}

// TestCasesOfThePage compares the cases with those of docs/reference/rack.md §11: each is played, or the reason why it
// cannot be is given.
func TestCasesOfThePage(t *testing.T) {
	page, err := os.ReadFile("../../docs/reference/rack.md")
	if err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, row := range regexp.MustCompile("`([A-Z][0-9]+)`\\s").FindAllStringSubmatch(string(page), -1) {
		want = append(want, row[1])
	}
	var got []string
	for _, id := range append(verify.CaseIDs(), verify.BeyondIDs()...) {
		if section, is := strings.CutPrefix(id, "§"); !is {
			got = append(got, id)
		} else if !strings.Contains(string(page), "\n## §"+strings.Trim(section, "abcdefgh")+" ") {
			t.Errorf("%s names a section that the page does not have", id)
		}
	}
	slices.Sort(want)
	slices.Sort(got)
	if diff := cmp.Diff(want, slices.Compact(got)); diff != "" {
		t.Errorf("cases of the page (-) and of verify (+):\n%s", diff)
	}
}

// changes rewrites answers of the rack: those to requests that match get another status, code, message or part.
type change struct {
	request, body  string // regular expressions
	status         int
	code, old, new string
	id             string // of the case that finds it
	expected, seen string
	means, goOn    string
}

// TestDifferencesAreFound changes the answers of the simulated rack, one at a time.
func TestDifferencesAreFound(t *testing.T) {
	const anyOther = "Only a message differs."
	for name, c := range map[string]change{
		"a message that is only words": {request: `POST /v1/disks\?`, old: "already exists: disk", new: "there is already: disk", id: "D2",
			expected: `already exists: disk \"csi-verify-d\"`, seen: `there is already: disk \"csi-verify-d\"`, means: anyOther, goOn: "You can go on."},
		"a message that the plugin reads": {request: `attach$`, old: "instance is not fully stopped", new: "stop the instance first", id: "A4",
			seen: "stop the instance first", means: "recognises by this refusal", goOn: "may not work"},
		"a code": {request: `POST /v1/disks\?`, old: "ObjectAlreadyExists", new: "Conflict", id: "D2", seen: "400 Conflict",
			means: "A repeated CreateVolume", goOn: "Do not use"},
		"a status": {request: `DELETE /v1/disks/`, old: "cannot be deleted", status: 409, id: "X3", seen: "409 InvalidRequest",
			means: "must not be deleted", goOn: "Do not use"},
		"a missing state": {request: `POST /v1/disks\?`, old: `"state":{"state":"creating"}`, new: `"state":{"state":"detached"}`, id: "D1",
			expected: "state.state=creating", seen: `"state":"detached"`, means: "Each volume", goOn: "may not work"},
		"a state that the SDK does not know": {request: `/attach$`, old: `"state":"attached"`, new: `"state":"hovering"`, id: "A1",
			expected: "which the SDK reads", seen: "hovering", means: "says attached", goOn: "Do not use"},
		"a page that is missing": {request: `GET /v1/disks\?limit=2`, old: `"next_page":"`, new: `"next_page":null,"x":"`, id: "S5",
			means: "hide volumes", goOn: "Do not use"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, simrack.Options{})
			w.wire = c.rewrite(w.rack.API())
			before := w.census()
			r := w.run(func(o *verify.Options) { o.Only = []string{c.id} })
			w.unchanged(before)
			got := result(t, r, c.id)
			for what, pair := range map[string][2]string{
				"outcome": {string(verify.Different), string(got.Outcome)}, "expected": {c.expected, got.Expected},
				"seen": {c.seen, got.Seen}, "means": {c.means, got.Means}, "go on": {c.goOn, got.GoOn},
			} {
				if !strings.Contains(pair[1], pair[0]) {
					t.Errorf("%s is %q, want %q", what, pair[1], pair[0])
				}
			}
			if r.ExitCode() != 1 {
				t.Errorf("exit code %d: %s", r.ExitCode(), r.Problem)
			}
			var text strings.Builder
			r.Markdown(&text)
			if !strings.Contains(text.String(), "## "+c.id+": ") || !strings.Contains(text.String(), got.GoOn) {
				t.Errorf("the report does not begin with the difference:\n%s", text.String())
			}
		})
	}
}

// rewrite serves requests, and changes the answers that have the old text.
func (c change) rewrite(next http.Handler) http.Handler {
	matches := regexp.MustCompile(c.request)
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		answer := httptest.NewRecorder()
		next.ServeHTTP(answer, req)
		text := answer.Body.String()
		if matches.MatchString(req.Method+" "+req.URL.RequestURI()) && strings.Contains(text, c.old) {
			if c.new != "" {
				text = strings.ReplaceAll(text, c.old, c.new)
			}
			if c.status != 0 {
				answer.Code = c.status
			}
		}
		w.WriteHeader(answer.Code)
		_, _ = io.WriteString(w, text)
	})
}

// A rack that is kinder than a real one makes objects that it should refuse. They are found, and they are removed.
func TestAKinderRackIsFound(t *testing.T) {
	t.Parallel()
	w := newWorld(t, simrack.Options{})
	w.wire = http.HandlerFunc(func(out http.ResponseWriter, req *http.Request) {
		if req.Method == http.MethodPost && req.URL.Path == "/v1/disks" {
			body, _ := io.ReadAll(req.Body)
			for _, size := range []string{"536870912", "1073742336", fmt.Sprint(int64(1) << 62)} {
				body = bytes.ReplaceAll(body, []byte(`"size":`+size), []byte(`"size":1073741824`))
			}
			body = bytes.ReplaceAll(body, []byte("a123456789abcdef0123456789abcdef"), []byte("csi-verify-accepted"))
			req.Body = io.NopCloser(bytes.NewReader(body))
		}
		w.rack.API().ServeHTTP(out, req)
	})
	before := w.census()
	r := w.run()
	w.unchanged(before)
	// The size before the name: D3 and §2a. The name that is a UUID: D8.
	if diff := cmp.Diff(
		[]string{"D3", "D4", "D5", "D8", "§2a"},
		results(r, verify.Different),
	); diff != "" ||
		r.ExitCode() != 1 {
		t.Errorf("exit code %d, different: %s", r.ExitCode(), diff)
	}
}

// An instance that takes fewer disks is found, and the report says how many it takes.
func TestFewerDisksAreFound(t *testing.T) {
	t.Parallel()
	w := newWorld(t, simrack.Options{MaxDisks: 8})
	r := w.run(func(o *verify.Options) { o.Only = []string{"A5"} })
	got := result(t, r, "A5")
	if got.Outcome != verify.Different || !strings.Contains(got.Seen, "cannot attach more than 8 disks") ||
		r.Rack.DisksPerInstance != 8 {
		t.Errorf("got %+v, %d disks", got, r.Rack.DisksPerInstance)
	}
}
