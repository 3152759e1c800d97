// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack_test

import (
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

func TestAPIVersionComesFirst(t *testing.T) {
	const bad = `bad value for header "api-version": `
	tests := []struct {
		name, newest, asked string
		path                string
		want                wants
	}{
		{name: "none means the newest", path: "/utilization", want: wants{status: 200}},
		{name: "the newest", asked: "2026060800.0.0", path: "/utilization", want: wants{status: 200}},
		{name: "an older one", asked: "2025112000.0.0", path: "/utilization", want: wants{status: 200}},
		{name: "one without routes", asked: "2025111900.0.0", path: "/utilization",
			want: wants{404, "", "Not Found"}},
		{name: "a newer one", asked: "2026061000.0.0", path: "/nonexistent",
			want: wants{400, "", "server does not support this API version: 2026061000.0.0"}},
		{name: "a newer one on an older rack", newest: "2026032500.0.0", asked: "2026060800.0.0", path: "/utilization",
			want: wants{400, "", "server does not support this API version: 2026060800.0.0"}},
		{name: "newer by the last number", asked: "2026060800.0.1", path: "/utilization",
			want: wants{400, "", "server does not support this API version: 2026060800.0.1"}},
		{name: "junk", asked: "latest", path: "/utilization",
			want: wants{400, "", bad + "unexpected character while parsing major version number: latest"}},
		{name: "too short", asked: "2026060800", path: "/utilization",
			want: wants{400, "", bad + "unexpected end of input while parsing minor version number: 2026060800"}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			w := newWorld(t, simrack.Options{APIVersionMax: test.newest})
			var headers []string
			if test.asked != "" {
				headers = []string{"API-Version", test.asked}
			}
			w.do("GET", test.path, "", headers...).check(t, test.want)
		})
	}
}

func TestAuthentication(t *testing.T) {
	w := newWorld(t, simrack.Options{Token: "oxide-token-secret"})
	w.token = ""
	refused := wants{401, "Unauthorized", "credentials missing or invalid"}
	tests := []struct {
		name, header string
		want         wants
	}{
		{"right", "Bearer oxide-token-secret", wants{status: 200}},
		{"scheme in lower case", "bearer oxide-token-secret", wants{status: 200}},
		{"unknown token", "Bearer oxide-token-other", refused},
		{"token without the prefix", "Bearer secret", refused},
		{"other scheme", "Basic oxide-token-secret", refused},
		{"no scheme", "oxide-token-secret", refused},
		{"nothing", "", refused},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			w.do("GET", "/me", "", "Authorization", test.header).check(t, test.want)
			// Without a token the answer is the same whether or not the object exists.
			if test.want.status == 401 {
				w.do("GET", "/disks/"+missingUUID, "", "Authorization", test.header).check(t, refused)
			}
		})
	}
}

func TestRevokedTokenIsUnknown(t *testing.T) {
	w := newWorld(t, simrack.Options{})
	w.token = w.newToken("viewer")
	w.do("GET", "/me", "").check(t, wants{status: 200})
	w.operate("DELETE", "/tokens/"+w.token, "", 204, nil)
	w.do("GET", "/me", "").check(t, wants{401, "Unauthorized", "credentials missing or invalid"})
	w.operate("DELETE", "/tokens/"+w.token, "", 404, nil)
}

