// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build helm

package helm_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"
)

// oddStrings are strings that YAML takes for something else, or that break a line of YAML, unless they are quoted.
var oddStrings = []string{
	"1", "1.5", "1e3", "0x1f", "0o17", "1_000", "12:30:45", "2001-01-01",
	"true", "false", "null", "~", "yes", "no", "on", "off", "y", "n", "NO", "ON", "NULL", "Y",
	"a: b", "a:", "a #b", "#a", "- a", "*a", "&a", "!a", "|", ">", "%a", "@a", "`a", "{a: b}", "[a", "{{ a }}", "?", "=",
	`"`, `a"b`, "it's", `a\`, " a", "a ", "a\nb", "a\tb", "é\u2028", "/a: b", "/it's #b", `http://a"b`,
}

// plainForms are forms of strings that need no quotes. One of them fits each value of the chart.
var plainForms = []string{
	"plain%d", "PLAIN%d", "/plain%d", "1m%ds", "%dGi", "%d%%", "sha256:%064d", "-----BEGIN CERTIFICATE-----plain%d",
}

// TestStringsAreQuoted renders the chart with odd strings in every value of the schema that is a free string, and in
// the names of release and namespace. The result must be that of plain strings, with the odd ones in their place.
func TestStringsAreQuoted(t *testing.T) {
	rendered := map[string]bool{}
	var paths []string
	for name, scene := range map[string]func(values object){
		"several racks": func(values object) {
			values["attachMode"] = "restart"
			values["node"].(object)["registration"] = "plugin"
			values["node"].(object)["identity"] = "auto"
		},
		"one rack": func(values object) {
			for _, key := range []string{"racks", "clusterID", "restartDrain"} {
				delete(values, key)
			}
			for _, image := range []any{values["image"], values["buckets"].(object)["driver"]} {
				delete(image.(object), "digest")
				delete(image.(object), "controllerDigest")
			}
			values["node"].(object)["registration"] = "sidecar"
			values["node"].(object)["identity"] = "init"
			values["node"].(object)["awaitDetachSeconds"] = 0
		},
	} {
		t.Run(name, func(t *testing.T) {
			plain := &filler{t: t, round: -1}
			want := plain.render(scene)
			for path, text := range plain.chosen {
				paths = append(paths, path)
				rendered[path] = rendered[path] || contains(want, text)
			}
			for round := range oddStrings {
				t.Run(fmt.Sprintf("round %d", round), func(t *testing.T) {
					t.Parallel()
					odd := &filler{t: t, round: round}
					got := odd.render(scene)
					var pairs []string
					for path, text := range plain.chosen {
						pairs = append(pairs, text, odd.chosen[path])
					}
					if diff := cmp.Diff(replaced(want, strings.NewReplacer(pairs...)), got); diff != "" {
						t.Errorf("as it should be (-), as it is (+):\n%s", diff)
					}
				})
			}
		})
	}
	for _, path := range paths {
		if !rendered[path] {
			t.Errorf("%s is in no object: this test does not show it", path)
		}
	}
}

// filler makes values for the whole chart by its schema.
type filler struct {
	t *testing.T
	// round chooses odd strings. If it is negative, all strings are plain.
	round int
	// chosen has the free strings by their paths.
	chosen map[string]string

	definitions object
}

// render returns the objects of the chart with all values. scene changes those that exclude others.
func (f *filler) render(scene func(values object)) []any {
	f.t.Helper()
	text, err := os.ReadFile(filepath.Join(chart, "values.schema.json"))
	must(f.t, err)
	var schema object
	must(f.t, json.Unmarshal(text, &schema))
	f.chosen, f.definitions = map[string]string{}, at[object](f.t, schema, "definitions")
	values := f.fill("", schema).(object)
	scene(values)
	text, err = json.Marshal(values)
	must(f.t, err)
	file := filepath.Join(f.t.TempDir(), "values.json")
	must(f.t, os.WriteFile(file, text, 0o600))
	name := object{"$ref": "#/definitions/object-name"}
	out := run(f.t, program(f.t, "helm", "helm"), "template", f.fill("release", name).(string), chart,
		"--namespace="+f.fill("namespace", name).(string), "--kube-version=1.36.0", "--values="+file)
	var objects []any
	for document := range strings.SplitSeq(string(out), "\n---\n") {
		var o object
		must(f.t, yaml.Unmarshal([]byte(document), &o)) // as helm and kubectl do
		objects = append(objects, f.comparable(o))
	}
	return objects
}

