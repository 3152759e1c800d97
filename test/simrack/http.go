// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
)

// oldestAPIVersion is the first version that release 20 still serves. Older versions have no routes
// (docs/reference/rack.md §1).
var oldestAPIVersion = apiVersion{2025112000, 0, 0}

// action does what a parsed request asks, for an authenticated caller.
type action func(who caller) (answer, error)

// answer is a successful response. A nil body means a response without a body.
type answer struct {
	status int
	body   any
}

// route is one operation of the API. Its parse function reads path, query and body, in this order, and nothing else.
// Parsing comes before authentication (docs/reference/rack.md §1).
type route struct {
	method    string
	path      []string // "*" matches one segment
	operation string
	// public operations need no token.
	public bool
	parse  func(r *Rack, q *request) (action, error)
}

func newRoute(method, path, operation string, parse func(*Rack, *request) (action, error)) route {
	return route{method: method, path: strings.Split(path, "/")[1:], operation: operation, parse: parse}
}

// routes are the operations that the rack serves, named by the operation IDs of the schema.
var routes = buildRoutes()

func buildRoutes() []route {
	list := []route{
		newRoute("GET", "/v1/ping", "ping", parsePing),
		newRoute("GET", "/v1/me", "current_user_view", parseMe),
		newRoute("GET", "/v1/me/access-tokens", "current_user_access_token_list", parseTokenList),
		newRoute("GET", "/v1/me/groups", "current_user_groups", parseUserGroups),
		newRoute("GET", "/v1/policy", "policy_view", parseSiloPolicy),
		newRoute("GET", "/v1/projects/*/policy", "project_policy_view", parseProjectPolicy),
		newRoute("GET", "/v1/projects", "project_list", parseProjectList),
		newRoute("POST", "/v1/projects", "project_create", parseProjectCreate),
		newRoute("GET", "/v1/projects/*", "project_view", parseProjectView),
		newRoute("GET", "/v1/utilization", "utilization_view", parseUtilization),
		newRoute("GET", "/v1/system/hardware/racks", "rack_list", parseRackList),
		newRoute("GET", "/v1/disks", "disk_list", parseDiskList),
		newRoute("POST", "/v1/disks", "disk_create", parseDiskCreate),
		newRoute("GET", "/v1/disks/*", "disk_view", parseDiskView),
		newRoute("DELETE", "/v1/disks/*", "disk_delete", parseDiskDelete),
		newRoute("GET", "/v1/snapshots", "snapshot_list", parseSnapshotList),
		newRoute("POST", "/v1/snapshots", "snapshot_create", parseSnapshotCreate),
		newRoute("GET", "/v1/snapshots/*", "snapshot_view", parseSnapshotView),
		newRoute("DELETE", "/v1/snapshots/*", "snapshot_delete", parseSnapshotDelete),
		newRoute("GET", "/v1/anti-affinity-groups", "anti_affinity_group_list", parseGroupList),
		newRoute("POST", "/v1/anti-affinity-groups", "anti_affinity_group_create", parseGroupCreate),
		newRoute("GET", "/v1/anti-affinity-groups/*", "anti_affinity_group_view", parseGroupView),
		newRoute("PUT", "/v1/anti-affinity-groups/*", "anti_affinity_group_update", parseGroupUpdate),
		newRoute("DELETE", "/v1/anti-affinity-groups/*", "anti_affinity_group_delete", parseGroupDelete),
		newRoute("GET", "/v1/instances", "instance_list", parseInstanceList),
		newRoute("POST", "/v1/instances", "instance_create", parseInstanceCreate),
		newRoute("GET", "/v1/instances/*", "instance_view", parseInstanceView),
		newRoute("PUT", "/v1/instances/*", "instance_update", parseInstanceUpdate),
		newRoute("DELETE", "/v1/instances/*", "instance_delete", parseInstanceDelete),
		newRoute("POST", "/v1/instances/*/start", "instance_start", parseInstanceStart),
		newRoute("POST", "/v1/instances/*/stop", "instance_stop", parseInstanceStop),
		newRoute("POST", "/v1/instances/*/reboot", "instance_reboot", parseInstanceReboot),
		newRoute("GET", "/v1/instances/*/disks", "instance_disk_list", parseInstanceDiskList),
		newRoute("POST", "/v1/instances/*/disks/attach", "instance_disk_attach", parseAttach),
		newRoute("POST", "/v1/instances/*/disks/detach", "instance_disk_detach", parseDetach),
		newRoute("GET", "/v1/instances/*/external-ips", "instance_external_ip_list", parseExternalIPList),
		newRoute("GET", "/v1/network-interfaces", "instance_network_interface_list", parseNetworkInterfaceList),
	}
	list[0].public = true
	return list
}

