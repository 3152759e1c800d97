// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package verify

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
)

// A case may be repeated after a transient failure, and so may a step of its preparation.
var errTransient = errors.New("the rack did not answer the request")

// abortError ends the run: the other cases could not be played either.
type abortError struct{ why string }

func (e abortError) Error() string { return e.why }

func abort(format string, args ...any) error { return abortError{fmt.Sprintf(format, args...)} }

// request is one request. Path begins after /v1.
type request struct {
	method, path, body string
	// anonymous sends no token. version replaces the negotiated API version.
	anonymous bool
	version   string
}

func (q request) String() string { return strings.TrimSpace(q.method + " " + q.path + " " + q.body) }

// answer is an answer of the rack, or the error that came instead of one.
type answer struct {
	status int
	raw    []byte
	body   any // raw as JSON; numbers are json.Number
	took   time.Duration
	err    error
}

// code and message are those of a refusal. A code that is left out is "".
func (a answer) code() string    { return text(get(a.body, "error_code")) }
func (a answer) message() string { return text(get(a.body, "message")) }

func text(v any) string { s, _ := v.(string); return s }

// refusesVersion reports whether the rack does not know the API version of the request.
func (a answer) refusesVersion() bool {
	return a.status == 400 && strings.HasPrefix(a.message(), "server does not support this API version")
}

// String is the answer on one line, as a report shows it.
func (a answer) String() string {
	switch {
	case a.err != nil:
		return "no answer: " + a.err.Error()
	case a.status > 299:
		return fmt.Sprintf("%d %s %q", a.status, a.code(), a.message())
	}
	return fmt.Sprintf("%d %s", a.status, bytes.TrimSpace(a.raw))
}

// client sends requests to a rack.
type client struct {
	http    *http.Client
	host    string
	token   string
	agent   string
	version string
}

// requestTimeout is how long an answer may take. A rack may take minutes to create a disk or a snapshot.
const requestTimeout = 5 * time.Minute

// maxAnswer is more than a page of a list has.
const maxAnswer = 64 << 20

func (c *client) do(ctx context.Context, q request) (a answer) {
	begin := time.Now()
	defer func() { a.took = time.Since(begin) }()
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, q.method, c.host+"/v1"+q.path, strings.NewReader(q.body))
	if err != nil {
		return answer{err: err}
	}
	req.Header.Set("User-Agent", c.agent)
	req.Header.Set("Api-Version", c.version)
	if q.version != "" {
		req.Header.Set("Api-Version", q.version)
	}
	if !q.anonymous {
		req.Header.Set("Authorization", "Bearer "+c.token)
	}
	if q.body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return answer{err: err}
	}
	defer resp.Body.Close()
	a = answer{status: resp.StatusCode}
	if a.raw, a.err = io.ReadAll(io.LimitReader(resp.Body, maxAnswer)); a.err != nil || len(a.raw) == 0 {
		return a
	}
	d := json.NewDecoder(bytes.NewReader(a.raw))
	d.UseNumber()
	a.err = d.Decode(&a.body)
	return a
}

// releases are the releases of the rack's software that have an API version of their own, newest first
// (docs/reference/rack.md §1).
var releases = []struct{ name, version string }{
	{"22 or later", "2026073100.0.0"}, {"21", "2026061000.0.0"}, {"20", "2026060800.0.0"},
	{"19", "2026032500.0.0"}, {"18", "2026021301.0.0"},
}

const (
	// spoken is the newest API version that the plugin speaks.
	spoken = "2026060800.0.0"
	// future is later than any version.
	future = "9999123100.0.0"
)

// negotiate finds the newest release whose API version the rack serves. Its pings carry no token: a server that turns
// out not to be a rack must not see one.
func (r *run) negotiate(ctx context.Context) error {
	ping := func(version string) (a answer, err error) {
		err = r.retry(ctx, func() (step, error) {
			a, err = r.send(ctx, request{method: "GET", path: "/ping", anonymous: true, version: version})
			return done, err
		})
		return a, err
	}
	a, err := ping(future)
	switch {
	case err != nil:
		return err
	case !a.refusesVersion():
		return abort("the server does not check API versions: it is a rack of release 17 or older, or no rack at all")
	}
	for _, release := range releases {
		if a, err = ping(release.version); err != nil {
			return err
		}
		if a.status == http.StatusOK {
			r.report.Rack.Release, r.report.Rack.APIVersion = release.name, release.version
			r.client.version = min(release.version, spoken) // versions begin with their date
			return nil
		}
	}
	return abort("the rack serves none of the API versions of releases 18 to 22: %s", a)
}