func TestRoles(t *testing.T) {
	w := newWorld(t, simrack.Options{})
	s := scene{world: w, d: w.disk("d"), i: w.instance("i")}
	requests := []struct{ method, path, body string }{
		{"GET", "/projects/proj", ""},
		{"GET", "/disks?project=proj", ""},
		{"GET", "/disks/" + s.d, ""},
		{"GET", "/disks/d?project=proj", ""},
		{"GET", "/instances/" + s.i + "/disks", ""},
		{"POST", "/disks?project=proj", body("e")},
		{"POST", "/instances/" + s.i + "/disks/attach", `{"disk":"d"}`},
		{"POST", "/instances/" + s.i + "/disks/detach", `{"disk":"d"}`},
		{"POST", "/instances/" + s.i + "/stop", ""},
		{"DELETE", "/disks/e?project=proj", ""},
		{"GET", "/utilization", ""},
		{"GET", "/me", ""},
		{"POST", "/projects", `{"name":"p","description":""}`},
	}
	tests := []struct {
		role string
		want []int
	}{
		{"limited-collaborator", []int{200, 200, 200, 200, 200, 201, 202, 202, 202, 204, 200, 200, 403}},
		{"viewer", []int{200, 200, 200, 200, 200, 403, 403, 403, 403, 404, 200, 200, 403}},
		{"none", []int{404, 404, 404, 404, 404, 404, 404, 404, 404, 404, 200, 200, 403}},
		{"fleet-viewer", []int{404, 404, 404, 404, 404, 404, 404, 404, 404, 404, 200, 200, 403}},
	}
	for _, test := range tests {
		t.Run(test.role, func(t *testing.T) {
			as := w.withRole(test.role)
			for n, q := range requests {
				if r := as.do(q.method, q.path, q.body); r.status != test.want[n] {
					t.Errorf("%s %s: got %d, want %d: %s", q.method, q.path, r.status, test.want[n], r.raw)
				}
			}
		})
	}
}

func TestErrorsAreIndentedAndCarryTheRequestID(t *testing.T) {
	w := newWorld(t, simrack.Options{})
	r := w.do("GET", "/disks/nope?project=proj", "")
	want := fmt.Sprintf("{\n  \"request_id\": %q,\n  \"error_code\": \"ObjectNotFound\",\n"+
		"  \"message\": \"not found: disk with name \\\"nope\\\"\"\n}", r.header.Get("X-Request-Id"))
	if r.raw != want {
		t.Errorf("got %s, want %s", r.raw, want)
	}
	if other := w.do("GET", "/ping", ""); other.header.Get("X-Request-Id") == r.header.Get("X-Request-Id") {
		t.Error("two requests have the same ID")
	}
}