// request is a request that is being parsed.
type request struct {
	http    *http.Request
	segment string // the path segment that matched "*"
	query   url.Values
}

// API is the rack's API. A request is completed even if its client has gone.
//
// Faults that end a connection, or make it silent, need a server with [Listener] and [ConnContext]. Other servers must
// support hijacking, as net/http does for HTTP/1, and have no fault "silent".
func (r *Rack) API() http.Handler { return http.HandlerFunc(r.serveAPI) }

func (r *Rack) serveAPI(w http.ResponseWriter, req *http.Request) {
	r.calls.arrive()
	r.sleep(r.settings.Load().callTime())
	op, segment, refused := r.route(req)
	operation := ""
	if op != nil {
		operation = op.operation
	}
	hit := r.faults.match(operation)
	kind := ""
	if hit != nil {
		kind = hit.Kind
	}
	entry := callEntry{Operation: operation, Method: req.Method, Path: req.URL.Path, Fault: kind}
	if kind == faultReset {
		r.calls.record(entry)
		resetConnection(w, req)
		return
	}
	ans, err := answer{}, refused
	switch {
	case refused != nil:
	case kind == faultStatus:
		err = hit.apiError()
	default:
		if kind == faultDelay {
			r.sleep(hit.delay())
		}
		ans, err = r.perform(op, &request{http: req, segment: segment})
	}
	switch kind {
	case faultDone:
		err = hit.apiError()
	case faultLost:
		r.calls.record(entry)
		if c := connectionOf(req.Context()); c != nil {
			if err := c.Close(); err != nil {
				r.log.Debug("client has gone", "operation", entry.Operation, "error", err)
			}
		}
		panic(http.ErrAbortHandler) // net/http closes the connection without an answer, unless it is HTTP/2
	case faultSilent:
		if c := connectionOf(req.Context()); c != nil {
			c.goSilent()
		}
	}
	r.reply(w, req, entry, ans, err)
}

// perform parses, authenticates and executes a request.
func (r *Rack) perform(op *route, q *request) (answer, error) {
	do, err := op.parse(r, q)
	if err != nil {
		return answer{}, err
	}
	who, known := r.authenticate(q.http.Header)
	if !known && !op.public {
		return answer{}, fail(401, codeUnauthorized, "credentials missing or invalid")
	}
	return do(who)
}

