// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package verify

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"reflect"
	"regexp"
	"slices"
	"strings"
)

const (
	recordingFormat   = "oxide-sim verify recording 1"
	recordingContains = "the requests of one run of oxide-sim verify and the rack's responses, in their order; " +
		"IDs, names and texts that the run did not choose are pseudonyms, and token and host are left out"
)

// place is where a request belongs: a request of a case by its number, or one that prepares a case. A request before
// all cases, or after them, has no case.
type place struct {
	Case     string `json:"case,omitempty"`
	Ask      int    `json:"ask,omitempty"`
	Prepares bool   `json:"prepares,omitempty"`
}

// line is a line of a recording. The first one has the format, the last one the report.
type line struct {
	Format   string `json:"format,omitempty"`
	Contains string `json:"contains,omitempty"`
	place
	Request *recordedRequest `json:"request,omitempty"`
	Answer  *recordedAnswer  `json:"answer,omitempty"`
	Millis  int64            `json:"ms,omitempty"`
	Report  *Report          `json:"report,omitempty"`
}

type recordedRequest struct {
	Method    string          `json:"method"`
	Path      string          `json:"path"`
	Body      json.RawMessage `json:"body,omitempty"`
	Anonymous bool            `json:"anonymous,omitempty"`
	Version   string          `json:"version,omitempty"`
}

type recordedAnswer struct {
	Status int             `json:"status,omitempty"`
	Body   json.RawMessage `json:"body,omitempty"`
	Error  string          `json:"error,omitempty"`
}

// recorder writes a recording, and replaces secrets by pseudonyms. A pseudonym stands for the same text everywhere in a
// recording and in its report.
type recorder struct {
	out    *json.Encoder // nil without a recording
	err    error         // of the first line that could not be written
	secret map[string]string
	count  map[string]int
}

func newRecorder(o Options) *recorder {
	r := &recorder{secret: map[string]string{}, count: map[string]int{}}
	r.secret[o.Token] = "token"
	if host, err := url.Parse(o.Host); err == nil && host.Host != "" {
		r.secret[host.Host], r.secret[host.Hostname()] = "host", "host"
	}
	r.learnProject(o.Project)
	r.learnProject(o.EmptyProject)
	r.secret[o.Instance] = "the-instance"
	delete(r.secret, "")
	if o.Record != nil {
		r.out = json.NewEncoder(o.Record)
		r.out.SetEscapeHTML(false)
		r.write(line{Format: recordingFormat, Contains: recordingContains})
	}
	return r
}

func (r *recorder) write(l line) {
	if r.out != nil && r.err == nil {
		r.err = r.out.Encode(l)
	}
}

// add adds a request and its answer.
func (r *recorder) add(at place, q request, a answer) {
	if r.out == nil {
		return
	}
	l := line{
		place: at, Millis: a.took.Milliseconds(),
		Request: &recordedRequest{
			Method:    q.method,
			Path:      r.scrub(q.path),
			Body:      r.scrubJSON([]byte(q.body)),
			Anonymous: q.anonymous,
			Version:   q.version,
		},
		Answer: &recordedAnswer{Status: a.status, Body: r.scrubJSON(a.raw)},
	}
	if a.err != nil {
		l.Answer.Error = r.scrub(a.err.Error())
	}
	r.write(l)
}

// finish ends the recording with the report.
func (r *recorder) finish(report *Report) error {
	r.write(line{Report: report})
	return r.err
}

// learnProject makes the project's name a secret.
func (r *recorder) learnProject(name string) {
	if name != "" {
		r.secret[name] = "the-project"
	}
}

// pseudonym returns the text that stands for a secret, such as uuid-3.
func (r *recorder) pseudonym(kind, secret string) string {
	if known, has := r.secret[secret]; has {
		return known
	}
	r.count[kind]++
	r.secret[secret] = fmt.Sprintf("%s-%d", kind, r.count[kind])
	return r.secret[secret]
}