func TestBodiesAreReadAsTheRackReadsThem(t *testing.T) {
	const bad = "unable to parse JSON body: "
	huge := body("e", "description", string(quote(strings.Repeat("x", 1<<20))))
	tests := []struct {
		name, body, contentType string
		want                    wants
	}{
		{name: "unknown fields are ignored", body: body("e1", "colour", `"red"`), want: wants{status: 201}},
		{name: "text after the object is ignored", body: body("e2") + "rest", want: wants{status: 201}},
		{name: "content type with parameters", body: body("e3"), contentType: "Application/JSON ; charset=utf-8",
			want: wants{status: 201}},
		{name: "another content type", body: body("e"), contentType: "text/plain",
			want: wants{400, "", "unsupported mime type…"}},
		{name: "a form", body: body("e"), contentType: "application/x-www-form-urlencoded",
			want: wants{400, "", `expected content type "application/json"…`}},
		{name: "too large", body: huge, want: wants{400, "", "request body exceeded maximum size of 1048576 bytes"}},
		{name: "a list", body: "[]", want: wants{400, "", bad + "invalid type: sequence, expected struct"}},
		{name: "null", body: "null", want: wants{400, "", bad + "invalid type: null, expected struct"}},
		{name: "a broken string", body: `{"name":"d`, want: wants{400, "", bad + "EOF while parsing a string…"}},
		{name: "a broken value", body: `{"name":`, want: wants{400, "", bad + "EOF while parsing a value…"}},
		{name: "a broken list", body: `{"name":[`, want: wants{400, "", bad + "EOF while parsing a list…"}},
		{name: "no JSON", body: "disk", want: wants{400, "", bad + "expected value"}},
		{name: "a field in another case", body: strings.Replace(body("e"), `"size"`, `"Size"`, 1),
			want: wants{400, "", bad + "missing field `size`"}},
		{name: "no name", body: body("e", "name", ""), want: wants{400, "", bad + "missing field `name`"}},
		{
			name: "no description",
			body: body("e", "description", ""),
			want: wants{400, "", bad + "missing field `description`"},
		},
		{name: "no backend", body: body("e", "disk_backend", ""), want: wants{400, "", bad + "missing field `disk_backend`"}},
		{name: "a null backend", body: body("e", "disk_backend", "null"),
			want: wants{400, "", bad + "disk_backend: invalid type: null, expected struct"}},
		{name: "an unknown backend", body: body("e", "disk_backend", `{"type":"tape"}`),
			want: wants{400, "", bad + "disk_backend.type: unknown variant `tape`, expected `local` or `distributed`"}},
		{name: "no source", body: body("e", "disk_backend", `{"type":"distributed"}`),
			want: wants{400, "", bad + "disk_backend: missing field `disk_source`"}},
		{name: "no block size", body: diskBody("e", "distributed", `{"type":"blank"}`),
			want: wants{400, "", bad + "disk_backend.disk_source: missing field `block_size`"}},
		{name: "a number for a name", body: body("e", "name", "5"),
			want: wants{400, "", bad + "name: invalid type: integer `5`, expected a string"}},
		{name: "a text for a size", body: body("e", "size", `"1"`),
			want: wants{400, "", bad + "size: invalid type: string \"1\", expected u64"}},
		{name: "a fraction for a size", body: body("e", "size", "1.5"),
			want: wants{400, "", bad + "size: invalid type: floating point `1.5`, expected u64"}},
		{name: "2^63 bytes", body: body("e", "size", "9223372036854775808"),
			want: wants{400, "", "…value is too large for a byte count"}},
		{name: "2^64 bytes", body: body("e", "size", "18446744073709551616"),
			want: wants{400, "", "…value is too large for a byte count"}},
		{name: "the largest byte count", body: body("e", "size", "9223372036854775807"),
			want: wants{400, "InvalidValue", "unsupported value for \"size and block_size\"…"}},
		{name: "a long description", body: body("e", "description", string(quote(strings.Repeat("ü", 513)))),
			want: wants{500, "Internal", "Internal Server Error"}},
		{name: "the longest description", body: body("e4", "description", string(quote(strings.Repeat("ü", 512)))),
			want: wants{status: 201}},
	}
	w := newRawWorld(t, simrack.Options{})
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			var headers []string
			if test.contentType != "" {
				headers = []string{"Content-Type", test.contentType}
			}
			w.do("POST", "/disks?project=proj", test.body, headers...).check(t, test.want)
		})
	}
	t.Run("no content type", func(t *testing.T) {
		req, err := http.NewRequest("POST", w.apiURL+"/v1/disks?project=proj", strings.NewReader(body("e5")))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+mainToken)
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		if res.StatusCode != 201 {
			t.Errorf("got %d", res.StatusCode)
		}
	})
}

func TestNames(t *testing.T) {
	const bad = "unable to parse JSON body: name: "
	w := newRawWorld(t, simrack.Options{})
	tests := []struct{ name, want string }{
		{"a", ""},
		{"a-1", ""},
		{strings.Repeat("z", 63), ""},
		{strings.Repeat("z", 64), "name may contain at most 63 characters"},
		{"", "name requires at least one character"},
		{"1a", "name must begin with an ASCII lowercase character"},
		{"-a", "name must begin with an ASCII lowercase character"},
		{"Ab", "name must begin with an ASCII lowercase character"},
		{"aB", `name contains invalid character: "B" (allowed characters are lowercase ASCII, digits, and "-")`},
		{"a_b", `name contains invalid character: "_" (allowed characters are lowercase ASCII, digits, and "-")`},
		{"aü", `name contains invalid character: "ü" (allowed characters are lowercase ASCII, digits, and "-")`},
		{"a-", `name cannot end with "-"`},
		{"a1b2c3d4-1111-4222-8333-444444444444", "name cannot be a UUID to avoid ambiguity with IDs"},
		{"a1b2c3d4111142228333444444444444", "name cannot be a UUID to avoid ambiguity with IDs"},
		{"a1b2c3d41111422283334444444444445", ""},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			want := wants{status: 201}
			if test.want != "" {
				want = wants{400, "", bad + test.want}
			}
			w.do("POST", "/disks?project=proj", body(test.name)).check(t, want)
		})
	}
}

