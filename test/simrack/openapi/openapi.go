// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package openapi checks the simulated rack, and its clients in tests, against the rack's published schema.
//
// The schema file is not part of this repository. Tests read it from the path in the environment variable
// OXIDE_OPENAPI. Without the variable nothing is checked. A variable that names no schema fails the test.
package openapi

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/getkin/kin-openapi/openapi3filter"
	"github.com/getkin/kin-openapi/routers"
	"github.com/getkin/kin-openapi/routers/legacy"
)

// variable names the environment variable with the path of the schema file.
const variable = "OXIDE_OPENAPI"

// Validator returns a wrapper for a rack's API handler. It checks every response, and every request that succeeds,
// against the schema; a mismatch is an error of the test. A request whose connection is closed without an answer is not
// checked. The handler must no longer be in use when the test ends.
//
// Requests may use notations that the rack accepts and the schema does not know, such as a UUID without hyphens. Tests
// of such requests do not use the wrapper.
func Validator(t testing.TB) func(http.Handler) http.Handler {
	t.Helper()
	path := os.Getenv(variable)
	if path == "" {
		t.Logf("%s is not set: checks against the rack's API schema are left out", variable)
		return func(h http.Handler) http.Handler { return h }
	}
	router, err := load(path)
	if err != nil {
		t.Fatalf("load the schema that %s names: %v", variable, err)
	}
	return func(h http.Handler) http.Handler { return &checker{t: t, router: router, next: h} }
}

var (
	loading sync.Mutex
	loaded  = map[string]routers.Router{}
)

// load reads a schema file once per process.
func load(path string) (routers.Router, error) {
	loading.Lock()
	defer loading.Unlock()
	if router, has := loaded[path]; has {
		return router, nil
	}
	doc, err := openapi3.NewLoader().LoadFromFile(path)
	if err != nil {
		return nil, err
	}
	router, err := legacy.NewRouter(doc, openapi3.SetRegexCompiler(compile))
	if err != nil {
		return nil, err
	}
	loaded[path] = router
	return router, nil
}

// notInSchema are operations of a rack that the schema file lacks: it is an extract. Their answers are compared with
// the SDK's types (test/simrack, TestU1TokensOfAUser and TestU2Policies).
var notInSchema = regexp.MustCompile(
	`^GET /v1/(me/access-tokens|me/groups|network-interfaces|policy|projects/[^/]+/policy)$`,
)

type checker struct {
	t      testing.TB
	router routers.Router
	next   http.Handler
}

func (c *checker) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	body, err := io.ReadAll(req.Body)
	if err != nil {
		// The client stopped sending. The rack will see the same.
		c.next.ServeHTTP(w, req)
		return
	}
	req.Body = io.NopCloser(bytes.NewReader(body))
	// The recorder reads uncompressed answers only. The client of net/http accepts both.
	req.Header.Del("Accept-Encoding")
	rec := &recorder{ResponseWriter: w}
	c.next.ServeHTTP(rec, req)
	if rec.hijacked || rec.Header().Get("X-Simulated-Fields") != "" { // such an answer is to be none of the schema
		return
	}
	for _, problem := range c.check(req, body, rec) {
		c.t.Errorf("%s %s answered %d: %v\nrequest: %s\nresponse: %s",
			req.Method, req.URL, rec.status, problem, body, rec.body.Bytes())
	}
}

// check lists mismatches with the schema.
func (c *checker) check(req *http.Request, body []byte, rec *recorder) (problems []error) {
	id := rec.Header().Get("X-Request-Id")
	if id == "" {
		problems = append(problems, fmt.Errorf("no x-request-id"))
	}
	if rec.status >= 400 {
		var refusal struct {
			RequestID string `json:"request_id"`
		}
		if err := json.Unmarshal(rec.body.Bytes(), &refusal); err != nil || refusal.RequestID != id {
			problems = append(problems, fmt.Errorf("request_id is %q, x-request-id %q", refusal.RequestID, id))
		}
	}
	route, params, err := c.router.FindRoute(req)
	if err != nil {
		// Only a routing error can answer an operation that the schema does not know. Checks of version and token come before
		// or after routing, so any other error would be wrong.
		if rec.status < 400 && !notInSchema.MatchString(req.Method+" "+req.URL.Path) {
			problems = append(problems, fmt.Errorf("the schema has no such operation: %w", err))
		}
		return problems
	}
	options := &openapi3filter.Options{
		IncludeResponseStatus: true,
		SkipSettingDefaults:   true,
		AuthenticationFunc:    openapi3filter.NoopAuthenticationFunc,
		RegexCompiler:         compile,
		SchemaValidationOptions: []openapi3.SchemaValidationOption{
			openapi3.SetSchemaRegexCompiler(compile),
			openapi3.WithStringFormatValidator("uuid", openapi3.NewRegexpFormatValidator(uuidPattern)),
		},
	}
	again := req.Clone(context.Background())
	again.Body = io.NopCloser(bytes.NewReader(body))
	input := &openapi3filter.RequestValidationInput{Request: again, PathParams: params, Route: route, Options: options}
	if rec.status < 300 {
		if err := openapi3filter.ValidateRequest(context.Background(), input); err != nil {
			problems = append(problems, fmt.Errorf("the request does not fit the schema: %w", err))
		}
	}
	err = openapi3filter.ValidateResponse(context.Background(), &openapi3filter.ResponseValidationInput{
		RequestValidationInput: input, Status: rec.status, Header: rec.Header(), Options: options,
		Body: io.NopCloser(bytes.NewReader(rec.body.Bytes())),
	})
	if err != nil {
		problems = append(problems, fmt.Errorf("the response does not fit the schema: %w", err))
	}
	return problems
}

const uuidPattern = `^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$`

// pattern is a regular expression of the schema: what must match, and what must not.
type pattern struct{ must, not *regexp.Regexp }

func (p pattern) MatchString(s string) bool {
	return p.must.MatchString(s) && (p.not == nil || !p.not.MatchString(s))
}

var (
	lookAhead  = regexp.MustCompile(`^\^\(\?!((?:[^()]|\([^()]*\))*)\)`)
	lookBehind = regexp.MustCompile(`\(\?<!.\)`)
)

// compile replaces look-around, which package regexp does not have. A negative look-ahead at the beginning becomes the
// pattern not. A look-behind is left out.
func compile(expr string) (openapi3.RegexMatcher, error) {
	var p pattern
	var err error
	if found := lookAhead.FindStringSubmatch(expr); found != nil {
		if p.not, err = regexp.Compile("^" + found[1]); err != nil {
			return nil, err
		}
		expr = strings.TrimPrefix(expr, found[0])
	}
	p.must, err = regexp.Compile(lookBehind.ReplaceAllString(expr, ""))
	return p, err
}

// recorder keeps a copy of a response. It lets a handler hijack the connection, as faults do.
type recorder struct {
	http.ResponseWriter
	status   int
	body     bytes.Buffer
	hijacked bool
}

func (r *recorder) WriteHeader(status int) {
	r.status = status
	r.ResponseWriter.WriteHeader(status)
}

func (r *recorder) Write(p []byte) (int, error) {
	if r.status == 0 {
		r.status = http.StatusOK
	}
	r.body.Write(p)
	return r.ResponseWriter.Write(p)
}

// Hijack implements [http.Hijacker]. Nothing that the handler writes to the connection afterwards is checked.
func (r *recorder) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	r.hijacked = true
	return http.NewResponseController(r.ResponseWriter).Hijack()
}
