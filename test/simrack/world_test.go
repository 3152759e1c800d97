// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/openapi"
)

const (
	gib       = int64(1) << 30
	mainToken = "oxide-token-demo"
)

// world is a rack served over HTTP. Its answers are checked against the published schema.
type world struct {
	t    testing.TB
	rack *simrack.Rack
	// api serves the API, unless another process does or nothing does (newTimedWorld).
	api *httptest.Server
	// client makes the requests, at the URLs of API and control endpoint.
	client             *http.Client
	apiURL, controlURL string
	// token is the token of requests; empty means no token.
	token string
}

// newWorld serves a rack with the project "proj".
func newWorld(t testing.TB, o simrack.Options) *world {
	t.Helper()
	return serve(t, o, openapi.Validator(t))
}

// newRawWorld is a world for requests that the rack accepts although they violate the published schema.
func newRawWorld(t testing.TB, o simrack.Options) *world {
	t.Helper()
	return serve(t, o, func(h http.Handler) http.Handler { return h })
}

func serve(t testing.TB, o simrack.Options, wrap func(http.Handler) http.Handler) *world {
	t.Helper()
	rack := newRack(t, o)
	api, control := httptest.NewServer(wrap(rack.API())), httptest.NewServer(rack.Control())
	t.Cleanup(control.Close)
	t.Cleanup(api.Close)
	return &world{
		t: t, rack: rack, token: mainToken, api: api, client: http.DefaultClient, apiURL: api.URL, controlURL: control.URL,
	}
}