// patterns are texts that are secrets wherever they stand.
var patterns = []struct {
	kind string
	text *regexp.Regexp
}{
	{"token", regexp.MustCompile("(?i)oxide-token-[^\\s\"'`]+")},
	{"uuid", regexp.MustCompile(`(?i)[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}`)},
	{"address", regexp.MustCompile(`[\w.+-]+@[\w.-]+`)},
	{"page", regexp.MustCompile(`page_token=[^&\s"]+`)},
	{"host", regexp.MustCompile(`(?i)\b[a-z0-9-]+(?:\.[a-z0-9-]+)*\.[a-z]{2,}(?::\d+)?\b`)},
	{"address", regexp.MustCompile(`\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b`)},
	{"address", regexp.MustCompile(`(?i)\[?[0-9a-f]{0,4}(?::[0-9a-f]{0,4}){3,7}\]?(?::\d+)?`)},
}

// answer is an answer of the rack on one line.
func (r *recorder) answer(a answer) string {
	if a.err == nil && a.status < 300 {
		return fmt.Sprintf("%d %s", a.status, r.scrubJSON(a.raw))
	}
	return r.scrub(a.String())
}

// scrub replaces secrets in a text from outside: those that are known, and what looks like one.
func (r *recorder) scrub(s string) string {
	s = r.known(s)
	for _, p := range patterns {
		s = p.text.ReplaceAllStringFunc(s, func(found string) string {
			if found == missingID {
				return found // of no object: cases use it
			}
			if value, is := strings.CutPrefix(found, "page_token="); is {
				return "page_token=" + r.pseudonym(p.kind, value)
			}
			return r.pseudonym(p.kind, found)
		})
	}
	return s
}

// known replaces the secrets that are known, as whole words. It is enough for a text of this program. A name of one or
// two letters would be replaced in the middle of sentences; it tells nothing.
func (r *recorder) known(s string) string {
	known := make([]string, 0, len(r.secret))
	for secret := range r.secret {
		if len(secret) > 2 {
			known = append(known, secret)
		}
	}
	slices.SortFunc(known, func(a, b string) int { return len(b) - len(a) })
	for _, secret := range known {
		if strings.Contains(s, secret) {
			s = replaceWord(s, secret, r.secret[secret])
		}
	}
	return s
}

// replaceWord replaces a word where neither side of it continues it.
func replaceWord(s, word, by string) string {
	continues := func(c byte) bool {
		return c == '_' || c == '-' || '0' <= c && c <= '9' || 'a' <= c|0x20 && c|0x20 <= 'z'
	}
	var b strings.Builder
	for {
		at := strings.Index(s, word)
		if at < 0 {
			return b.String() + s
		}
		end := at + len(word)
		b.WriteString(s[:at])
		if at > 0 && continues(s[at-1]) || end < len(s) && continues(s[end]) {
			b.WriteString(word)
		} else {
			b.WriteString(by)
		}
		s = s[end:]
	}
}

// plain are the fields whose texts are words of the API or of a guest, and no secrets.
var plain = map[string]bool{
	"state":               true,
	"run_state":           true,
	"disk_type":           true,
	"error_code":          true,
	"policy":              true,
	"failure_domain":      true,
	"identity_type":       true,
	"role_name":           true,
	"type":                true,
	"status":              true,
	"kind":                true,
	"auto_restart_policy": true,
	"cpu_platform":        true,
	"kernel":              true,
	"sys_vendor":          true,
	"product_name":        true,
	"pci":                 true,
	"controller":          true,
	"tools":               true,
}

var (
	wholeUUID  = regexp.MustCompile(`^` + patterns[1].text.String() + `$`)
	timestamp  = regexp.MustCompile(`^\d{4}-\d\d-\d\dT[\d:.]+Z$`)
	deviceName = regexp.MustCompile(`^nvme\d+n\d+$`)
)

// scrubJSON replaces the secrets of a JSON value: every text that is no word of the API, and that the run did not
// choose. It returns a text that is no JSON as a JSON string.
func (r *recorder) scrubJSON(raw []byte) json.RawMessage {
	if len(bytes.TrimSpace(raw)) == 0 {
		return nil
	}
	var v any
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	if err := d.Decode(&v); err != nil {
		v = r.scrub(string(raw))
	} else {
		v = r.scrubValue("", v)
	}
	out, err := json.Marshal(v)
	if err != nil {
		panic(err) // it was decoded from JSON
	}
	return out
}

