// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package filesystemtest derives options for tests from the allow-list of package filesystem.
package filesystemtest

import (
	"maps"
	"regexp"
	"regexp/syntax"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/core/filesystem"
)

// Choices returns each option of mkfs that has no value or a fixed set of values, with each of these values:
// "-O bigalloc", "-O ^bigalloc", "-m rmapbt=1". Options that take any number, size or label are left out, and so are
// sizes with a unit: without it they are there, too.
func Choices(fsType string) (options []string) {
	patterns := filesystem.MkfsPatterns(fsType)
	for _, name := range slices.Sorted(maps.Keys(patterns)) {
		option, suboption, isSuboption := strings.Cut(name, " ")
		if patterns[name] == nil {
			options = append(options, name)
			continue
		}
		parsed, err := syntax.Parse(patterns[name].String(), syntax.Perl)
		if err != nil {
			panic(err) // it is a compiled pattern
		}
		for _, value := range texts(parsed) {
			if withUnit.MatchString(value) {
				continue
			}
			if isSuboption {
				value = suboption + "=" + value
			}
			options = append(options, option+" "+value)
		}
	}
	return options
}

var withUnit = regexp.MustCompile(`^[0-9]+[kK]$`)

// maxClass is the largest number of characters in a class that stands for a choice and not for a number: [0-2].
const maxClass = 3

// texts returns the texts that a pattern matches, or nil if there are many. A part that may be repeated is left out.
func texts(re *syntax.Regexp) []string {
	switch re.Op {
	case syntax.OpLiteral:
		return []string{string(re.Rune)}
	case syntax.OpCharClass:
		var all []string
		for i := 0; i < len(re.Rune); i += 2 {
			for r := re.Rune[i]; r <= re.Rune[i+1]; r++ {
				if all = append(all, string(r)); len(all) > maxClass {
					return nil
				}
			}
		}
		return all
	case syntax.OpCapture:
		return texts(re.Sub[0])
	case syntax.OpQuest:
		return append([]string{""}, texts(re.Sub[0])...)
	case syntax.OpAlternate:
		var all []string
		for _, sub := range re.Sub {
			all = append(all, texts(sub)...)
		}
		return all
	case syntax.OpConcat:
		all := []string{""}
		for _, sub := range re.Sub {
			var longer []string
			for _, end := range texts(sub) {
				for _, begin := range all {
					longer = append(longer, begin+end)
				}
			}
			all = longer
		}
		return all
	case syntax.OpStar, syntax.OpBeginText, syntax.OpEndText, syntax.OpEmptyMatch:
		return []string{""}
	}
	return nil
}
