// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// maxBodyBytes is the largest request body that the rack reads (docs/reference/rack.md §1).
const maxBodyBytes = 1 << 20

// fields is a JSON object of a request with undecoded values. Unknown fields are ignored, as the rack ignores them.
// Field names are case-sensitive, which encoding/json does not offer for a struct.
type fields struct {
	// path is the path of the object in the body, for messages: "" or "disk_backend.disk_source".
	path   string
	values map[string]json.RawMessage
}

// readBody reads a request body as one JSON object. Its errors are the rack's answers, checked in the rack's order:
// size, content type, syntax.
func readBody(req *http.Request) (fields, error) {
	raw, err := io.ReadAll(io.LimitReader(req.Body, maxBodyBytes+1))
	if err != nil {
		return fields{}, badRequest("error reading request body: %v", err)
	}
	if len(raw) > maxBodyBytes {
		return fields{}, badRequest("request body exceeded maximum size of %d bytes", maxBodyBytes)
	}
	if err := checkContentType(req.Header); err != nil {
		return fields{}, err
	}
	f := fields{}
	// Decode, not Unmarshal: the rack ignores everything after the first value.
	if err := json.NewDecoder(bytes.NewReader(raw)).Decode(&f.values); err != nil {
		return fields{}, bodyError("", syntaxError(raw, err))
	}
	if f.values == nil {
		return fields{}, bodyError("", errors.New("invalid type: null, expected struct"))
	}
	return f, nil
}

// checkContentType accepts JSON and a missing content type.
func checkContentType(h http.Header) error {
	values := h.Values("Content-Type")
	if len(values) == 0 {
		return nil
	}
	mime, _, _ := strings.Cut(values[0], ";")
	switch mime = strings.ToLower(strings.TrimRight(mime, " \t")); mime {
	case "application/json":
		return nil
	case "application/octet-stream", "application/x-www-form-urlencoded", "multipart/form-data":
		return badRequest(`expected content type "application/json", got "%s"`, mime)
	}
	return badRequest("unsupported mime type: %s", mime)
}

func bodyError(path string, why error) error {
	if path == "" {
		return badRequest("unable to parse JSON body: %v", why)
	}
	return badRequest("unable to parse JSON body: %s: %v", path, why)
}

// syntaxError describes in the rack's words a body that encoding/json cannot read.
func syntaxError(raw []byte, err error) error {
	var wrong *json.UnmarshalTypeError
	if errors.As(err, &wrong) {
		return fmt.Errorf("invalid type: %s, expected struct", describeJSON(raw))
	}
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		line := bytes.Count(raw, []byte("\n")) + 1
		column := len(raw) - (bytes.LastIndexByte(raw, '\n') + 1)
		return fmt.Errorf("EOF while parsing %s at line %d column %d", openAtEnd(raw), line, column)
	}
	return errors.New("expected value")
}

// openAtEnd names the value that is still open at the end of a truncated JSON text.
func openAtEnd(raw []byte) string {
	var open []byte
	var last byte // the last character outside strings that is not white space
	inString, escaped := false, false
	for _, c := range raw {
		if !inString && !bytes.ContainsRune([]byte(" \t\r\n"), rune(c)) {
			last = c
		}
		switch {
		case escaped:
			escaped = false
		case inString:
			escaped = c == '\\'
			inString = c != '"'
		case c == '"':
			inString = true
		case c == '{', c == '[':
			open = append(open, c)
		case (c == '}' || c == ']') && len(open) > 0:
			open = open[:len(open)-1]
		}
	}
	switch {
	case inString:
		return "a string"
	case len(open) == 0, last == ':':
		return "a value"
	case open[len(open)-1] == '[':
		return "a list"
	}
	return "an object"
}

// describeJSON names a JSON value as the rack's messages do.
func describeJSON(raw json.RawMessage) string {
	text := strings.TrimSpace(string(raw))
	switch {
	case text == "null":
		return "null"
	case text == "true", text == "false":
		return "boolean `" + text + "`"
	case strings.HasPrefix(text, `"`):
		return "string " + text
	case strings.HasPrefix(text, "{"):
		return "map"
	case strings.HasPrefix(text, "["):
		return "sequence"
	case strings.ContainsAny(text, ".eE"):
		return "floating point `" + text + "`"
	}
	return "integer `" + text + "`"
}

func isNull(raw json.RawMessage) bool { return len(raw) == 0 || string(raw) == "null" }

func (f fields) at(key string) string {
	if f.path == "" {
		return key
	}
	return f.path + "." + key
}