func (r *recorder) scrubValue(key string, v any) any {
	switch v := v.(type) {
	case map[string]any:
		for k := range v {
			at := k
			if key == "tools" {
				at = key
			}
			v[k] = r.scrubValue(at, v[k])
		}
	case []any:
		for n := range v {
			v[n] = r.scrubValue(key, v[n])
		}
	case string:
		return r.scrubText(key, v)
	}
	return v
}

func (r *recorder) scrubText(key, s string) string {
	chosen := strings.HasPrefix(s, namePrefix) || strings.HasPrefix(s, marker) || strings.HasPrefix(s, "/mnt/"+namePrefix)
	switch {
	case s == "", s == missingID, s == uuidName, s == "nope", plain[key], deviceName.MatchString(s):
		return s
	case timestamp.MatchString(s):
		return "time"
	case wholeUUID.MatchString(s):
		return r.pseudonym("uuid", s)
	case key == "next_page":
		r.secret[url.QueryEscape(s)] = r.pseudonym("page", s)
		return r.secret[s]
	case key == "message", chosen:
		return r.scrub(s)
	}
	return r.pseudonym("text", s)
}

// Recording is what two recordings are compared by: the last answer to each request of each case.
type Recording struct {
	Report *Report
	asked  []place
	lines  map[place]line
}

// ReadRecording reads a recording.
func ReadRecording(from io.Reader) (Recording, error) {
	rec := Recording{lines: map[place]line{}}
	scan := bufio.NewScanner(from)
	scan.Buffer(nil, maxAnswer)
	for first := true; scan.Scan(); first = false {
		var l line
		if err := json.Unmarshal(scan.Bytes(), &l); err != nil {
			return rec, fmt.Errorf("a line of the recording is damaged: %w", err)
		}
		switch {
		case first && l.Format != recordingFormat:
			return rec, fmt.Errorf("this is no %s", recordingFormat)
		case l.Report != nil:
			rec.Report = l.Report
		case l.Ask > 0 && l.Request != nil && l.Answer != nil:
			if _, has := rec.lines[l.place]; !has {
				rec.asked = append(rec.asked, l.place)
			}
			rec.lines[l.place] = l
		}
	}
	if rec.Report == nil && scan.Err() == nil {
		return rec, errors.New("the recording is not complete: its last line has no report")
	}
	return rec, scan.Err()
}

// Differences compares the answers of another recording with those of this one, case by case. It leaves out a case that
// one of the two did not try for a good reason, such as an instance that stopped too fast.
func (rec Recording) Differences(other Recording) (found []string) {
	untried := func(r *Report, id string) bool {
		return slices.ContainsFunc(r.Results, func(one Result) bool {
			return one.ID == id && one.Outcome == NotTried && !one.Failed
		})
	}
	for _, at := range rec.asked {
		if untried(rec.Report, at.Case) || untried(other.Report, at.Case) {
			continue
		}
		want := rec.lines[at]
		got, has := other.lines[at]
		what := fmt.Sprintf("%s, request %d: %s %s", at.Case, at.Ask, want.Request.Method, want.Request.Path)
		switch {
		case !has:
			found = append(found, what+": not sent in the other recording")
		case want.Answer.Status != got.Answer.Status, !reflect.DeepEqual(form(want), form(got)):
			found = append(found, fmt.Sprintf("%s: recorded %d %s, the other %d %s",
				what, want.Answer.Status, want.Answer.Body, got.Answer.Status, got.Answer.Body))
		}
	}
	return found
}

var numbered = regexp.MustCompile(`\b(uuid|text|page|host|address)-\d+`)

// form is the body of an answer without what differs between two runs: which pseudonym, how much is used, and what the
// project has.
func form(l line) any {
	var v any
	if len(l.Answer.Body) == 0 || json.Unmarshal(l.Answer.Body, &v) != nil {
		return nil // it was marshalled from a value
	}
	return formOf("", v)
}

func formOf(key string, v any) any {
	switch v := v.(type) {
	case map[string]any:
		for k := range v {
			v[k] = formOf(k, v[k])
			if k == "request_id" {
				v[k] = "uuid"
			}
		}
	case []any:
		if len(v) > 0 {
			return []any{formOf(key, v[0])}
		}
	case string:
		return numbered.ReplaceAllString(v, "$1")
	case float64:
		if key == "cpus" || key == "memory" || key == "storage" {
			return "number"
		}
	}
	return v
}