// fill returns a value for a schema.
func (f *filler) fill(path string, schema object) any {
	if ref, ok := schema["$ref"].(string); ok {
		return f.fill(path, at[object](f.t, f.definitions, strings.TrimPrefix(ref, "#/definitions/")))
	}
	if choices, ok := schema["oneOf"].([]any); ok {
		return f.fill(path, choices[len(choices)-1].(object)) // the string, or the number instead of null
	}
	if value, ok := schema["const"]; ok {
		return value
	}
	if choices, ok := schema["enum"].([]any); ok {
		return choices[len(choices)-1]
	}
	kind := schema["type"]
	if kinds, ok := kind.([]any); ok {
		kind = kinds[0] // the other is null
	}
	switch kind {
	case "boolean":
		return true
	case "integer":
		if most, ok := schema["maximum"]; ok {
			return most
		}
		return 1234567
	case "array":
		return []any{f.fill(path+"[]", at[object](f.t, schema, "items"))}
	case "string":
		return f.choose(path, func(text string) bool { return fits(schema, text) })
	}
	return f.object(path, schema)
}

// object returns a map for a schema. A free map gets one key.
func (f *filler) object(path string, schema object) object {
	filled := object{}
	properties, _ := schema["properties"].(object)
	for _, key := range slices.Sorted(maps.Keys(properties)) {
		if key != "global" { // is not used
			filled[key] = f.fill(strings.TrimPrefix(path+"."+key, "."), properties[key].(object))
		}
	}
	if len(properties) > 0 {
		return filled
	}
	names, _ := schema["propertyNames"].(object)
	values, _ := schema["additionalProperties"].(object)
	key := f.choose(path+" key", func(text string) bool { return fits(names, text) })
	filled[key] = f.choose(path+" value", func(text string) bool { return fits(values, text) })
	return filled
}

// choose returns a string for the value at a path that fits there.
func (f *filler) choose(path string, fits func(string) bool) string {
	// Numbers of equal length: no plain string is the beginning of another.
	number := 100 + len(f.chosen)
	var chosen string
	for _, form := range plainForms {
		if text := fmt.Sprintf(form, number); fits(text) {
			chosen = text
			break
		}
	}
	if chosen == "" {
		f.t.Fatalf("no plain string fits %s", path)
	}
	var odd []string
	for _, text := range oddStrings {
		if fits(text) {
			odd = append(odd, text)
		}
	}
	if f.round >= 0 && len(odd) > 0 {
		chosen = odd[(f.round+number)%len(odd)]
	}
	f.chosen[path] = chosen
	return chosen
}

// fits reports whether a schema takes a string.
func fits(schema object, text string) bool {
	if pattern, ok := schema["pattern"].(string); ok && !regexp.MustCompile(pattern).MatchString(text) {
		return false
	}
	if most, ok := schema["maxLength"].(float64); ok && utf8.RuneCountInString(text) > int(most) {
		return false
	}
	if not, ok := schema["not"].(object); ok && not["pattern"] != nil && fits(not, text) {
		return false
	}
	return true
}

// comparable returns a part of an object in a form that can be compared: without checksums, and with the files in it as
// they are read.
func (f *filler) comparable(part any) any {
	switch part := part.(type) {
	case object:
		for key, value := range part {
			if strings.HasPrefix(key, "checksum/") {
				delete(part, key)
				continue
			}
			if text, ok := value.(string); ok && strings.HasSuffix(key, ".yaml") {
				must(f.t, yaml.Unmarshal([]byte(text), &value))
			}
			part[key] = f.comparable(value)
		}
	case []any:
		for i := range part {
			part[i] = f.comparable(part[i])
		}
	case string:
		if regexp.MustCompile(`[0-9]e\+[0-9]`).MatchString(part) {
			f.t.Errorf("%q has a number in a form that no program reads", part)
		}
	}
	return part
}

// replaced returns a copy of a part of an object with other strings, keys too.
func replaced(part any, other *strings.Replacer) any {
	switch part := part.(type) {
	case object:
		changed := object{}
		for key, value := range part {
			changed[other.Replace(key)] = replaced(value, other)
		}
		return changed
	case []any:
		changed := make([]any, 0, len(part))
		for _, item := range part {
			changed = append(changed, replaced(item, other))
		}
		return changed
	case string:
		return other.Replace(part)
	}
	return part
}

// contains reports whether a string is in one of the strings of a part of an object, keys too.
func contains(part any, text string) bool {
	switch part := part.(type) {
	case object:
		for key, value := range part {
			if strings.Contains(key, text) || contains(value, text) {
				return true
			}
		}
	case []any:
		return slices.ContainsFunc(part, func(item any) bool { return contains(item, text) })
	case string:
		return strings.Contains(part, text)
	}
	return false
}