// required returns the value of a required field.
func (f fields) required(key string) (json.RawMessage, error) {
	raw, has := f.values[key]
	if !has {
		return nil, bodyError(f.path, fmt.Errorf("missing field `%s`", key))
	}
	return raw, nil
}

func (f fields) text(key string) (string, error) {
	raw, err := f.required(key)
	if err != nil {
		return "", err
	}
	var s string
	if raw[0] != '"' || json.Unmarshal(raw, &s) != nil {
		return "", bodyError(f.at(key), fmt.Errorf("invalid type: %s, expected a string", describeJSON(raw)))
	}
	return s, nil
}

func (f fields) name(key string) (string, error) {
	s, err := f.text(key)
	if err != nil {
		return "", err
	}
	if why := checkName(s); why != nil {
		return "", bodyError(f.at(key), why)
	}
	return s, nil
}

func (f fields) selector(key string) (selector, error) {
	s, err := f.text(key)
	if err != nil {
		return selector{}, err
	}
	sel, why := parseSelector(s)
	if why != nil {
		return selector{}, bodyError(f.at(key), why)
	}
	return sel, nil
}

func (f fields) uuid(key string) (string, error) {
	s, err := f.text(key)
	if err != nil {
		return "", err
	}
	id, is := parseUUID(s)
	if !is {
		return "", bodyError(f.at(key), errors.New("UUID parsing failed"))
	}
	return id, nil
}

// byteCount reads a size in bytes, 0 to 2^63-1.
func (f fields) byteCount(key string) (int64, error) {
	n, err := f.unsigned(key, "u64", math.MaxUint64)
	if err == nil && n > math.MaxInt64 {
		err = bodyError(f.at(key), errors.New("value is too large for a byte count"))
	}
	return int64(n), err
}

// unsigned reads an integer from 0 to max. Messages name the type as kind.
func (f fields) unsigned(key, kind string, max uint64) (uint64, error) {
	raw, err := f.required(key)
	if err != nil {
		return 0, err
	}
	n, why := strconv.ParseUint(string(raw), 10, 64)
	if why == nil && n <= max {
		return n, nil
	}
	problem := "type"
	if _, isInt := strconv.ParseInt(string(raw), 10, 64); why == nil || isInt == nil {
		problem = "value"
	}
	if errors.Is(why, strconv.ErrRange) {
		// A floating point number gets the same message from the rack's parser.
		return 0, bodyError(f.at(key), errors.New("value is too large for a byte count"))
	}
	return 0, bodyError(f.at(key), fmt.Errorf("invalid %s: %s, expected %s", problem, describeJSON(raw), kind))
}

// flag reads an optional boolean.
func (f fields) flag(key string, fallback bool) (bool, error) {
	raw, has := f.values[key]
	if !has {
		return fallback, nil
	}
	switch string(raw) {
	case "true":
		return true, nil
	case "false":
		return false, nil
	}
	return false, bodyError(f.at(key), fmt.Errorf("invalid type: %s, expected a boolean", describeJSON(raw)))
}

// object reads a required field that holds an object.
func (f fields) object(key string) (fields, error) {
	raw, err := f.required(key)
	if err != nil {
		return fields{}, err
	}
	return parseObject(raw, f.at(key))
}

func parseObject(raw json.RawMessage, path string) (fields, error) {
	inner := fields{path: path}
	if raw[0] != '{' || json.Unmarshal(raw, &inner.values) != nil {
		return fields{}, bodyError(path, fmt.Errorf("invalid type: %s, expected struct", describeJSON(raw)))
	}
	return inner, nil
}

// oneOf reads a required field that holds one of the words.
func (f fields) oneOf(key string, words ...string) (string, error) {
	s, err := f.text(key)
	if err != nil {
		return "", err
	}
	if !slices.Contains(words, s) {
		return "", bodyError(f.at(key), fmt.Errorf("unknown variant `%s`, expected %s", s, quoteWords(words)))
	}
	return s, nil
}

// quoteWords lists words as the rack's messages do: `a`, or `a` or `b`, or one of `a`, `b`, `c`.
func quoteWords(words []string) string {
	quoted := "`" + strings.Join(words, "`, `") + "`"
	switch len(words) {
	case 1:
		return quoted
	case 2:
		return "`" + words[0] + "` or `" + words[1] + "`"
	}
	return "one of " + quoted
}

// maxDescription is the width of the rack's database column, in characters. A longer text is answered with 500
// (docs/reference/rack.md §2).
const maxDescription = 512

func checkDescription(s string) error {
	if utf8.RuneCountInString(s) > maxDescription {
		return fail(500, codeInternal, messageInternal)
	}
	return nil
}