func TestIDsInEveryNotation(t *testing.T) {
	w := newRawWorld(t, simrack.Options{})
	id := w.disk("d")
	plain := strings.ReplaceAll(id, "-", "")
	for _, text := range []string{id, strings.ToUpper(id), plain, "urn:uuid:" + id, "{" + id + "}"} {
		t.Run(text, func(t *testing.T) {
			if r := w.do("GET", "/disks/"+strings.ReplaceAll(strings.ReplaceAll(text, "{", "%7B"), "}", "%7D"), ""); r.ID != id {
				t.Errorf("in the path: %s", r.raw)
			}
			r := w.do("POST", "/instances/"+missingUUID+"/disks/attach", fmt.Sprintf(`{"disk":%q}`, text))
			r.check(t, wants{404, "ObjectNotFound", `not found: instance with id "` + missingUUID + `"`})
		})
	}
	for _, text := range []string{"%7B" + plain + "%7D", "urn:uuid:" + plain, "0" + id} {
		t.Run(text, func(t *testing.T) {
			w.do("GET", "/disks/"+text, "").check(t, wants{400, "",
				"bad parameter in URL path: data did not match any variant of untagged enum NameOrId"})
		})
	}
	upper := strings.ToUpper(missingUUID)
	w.do("GET", "/disks/"+upper, "").
		check(t, wants{404, "ObjectNotFound", `not found: disk with id "` + missingUUID + `"`})
}

func TestMethodsAndPaths(t *testing.T) {
	w := newRawWorld(t, simrack.Options{})
	tests := []struct {
		method, path string
		want         wants
		allow        string
	}{
		{"PATCH", "/disks", wants{405, "", "Method Not Allowed"}, "GET, POST"},
		{"DELETE", "/disks/", wants{405, "", "Method Not Allowed"}, "GET, POST"},
		{"PUT", "/disks/d", wants{405, "", "Method Not Allowed"}, "DELETE, GET"},
		{"GET", "/instances/i/start", wants{405, "", "Method Not Allowed"}, "POST"},
		{"GET", "/disks//?project=proj", wants{status: 200}, ""},
		{"GET", "/disks/d/blocks", wants{404, "", "Not Found"}, ""},
		{"POST", "/images?project=proj", wants{404, "", "Not Found"}, ""},
	}
	for _, test := range tests {
		t.Run(test.method+" "+test.path, func(t *testing.T) {
			r := w.do(test.method, test.path, "")
			r.check(t, test.want)
			if got := r.header.Get("Allow"); got != test.allow {
				t.Errorf("allow is %q, want %q", got, test.allow)
			}
		})
	}
}

