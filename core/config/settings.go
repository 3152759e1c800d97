// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package config

import (
	"reflect"
	"sync"
)

// setting is one field of Config as its tags describe it.
type setting struct {
	group, key, flag, env, def, derived, required, help string
	inFile, identity, operator, hidden                  bool
	field                                               int
	typ                                                 reflect.Type
}

// label is how a problem names the setting.
func (s setting) label() string {
	if s.flag == "" {
		return s.key
	}
	return "--" + s.flag
}

// settings returns all settings in the order of the struct.
var settings = sync.OnceValue(func() []setting {
	t := reflect.TypeFor[Config]()
	var all []setting
	var group string
	for i := range t.NumField() {
		tag := t.Field(i).Tag
		key, ok := tag.Lookup("koanf")
		if !ok {
			continue // not a setting, but computed from others
		}
		if heading, ok := tag.Lookup("group"); ok {
			group = heading
		}
		all = append(all, setting{
			group: group, key: key, flag: tag.Get("flag"), env: tag.Get("env"),
			def: tag.Get("default"), derived: tag.Get("derived"), required: tag.Get("required"), help: tag.Get("help"),
			inFile: tag.Get("file") != "no", identity: tag.Get("use") == "identity",
			operator: tag.Get("use") != "", hidden: tag.Get("hidden") == "yes",
			field: i, typ: t.Field(i).Type,
		})
	}
	return all
})

// findSetting returns the first setting that matches.
func findSetting(is func(setting) bool) (setting, bool) {
	for _, s := range settings() {
		if is(s) {
			return s, true
		}
	}
	return setting{}, false
}
