// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strings"

	"go.yaml.in/yaml/v3"
)

// maxFileBytes bounds the configuration file.
const maxFileBytes = 1 << 20

// file is the YAML file as a layer of koanf. It keeps the text of scalars and leaves parsing to decode, as other layers
// do: YAML would turn the cluster ID 0123 into 83.
type file struct {
	path     string
	lines    map[string]int // key -> its line
	racks    []Rack
	problems Problems
}

// ReadBytes is part of koanf's Provider. koanf calls Read instead, because there is no parser.
func (*file) ReadBytes() ([]byte, error) { return nil, errors.New("config: the file is read by Read") }

// Read returns the values by key. It adds problems of the file to f.problems, and still returns all other values, so
// that they are checked too.
func (f *file) Read() (map[string]any, error) {
	f.lines = map[string]int{}
	values := map[string]any{}
	text, err := readFile(f.path, maxFileBytes)
	if err != nil {
		f.problems.add("--config", "%v; name a YAML file that the plugin may read", err)
		return values, nil
	}
	root, err := parseYAML(text)
	if err != nil {
		f.problems.add("--config", "%s is not a YAML file of settings: %v", f.path, err)
		return values, nil
	}
	f.each(root, "", func(key string, node *yaml.Node) bool {
		s, known := findSetting(func(s setting) bool { return s.key == key && s.inFile })
		switch {
		case !known:
			return false
		case s.typ == reflect.TypeFor[[]Rack]():
			f.readRacks(node)
		default:
			if value, ok := f.scalar(key, node); ok {
				values[key] = value
				f.lines[key] = node.Line
			}
		}
		return true
	})
	return values, nil
}

// parseYAML returns the mapping in a file, or nil for an empty file.
func parseYAML(text []byte) (*yaml.Node, error) {
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	var document, second yaml.Node
	switch err := decoder.Decode(&document); {
	case errors.Is(err, io.EOF):
		return nil, nil
	case err != nil:
		return nil, err
	}
	if err := decoder.Decode(&second); !errors.Is(err, io.EOF) {
		if err != nil {
			return nil, err
		}
		return nil, fmt.Errorf("it holds a second document at line %d", second.Line)
	}
	root := resolve(document.Content[0])
	switch {
	case root.Tag == "!!null":
		return nil, nil
	case root.Kind != yaml.MappingNode:
		return nil, fmt.Errorf("line %d is not \"key: value\"", root.Line)
	}
	return root, nil
}

// each calls use for every entry of a mapping. use reports whether it knows the key. An unknown or repeated key is a
// problem. in is the prefix of the mapping's keys, such as "racks[0].", or "".
func (f *file) each(mapping *yaml.Node, in string, use func(key string, value *yaml.Node) bool) {
	if mapping == nil {
		return
	}
	seen := map[string]int{}
	for i := 0; i+1 < len(mapping.Content); i += 2 {
		node := mapping.Content[i]
		key := node.Value
		if first, twice := seen[key]; twice {
			f.problems.add("--config", "%s line %d: key %q is on line %d already", f.path, node.Line, in+key, first)
			continue
		}
		seen[key] = node.Line
		if !use(key, resolve(mapping.Content[i+1])) {
			f.problems.add("--config", "%s line %d: unknown key %q%s", f.path, node.Line, in+key, suggestion(in, key))
		}
	}
}

// readRacks reads the list under "racks".
func (f *file) readRacks(node *yaml.Node) {
	if node.Kind == yaml.ScalarNode && node.Tag == "!!null" {
		return
	}
	if node.Kind != yaml.SequenceNode {
		f.problems.add("racks", "%s line %d: must be a list of {name, host, tokenFile, project, caFile}", f.path, node.Line)
		return
	}
	for i, entry := range node.Content {
		entry = resolve(entry)
		in := fmt.Sprintf("racks[%d]", i)
		var rack Rack
		if entry.Kind != yaml.MappingNode {
			f.problems.add(in, "%s line %d: must be {name, host, tokenFile, project, caFile}", f.path, entry.Line)
			continue
		}
		f.each(entry, in+".", func(key string, node *yaml.Node) bool {
			field, known := rackField(&rack, key)
			if known {
				*field, _ = f.scalar(in+"."+key, node) // Validate rejects an empty value
			}
			return known
		})
		f.racks = append(f.racks, rack)
	}
}

// rackField returns the field of rack that has this key.
func rackField(rack *Rack, key string) (*string, bool) {
	v := reflect.ValueOf(rack).Elem()
	for i := range v.NumField() {
		if v.Type().Field(i).Tag.Get("koanf") == key && key != "" {
			return v.Field(i).Addr().Interface().(*string), true
		}
	}
	return nil, false
}

// scalar returns the text of a single value. It returns false for an empty value, which counts as not set.
func (f *file) scalar(key string, node *yaml.Node) (string, bool) {
	if node.Kind != yaml.ScalarNode {
		f.problems.add("--config", "%s line %d: %s must be a single value", f.path, node.Line, key)
		return "", false
	}
	value := strings.TrimSpace(node.Value)
	return value, value != "" && node.Tag != "!!null"
}

// resolve follows YAML's aliases.
func resolve(node *yaml.Node) *yaml.Node {
	for node.Kind == yaml.AliasNode {
		node = node.Alias
	}
	return node
}

// suggestion names the known key that differs from an unknown key only in case, '-', '_' and '.', as clusterID does
// from cluster-id.
func suggestion(in, key string) string {
	plain := func(s string) string {
		return strings.ToLower(strings.NewReplacer("-", "", "_", "", ".", "").Replace(s))
	}
	if in == "" {
		if s, ok := findSetting(func(s setting) bool { return s.inFile && plain(s.key) == plain(key) }); ok {
			return fmt.Sprintf("; it is written %q", s.key)
		}
		return ""
	}
	rack := reflect.TypeFor[Rack]()
	for i := range rack.NumField() {
		if name := rack.Field(i).Tag.Get("koanf"); name != "" && plain(name) == plain(key) {
			return fmt.Sprintf("; it is written %q", in+name)
		}
	}
	return ""
}