// authenticate finds the caller by the bearer token. A token without the prefix of the rack's tokens counts as missing.
func (r *Rack) authenticate(h http.Header) (caller, bool) {
	scheme, token, _ := strings.Cut(h.Get("Authorization"), " ")
	if !strings.EqualFold(scheme, "Bearer") || !strings.HasPrefix(token, tokenPrefix) {
		return caller{}, false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	t, known := r.tokens[token]
	if !known || t.expired() {
		return caller{}, false
	}
	return t.caller(), true
}

// route finds the operation of a request, and the path segment that names its object.
func (r *Rack) route(req *http.Request) (*route, string, error) {
	version, err := requestVersion(req.Header, r.settings.Load().apiVersionMax)
	if err != nil {
		return nil, "", err
	}
	segments, err := splitPath(req.URL)
	if err != nil {
		return nil, "", err
	}
	var allow []string
	for i := range routes {
		op := &routes[i]
		segment, matches := op.match(segments)
		if !matches || version.less(oldestAPIVersion) {
			continue
		}
		if op.method == req.Method {
			return op, segment, nil
		}
		allow = append(allow, op.method)
	}
	if len(allow) > 0 {
		slices.Sort(allow)
		return nil, "", &apiError{status: 405, message: "Method Not Allowed", allow: strings.Join(allow, ", ")}
	}
	return nil, "", fail(404, codeNone, "Not Found")
}

// splitPath splits a path into its decoded segments. Empty segments do not count, so "/v1/disks/" is the list of disks.
func splitPath(u *url.URL) ([]string, error) {
	var segments []string
	for part := range strings.SplitSeq(u.EscapedPath(), "/") {
		if part == "" {
			continue
		}
		decoded, err := url.PathUnescape(part)
		if err != nil || decoded == "." || decoded == ".." {
			return nil, badRequest("dot-segments are not permitted")
		}
		segments = append(segments, decoded)
	}
	return segments, nil
}

func (op *route) match(segments []string) (string, bool) {
	if len(segments) != len(op.path) {
		return "", false
	}
	segment := ""
	for i, want := range op.path {
		switch want {
		case "*":
			segment = segments[i]
		case segments[i]:
		default:
			return "", false
		}
	}
	return segment, true
}

// apiVersion is a semantic version without pre-release and build parts, which no release of the rack uses.
type apiVersion [3]uint64

func (v apiVersion) less(other apiVersion) bool { return slices.Compare(v[:], other[:]) < 0 }

func (v apiVersion) String() string { return fmt.Sprintf("%d.%d.%d", v[0], v[1], v[2]) }

func parseVersion(s string) (apiVersion, error) {
	core, _, _ := strings.Cut(s, "+")
	core, _, _ = strings.Cut(core, "-")
	parts := strings.Split(core, ".")
	var v apiVersion
	if s == "" {
		return v, errors.New("empty string, expected a semver version")
	}
	for i, name := range []string{"major", "minor", "patch"} {
		if i >= len(parts) {
			return v, fmt.Errorf("unexpected end of input while parsing %s version number", name)
		}
		n, err := strconv.ParseUint(parts[i], 10, 64)
		if err != nil {
			return v, fmt.Errorf("unexpected character while parsing %s version number", name)
		}
		v[i] = n
	}
	if len(parts) > 3 {
		return v, errors.New("unexpected character after patch version number")
	}
	return v, nil
}

// requestVersion is the version that a request asks for. A request without a version gets the newest.
func requestVersion(h http.Header, newest apiVersion) (apiVersion, error) {
	values := h.Values("Api-Version")
	if len(values) == 0 {
		return newest, nil
	}
	v, err := parseVersion(values[0])
	if err != nil {
		return v, badRequest(`bad value for header "api-version": %v: %s`, err, values[0])
	}
	if newest.less(v) {
		return v, badRequest("server does not support this API version: %s", values[0])
	}
	return v, nil
}

func badQuery(format string, args ...any) error {
	return badRequest("unable to parse query string: "+format, args...)
}

// param returns one query parameter.
func (q *request) param(key string) (string, bool, error) {
	if q.query == nil {
		// For an invalid query this keeps the parameters that can be decoded, as the rack's decoder does.
		q.query = q.http.URL.Query()
	}
	values := q.query[key]
	if len(values) > 1 {
		return "", false, badQuery("duplicate field `%s`", key)
	}
	if len(values) == 0 {
		return "", false, nil
	}
	return values[0], true, nil
}

// project returns the project parameter; nil if missing.
func (q *request) project() (*selector, error) {
	s, has, err := q.param("project")
	if err != nil || !has {
		return nil, err
	}
	sel, err := parseSelector(s)
	if err != nil {
		return nil, badQuery("%v", err)
	}
	return &sel, nil
}

func (q *request) needProject() (selector, error) {
	sel, err := q.project()
	if err != nil {
		return selector{}, err
	}
	if sel == nil {
		return selector{}, badQuery("missing field `project`")
	}
	return *sel, nil
}

// target is the object that the path names, with the project from the query, which a name needs.
type target struct {
	sel     selector
	project *selector
}

func (q *request) target() (target, error) {
	sel, err := parseSelector(q.segment)
	if err != nil {
		return target{}, badRequest("bad parameter in URL path: %v", err)
	}
	project, err := q.project()
	return target{sel: sel, project: project}, err
}

// reply sends an answer or an error. It records the call first, so that a client with an answer finds its call in the
// log.
func (r *Rack) reply(w http.ResponseWriter, req *http.Request, entry callEntry, ans answer, err error) {
	id := uuid.NewString()
	var body []byte
	entry.Status = ans.status
	if err != nil {
		refusal := r.toAPIError(req, err)
		entry.Status = refusal.status
		if refusal.allow != "" {
			w.Header().Set("Allow", refusal.allow)
		}
		body = encode(errorBody{RequestID: id, ErrorCode: refusal.code, Message: refusal.message}, "  ")
	} else if ans.body != nil {
		var changed bool
		if body, changed = r.shown.apply(encode(ans.body, "")); changed {
			w.Header().Set(shownHeader, "true")
		}
	}
	r.calls.record(entry)
	w.Header().Set("X-Request-Id", id)
	if body != nil {
		w.Header().Set("Content-Type", "application/json")
		body = compress(w.Header(), req.Header, body)
		w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	}
	w.WriteHeader(entry.Status)
	if _, err := w.Write(body); err != nil {
		r.log.Debug("client has gone", "operation", entry.Operation, "error", err)
	}
}

// toAPIError turns an error into the rack's answer. An error without an answer is a failure of the simulator.
func (r *Rack) toAPIError(req *http.Request, err error) *apiError {
	var refusal *apiError
	if errors.As(err, &refusal) {
		return r.settings.Load().inOtherWords(refusal)
	}
	r.log.Error("the simulator failed", "method", req.Method, "path", req.URL.Path, "error", err)
	return &apiError{status: 500, code: codeInternal, message: messageInternal}
}

// encode marshals without the HTML escapes of encoding/json, which the rack does not have.
func encode(v any, indent string) []byte {
	var buf bytes.Buffer
	e := json.NewEncoder(&buf)
	e.SetEscapeHTML(false)
	e.SetIndent("", indent)
	if err := e.Encode(v); err != nil {
		panic("a view does not marshal: " + err.Error())
	}
	return bytes.TrimRight(buf.Bytes(), "\n")
}

// minCompressedBytes is the smallest body that the rack's HTTP server compresses.
const minCompressedBytes = 512

var gzipWriters = sync.Pool{New: func() any {
	w, err := gzip.NewWriterLevel(nil, gzip.BestSpeed)
	if err != nil {
		panic("gzip refuses its own level: " + err.Error())
	}
	return w
}}

// compress applies gzip if the client asked for it.
func compress(response, request http.Header, body []byte) []byte {
	if len(body) < minCompressedBytes || !acceptsGzip(request) {
		return body
	}
	w := gzipWriters.Get().(*gzip.Writer)
	defer gzipWriters.Put(w)
	var buf bytes.Buffer
	w.Reset(&buf)
	if _, err := w.Write(body); err != nil {
		return body
	}
	if err := w.Close(); err != nil {
		return body
	}
	response.Set("Content-Encoding", "gzip")
	return buf.Bytes()
}

func acceptsGzip(h http.Header) bool {
	for _, encoding := range strings.Split(h.Get("Accept-Encoding"), ",") {
		if strings.EqualFold(strings.TrimSpace(encoding), "gzip") {
			return true
		}
	}
	return false
}

// resetConnection closes the client's connection with a reset.
func resetConnection(w http.ResponseWriter, req *http.Request) {
	if c := connectionOf(req.Context()); c != nil {
		if err := c.reset(); err == nil || req.ProtoMajor > 1 {
			panic(http.ErrAbortHandler)
		}
	}
	conn, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	if tcp, is := conn.(*net.TCPConn); is {
		// Without a linger time the kernel sends a reset. If this fails, the client sees an ordinary end of the connection.
		if err := tcp.SetLinger(0); err != nil {
			panic(http.ErrAbortHandler)
		}
	}
	if err := conn.Close(); err != nil {
		panic(http.ErrAbortHandler)
	}
}

// sleep waits. It returns false, early, when the rack is closed.
func (r *Rack) sleep(d time.Duration) bool {
	if d <= 0 {
		select {
		case <-r.closed:
			return false
		default:
			return true
		}
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-r.closed:
		return false
	}
}