func newRack(t testing.TB, o simrack.Options) *simrack.Rack {
	t.Helper()
	if o.Project == "" {
		o.Project = "proj"
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
	return rack
}

// newTimedWorld is a world for a bubble of testing/synctest, where states of the rack last as long as the test looks at
// them. Its requests call the handlers directly: a pending read from a connection would stop the clock of the bubble.
func newTimedWorld(t testing.TB, o simrack.Options) *world {
	t.Helper()
	rack := newRack(t, o)
	client := &http.Client{Transport: inProcess{"api": openapi.Validator(t)(rack.API()), "control": rack.Control()}}
	return &world{
		t: t, rack: rack, token: mainToken, client: client, apiURL: "http://api", controlURL: "http://control",
	}
}

// inProcess calls the handler that the host of the URL names.
type inProcess map[string]http.Handler

func (p inProcess) RoundTrip(req *http.Request) (*http.Response, error) {
	answer := httptest.NewRecorder()
	p[req.URL.Host].ServeHTTP(answer, req)
	return answer.Result(), nil
}

// reply is an answer of the rack: the status, and the parts of the body that tests compare.
type reply struct {
	status int
	header http.Header
	raw    string

	Code    *string `json:"error_code"`
	Message string  `json:"message"`

	ID   string `json:"id"`
	Name string `json:"name"`
	// Description, Policy and FailureDomain belong to groups.
	Description   string `json:"description"`
	Policy        string `json:"policy"`
	FailureDomain string `json:"failure_domain"`

	ProjectID  string     `json:"project_id"`
	RunState   string     `json:"run_state"`
	BootDiskID *string    `json:"boot_disk_id"`
	Updated    time.Time  `json:"time_run_state_updated"`
	State      *diskState `json:"state"`
	Size       int64      `json:"size"`
	BlockSize  int        `json:"block_size"`
	ReadOnly   bool       `json:"read_only"`
	DiskID     string     `json:"disk_id"`
	SnapshotID any        `json:"snapshot_id"`
	ImageID    any        `json:"image_id"`
	Created    time.Time  `json:"time_created"`
	Modified   time.Time  `json:"time_modified"`
	Items      []reply    `json:"items"`
	NextPage   *string    `json:"next_page"`

	Provisioned struct{ Storage, CPUs, Memory int64 } `json:"provisioned"`
	Capacity    struct{ Storage, CPUs, Memory int64 } `json:"capacity"`
}

type diskState struct {
	State    string `json:"state"`
	Instance string `json:"instance"`
}

// UnmarshalJSON also reads the state of a snapshot, which is a string.
func (s *diskState) UnmarshalJSON(raw []byte) error {
	if raw[0] == '"' {
		return json.Unmarshal(raw, &s.State)
	}
	type plain diskState
	return json.Unmarshal(raw, (*plain)(s))
}

func (r reply) state() string {
	if r.State == nil {
		return ""
	}
	return r.State.State
}

func (r reply) code() string {
	if r.Code == nil {
		return ""
	}
	return *r.Code
}

func (r reply) names() []string {
	var names []string
	for _, i := range r.Items {
		names = append(names, i.Name)
	}
	return names
}

// request makes a request of the API; headers are pairs of name and value.
func (w *world) request(method, path, body string, headers ...string) (*http.Response, string, error) {
	req, err := http.NewRequest(method, w.apiURL+path, strings.NewReader(body))
	if err != nil {
		w.t.Fatal(err)
	}
	if w.token != "" {
		req.Header.Set("Authorization", "Bearer "+w.token)
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	for n := 0; n < len(headers); n += 2 {
		req.Header.Set(headers[n], headers[n+1])
	}
	res, err := w.client.Do(req)
	if err != nil {
		return nil, "", err
	}
	defer res.Body.Close()
	raw, err := io.ReadAll(res.Body)
	return res, string(raw), err
}

// do makes a request of the API, which must be answered. The path begins after "/v1".
func (w *world) do(method, path, body string, headers ...string) reply {
	w.t.Helper()
	res, raw, err := w.request(method, "/v1"+path, body, headers...)
	if err != nil {
		w.t.Fatalf("%s %s: %v", method, path, err)
	}
	r := reply{status: res.StatusCode, header: res.Header, raw: raw}
	if raw != "" {
		if err := json.Unmarshal([]byte(raw), &r); err != nil {
			w.t.Fatalf("%s %s answered %q: %v", method, path, raw, err)
		}
	}
	return r
}

// must makes a request of the API, which must succeed.
func (w *world) must(method, path, body string) reply {
	w.t.Helper()
	r := w.do(method, path, body)
	if r.status > 299 {
		w.t.Fatalf("%s %s %s answered %d: %s", method, path, body, r.status, r.raw)
	}
	return r
}

// as is the same world with another token.
func (w *world) as(token string) *world {
	other := *w
	other.token = token
	return &other
}

// newToken creates a token with a role.
func (w *world) newToken(role string) string {
	w.t.Helper()
	var made struct{ Token string }
	w.operate("POST", "/tokens", fmt.Sprintf(`{"role":%q}`, role), 201, &made)
	return made.Token
}

// operate makes a request of the control endpoint, which must answer with the status, and decodes the answer.
func (w *world) operate(method, path, body string, status int, into any) {
	w.t.Helper()
	req, err := http.NewRequest(method, w.controlURL+"/v0"+path, strings.NewReader(body))
	if err != nil {
		w.t.Fatal(err)
	}
	res, err := w.client.Do(req)
	if err != nil {
		w.t.Fatal(err)
	}
	defer res.Body.Close()
	raw, err := io.ReadAll(res.Body)
	if err != nil {
		w.t.Fatal(err)
	}
	if res.StatusCode != status {
		w.t.Fatalf("control: %s %s %s answered %d, not %d: %s", method, path, body, res.StatusCode, status, raw)
	}
	if into != nil {
		if err := json.Unmarshal(raw, into); err != nil {
			w.t.Fatalf("control: %s %s answered %q: %v", method, path, raw, err)
		}
	}
}

func (w *world) set(settings string) {
	w.t.Helper()
	w.operate("PATCH", "/settings", settings, 200, nil)
}

func (w *world) setRun(instance, state string) {
	w.t.Helper()
	w.operate("PATCH", "/instances/"+instance, fmt.Sprintf(`{"run_state":%q}`, state), 200, nil)
}

func (w *world) setDisk(id, state string) {
	w.t.Helper()
	w.operate("PATCH", "/disks/"+id, fmt.Sprintf(`{"state":%q}`, state), 200, nil)
}

func (w *world) fault(body string) (id string) {
	w.t.Helper()
	var made struct{ ID string }
	w.operate("POST", "/faults", body, 201, &made)
	return made.ID
}

func (w *world) hits(id string) int {
	w.t.Helper()
	var list []struct {
		ID   string
		Hits int
	}
	w.operate("GET", "/faults", "", 200, &list)
	for _, f := range list {
		if f.ID == id {
			return f.Hits
		}
	}
	w.t.Fatalf("no fault %q", id)
	return 0
}

type machine struct {
	ID, Name, Project, Guest string
	RunState                 string `json:"run_state"`
	Disks                    []struct {
		ID, Name, Device string
		Slot             int
	}
}

func (w *world) machines() map[string]machine {
	w.t.Helper()
	var list []machine
	w.operate("GET", "/instances", "", 200, &list)
	byName := map[string]machine{}
	for _, m := range list {
		byName[m.Name] = m
	}
	return byName
}

// slots maps the disks of an instance to their slots.
func (w *world) slots(instance string) map[string]int {
	slots := map[string]int{}
	for _, d := range w.machines()[instance].Disks {
		slots[d.Name] = d.Slot
	}
	return slots
}

// body is the request for a blank distributed disk of 1 GiB with 512-byte blocks. changes are pairs of field and JSON
// value.
func body(name string, changes ...string) string {
	return diskBody(name, "distributed", `{"type":"blank","block_size":512}`, changes...)
}

func diskBody(name, kind, source string, changes ...string) string {
	f := map[string]json.RawMessage{
		"name": quote(name), "description": quote(""), "size": json.RawMessage(fmt.Sprint(gib)),
		"disk_backend": json.RawMessage(fmt.Sprintf(`{"type":%q,"disk_source":%s}`, kind, source)),
	}
	if kind == "local" {
		f["disk_backend"] = json.RawMessage(`{"type":"local"}`)
	}
	for n := 0; n < len(changes); n += 2 {
		if changes[n+1] == "" {
			delete(f, changes[n])
			continue
		}
		f[changes[n]] = json.RawMessage(changes[n+1])
	}
	raw, err := json.Marshal(f)
	if err != nil {
		panic(err)
	}
	return string(raw)
}

func quote(s string) json.RawMessage {
	raw, err := json.Marshal(s)
	if err != nil {
		panic(err)
	}
	return raw
}

// disk creates a disk of 1 GiB and returns its ID.
func (w *world) disk(name string) string {
	w.t.Helper()
	return w.must("POST", "/disks?project=proj", body(name)).ID
}

// snapshot creates a snapshot of a disk of the project and returns its ID.
func (w *world) snapshot(name, disk string) string {
	w.t.Helper()
	return w.must("POST", "/snapshots?project=proj", snapshotBody(name, disk)).ID
}

func snapshotBody(name, disk string) string {
	return fmt.Sprintf(`{"name":%q,"description":"","disk":%q}`, name, disk)
}

// restoreBody is the request for a disk of 1 GiB from a snapshot, with changes as in body.
func restoreBody(name, snapshot string, readOnly bool, changes ...string) string {
	return diskBody(
		name,
		"distributed",
		fmt.Sprintf(`{"type":"snapshot","snapshot_id":%q,"read_only":%t}`, snapshot, readOnly),
		changes...)
}

// instance creates an instance without disks, stopped, and returns its ID.
func (w *world) instance(name string) string {
	w.t.Helper()
	return w.must("POST", "/instances?project=proj", instanceBody(name, `"start":false`)).ID
}

func instanceBody(name, more string) string {
	if more != "" {
		more = "," + more
	}
	return fmt.Sprintf(`{"name":%q,"description":"","hostname":%q,"memory":1073741824,"ncpus":1%s}`, name, name, more)
}

func (w *world) attach(instance, disk string) reply {
	w.t.Helper()
	return w.do("POST", "/instances/"+instance+"/disks/attach", fmt.Sprintf(`{"disk":%q}`, disk))
}

func (w *world) detach(instance, disk string) reply {
	w.t.Helper()
	return w.do("POST", "/instances/"+instance+"/disks/detach", fmt.Sprintf(`{"disk":%q}`, disk))
}

// waitFor waits until a condition holds.
func (w *world) waitFor(what string, holds func() bool) {
	w.t.Helper()
	for deadline := time.Now().Add(time.Minute); !holds(); {
		if time.Now().After(deadline) {
			w.t.Fatalf("after a minute: still not %s", what)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

func (w *world) waitRun(instance, state string) {
	w.t.Helper()
	w.waitFor(instance+" "+state, func() bool { return w.must("GET", "/instances/"+instance, "").RunState == state })
}

// sdk is the Go SDK's client.
func (w *world) sdk() *oxide.Client {
	w.t.Helper()
	c, err := oxide.NewClient(oxide.WithHost(w.apiURL), oxide.WithToken(w.token))
	if err != nil {
		w.t.Fatal(err)
	}
	return c
}

// wants is an expected answer. A message that ends in "…" is compared as a prefix; a message that begins with "…" must
// be contained.
type wants struct {
	status  int
	code    string
	message string
}

func (r reply) check(t testing.TB, want wants) {
	t.Helper()
	ok := r.Message == want.message
	if prefix, is := strings.CutSuffix(want.message, "…"); is {
		ok = strings.HasPrefix(r.Message, prefix)
	}
	if part, is := strings.CutPrefix(want.message, "…"); is {
		ok = strings.Contains(r.Message, part)
	}
	if r.status != want.status || r.code() != want.code || !ok {
		t.Errorf("got %d %q %q, want %d %q %q", r.status, r.code(), r.Message, want.status, want.code, want.message)
	}
	if want.code == "" && r.Code != nil {
		t.Errorf("error_code is not left out: %s", r.raw)
	}
}