func TestLargeAnswersAreCompressedWhenAsked(t *testing.T) {
	w := newRawWorld(t, simrack.Options{})
	for n := range 5 {
		w.disk(fmt.Sprintf("d-%d", n))
	}
	// A client that sets Accept-Encoding itself must decompress itself.
	res, raw, err := w.request("GET", "/v1/disks?project=proj", "", "Accept-Encoding", "deflate, gzip")
	if err != nil {
		t.Fatal(err)
	}
	if res.Header.Get("Content-Encoding") != "gzip" {
		t.Fatalf("headers: %v", res.Header)
	}
	unzipped, err := gzip.NewReader(strings.NewReader(raw))
	if err != nil {
		t.Fatal(err)
	}
	var list reply
	if err := json.NewDecoder(unzipped).Decode(&list); err != nil || len(list.Items) != 5 {
		t.Errorf("%d items, error %v", len(list.Items), err)
	}
	if _, err := io.Copy(io.Discard, unzipped); err != nil {
		t.Error(err)
	}
	if res, _, err := w.request(
		"GET",
		"/v1/ping",
		"",
		"Accept-Encoding",
		"gzip",
	); err != nil ||
		res.Header.Get("Content-Encoding") != "" {
		t.Errorf("a short answer: %v %v", res.Header, err)
	}
}

func TestRequestIsExecutedWhenItsClientHasGone(t *testing.T) {
	w := newWorld(t, simrack.Options{})
	w.fault(`{"operation":"disk_create","kind":"delay","delay_ms":50}`)
	req, err := http.NewRequest("POST", w.apiURL+"/v1/disks?project=proj", strings.NewReader(body("d")))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+mainToken)
	req.Header.Set("Content-Type", "application/json")
	conn, err := net.Dial("tcp", w.api.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(req.Write(conn), conn.Close()); err != nil {
		t.Fatal(err)
	}
	w.waitFor("created", func() bool { return w.do("GET", "/disks/d?project=proj", "").status == 200 })
}

func TestLatencyHoldsForEveryCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const latency = 30 * time.Millisecond
		w := newTimedWorld(t, simrack.Options{Latency: latency})
		for _, path := range []string{"/ping", "/nonexistent", "/disks?project=proj"} {
			begin := time.Now()
			w.do("GET", path, "")
			if took := time.Since(begin); took < latency {
				t.Errorf("%s took %v", path, took)
			}
		}
		// The next calls would not return in time if they still waited.
		w.set(`{"latency_ms":3600000}`)
		w.set(`{"latency_ms":0}`)
		w.do("GET", "/ping", "")
	})
}

func TestLatencyOfARange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const least, most, calls = 20 * time.Millisecond, 200 * time.Millisecond, 200
		w := newTimedWorld(t, simrack.Options{Latency: least, LatencyMax: most})
		shortest, longest := time.Hour, time.Duration(0)
		for range calls {
			begin := time.Now()
			w.do("GET", "/ping", "")
			took := time.Since(begin)
			shortest, longest = min(shortest, took), max(longest, took)
		}
		// With 200 calls the tenth at either end is reached, but for one run in a billion.
		const tenth = (most - least) / 10
		if shortest < least || shortest > least+tenth || longest < most-tenth || longest > most+time.Millisecond {
			t.Errorf("calls took %s to %s, want about %s to %s", shortest, longest, least, most)
		}
	})
}

// TestCallsPerSecond checks that calls count in the second of their arrival, not of their answer.
func TestCallsPerSecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTimedWorld(t, simrack.Options{})
		type rate struct {
			Began   time.Time
			Seconds []int
		}
		check := func(want rate) {
			t.Helper()
			var got rate
			w.operate("GET", "/rate", "", 200, &got)
			if diff := cmp.Diff(want, got); diff != "" {
				t.Error(diff)
			}
		}
		w.operate("DELETE", "/calls", "", 204, nil)
		check(rate{Seconds: []int{}})
		began := time.Now()
		w.do("GET", "/ping", "")
		w.set(`{"latency_ms":1500}`)
		w.do("GET", "/ping", "")
		w.set(`{"latency_ms":0}`)
		time.Sleep(1500 * time.Millisecond) // of the bubble's clock: the next call is in another second
		w.do("GET", "/nonexistent", "")
		check(rate{Began: began, Seconds: []int{2, 0, 0, 1}})
		w.operate("DELETE", "/calls", "", 204, nil)
		check(rate{Seconds: []int{}})
	})
}
