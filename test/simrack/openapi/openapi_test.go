// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package openapi

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// listener is a testing.TB that only records errors.
type listener struct {
	testing.TB
	errors []string
}

func (l *listener) Helper() {}
func (l *listener) Errorf(format string, args ...any) {
	l.errors = append(l.errors, fmt.Sprintf(format, args...))
}
func (l *listener) Logf(string, ...any) {}
func (l *listener) Fatalf(format string, args ...any) {
	l.Errorf(format, args...)
	panic(l)
}

const (
	id = "6f1b2c3d-4e5f-4a6b-8c7d-9e0f1a2b3c4d"
	at = "2026-06-08T00:00:00Z"
)

var (
	disk = fmt.Sprintf(`{"id":%q,"name":"d","description":"","project_id":%q,"size":1073741824,"block_size":512,`+
		`"disk_type":"distributed","state":{"state":"detached"},"read_only":false,"snapshot_id":null,"image_id":null,`+
		`"device_path":"/mnt/d","time_created":%q,"time_modified":%q}`, id, id, at, at)
	create = `{"name":"d","description":"","size":1073741824,` +
		`"disk_backend":{"type":"distributed","disk_source":{"type":"blank","block_size":512}}}`
)

func TestMismatchWithTheSchemaIsAnError(t *testing.T) {
	if os.Getenv(variable) == "" {
		t.Skipf("%s is not set: checks against the rack's API schema are left out", variable)
	}
	tests := []struct {
		name               string
		method, path, body string
		status             int
		answer             string
		requestID          string
		wantError          string // part of the only error; empty for none
	}{
		{name: "a disk", method: "GET", path: "/v1/disks/" + id, status: 200, answer: disk},
		{name: "a created disk", method: "POST", path: "/v1/disks?project=p", body: create, status: 201, answer: disk},
		{name: "an answer without a body", method: "DELETE", path: "/v1/disks/" + id, status: 204},
		{name: "a refusal", method: "GET", path: "/v1/disks/" + id, status: 404,
			answer: `{"request_id":"R","error_code":"ObjectNotFound","message":"m"}`},
		{name: "a 404 for an unknown operation", method: "GET", path: "/v1/teapots", status: 404,
			answer: `{"request_id":"R","message":"Not Found"}`},
		{name: "a disk without its size", method: "GET", path: "/v1/disks/" + id, status: 200,
			answer: strings.Replace(disk, `"size":1073741824,`, "", 1), wantError: `"size"`},
		{name: "an unknown disk state", method: "GET", path: "/v1/disks/" + id, status: 200,
			answer: strings.Replace(disk, "detached", "lost", 1), wantError: "state"},
		{name: "attached without an instance", method: "GET", path: "/v1/disks/" + id, status: 200,
			answer: strings.Replace(disk, "detached", "attached", 1), wantError: "state"},
		{name: "an invalid name", method: "GET", path: "/v1/disks/" + id, status: 200,
			answer: strings.Replace(disk, `"name":"d"`, `"name":"d-"`, 1), wantError: "name"},
		{name: "a UUID as a name", method: "GET", path: "/v1/disks/" + id, status: 200,
			answer: strings.Replace(disk, `"name":"d"`, `"name":"f`+id[1:]+`"`, 1), wantError: "name"},
		{name: "an invalid ID", method: "GET", path: "/v1/disks/" + id, status: 200,
			answer: strings.Replace(disk, `"id":"6`, `"id":"x`, 1), wantError: "id"},
		{name: "a status of another operation", method: "GET", path: "/v1/disks/" + id, status: 202,
			answer: disk, wantError: "status is not supported"},
		{name: "success of an unknown operation", method: "GET", path: "/v1/teapots", status: 200,
			answer: "{}", wantError: "no such operation"},
		{name: "success of a request with a missing field", method: "POST", path: "/v1/disks?project=p",
			body: strings.Replace(create, "512", "1024", 1), status: 201, answer: disk, wantError: "the request does not fit"},
		{name: "success of a request without its project", method: "POST", path: "/v1/disks", body: create, status: 201,
			answer: disk, wantError: "the request does not fit"},
		{name: "an error code of null", method: "GET", path: "/v1/disks/" + id, status: 404,
			answer: `{"request_id":"R","error_code":null,"message":"m"}`, wantError: "error_code"},
		{name: "a request ID that differs from the header", method: "GET", path: "/v1/disks/" + id, status: 404,
			answer: `{"request_id":"S","message":"m"}`, wantError: "request_id"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			heard := &listener{TB: t}
			server := httptest.NewServer(Validator(heard)(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				if body, err := io.ReadAll(req.Body); err != nil || string(body) != test.body {
					t.Errorf("the handler got %q, error %v", body, err)
				}
				w.Header().Set("X-Request-Id", "R")
				if test.answer != "" {
					w.Header().Set("Content-Type", "application/json")
				}
				w.WriteHeader(test.status)
				if _, err := io.WriteString(w, test.answer); err != nil && test.answer != "" {
					t.Error(err)
				}
			})))
			req, err := http.NewRequest(test.method, server.URL+test.path, strings.NewReader(test.body))
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("Content-Type", "application/json")
			res, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(res.Body)
			if err != nil || string(got) != test.answer || res.StatusCode != test.status {
				t.Errorf("the client got %d %q, error %v", res.StatusCode, got, err)
			}
			if err := res.Body.Close(); err != nil {
				t.Error(err)
			}
			server.Close() // so that the handler has ended
			switch {
			case test.wantError == "" && len(heard.errors) > 0:
				t.Errorf("complaints: %q", heard.errors)
			case test.wantError != "" && (len(heard.errors) != 1 || !strings.Contains(heard.errors[0], test.wantError)):
				t.Errorf("errors: %q, want one with %q", heard.errors, test.wantError)
			}
		})
	}
}

func TestMissingSchemaFails(t *testing.T) {
	t.Setenv(variable, filepath.Join(t.TempDir(), "missing.json"))
	heard := &listener{TB: t}
	defer func() {
		if recover() != heard || len(heard.errors) != 1 {
			t.Errorf("complaints: %q", heard.errors)
		}
	}()
	Validator(heard)
}

func TestWithoutASchemaNothingIsChecked(t *testing.T) {
	t.Setenv(variable, "")
	heard := &listener{TB: t}
	rec := httptest.NewRecorder()
	Validator(heard)(http.NotFoundHandler()).ServeHTTP(rec, httptest.NewRequest("GET", "/v1/disks", nil))
	if rec.Code != 404 || len(heard.errors) > 0 {
		t.Errorf("%d, complaints %q", rec.Code, heard.errors)
	}
}
