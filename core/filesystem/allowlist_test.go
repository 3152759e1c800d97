// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package filesystem

import (
	"regexp"
	"regexp/syntax"
	"slices"
	"strings"
	"testing"
)

// No value on the allow-list can name a device or a file: no pattern matches a slash, and where one matches letters
// that are not spelled out, the value is a label.
func TestAllowListNamesNothing(t *testing.T) {
	for fsType, rules := range map[string]map[string]rule{"ext4": ext4Rules, "ext3": ext3Rules, "xfs": xfsRules, "btrfs": btrfsRules} {
		// Options of the manuals that name a device, a file or a folder, or that the plugin sets itself.
		forbidden := map[string][]string{
			"ext4":  {"-c", "-d", "-D", "-e", "-F", "-l", "-M", "-n", "-o", "-q", "-r", "-S", "-U", "-v", "-V", "-z"},
			"xfs":   {"-c", "-f", "-N", "-p", "-q", "-r", "-V"},
			"btrfs": {"-A", "-b", "-f", "-q", "-r", "-R", "-U", "-v", "-V", "--rootdir", "--shrink", "--force", "--uuid", "--byte-count", "--alloc-start"},
		}[strings.Replace(fsType, "ext3", "ext4", 1)]
		for option, rule := range rules {
			if slices.Contains(forbidden, option) {
				t.Errorf("%s: %s is allowed", fsType, option)
			}
			check := func(name string, value *regexp.Regexp) {
				if value == nil {
					return
				}
				parsed, err := syntax.Parse(value.String(), syntax.Perl)
				if err != nil {
					t.Fatalf("%s %s: %v", fsType, name, err)
				}
				ranges := classes(parsed)
				free := slices.ContainsFunc(ranges, func(r rune) bool { return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' })
				if slices.Contains(ranges, '/') ||
					free && option != "-L" && strings.Trim(string(ranges), "0123456789bskmgtKMGT") != "" {
					t.Errorf("%s %s: the value %s may name anything", fsType, name, value)
				}
			}
			check(option, rule.value)
			for suboption, value := range rule.suboptions {
				if slices.Contains(
					[]string{
						"device",
						"logdev",
						"rtdev",
						"name",
						"file",
						"offset",
						"uuid",
						"journal_dev",
						"internal",
						"agnum",
						"hash_seed",
						"test_fs",
						"root_owner",
					},
					suboption,
				) {
					t.Errorf("%s: %s %s is allowed", fsType, option, suboption)
				}
				check(option+" "+suboption, value)
			}
		}
	}
	if strings.Contains(ext4Features.String()+ext3Features.String(), "journal_dev") {
		t.Error("ext: the feature journal_dev is allowed, which makes the disk another filesystem's journal")
	}
}

// classes are the characters that a pattern matches without spelling them out, such as [0-9].
func classes(re *syntax.Regexp) (all []rune) {
	switch re.Op {
	case syntax.OpAnyChar, syntax.OpAnyCharNotNL:
		return []rune{'/'}
	case syntax.OpCharClass:
		for i := 0; i < len(re.Rune); i += 2 {
			for r := re.Rune[i]; r <= min(re.Rune[i+1], re.Rune[i]+300); r++ {
				all = append(all, r)
			}
		}
	case syntax.OpLiteral:
		if slices.Contains(re.Rune, '/') {
			return []rune{'/'}
		}
	}
	for _, sub := range re.Sub {
		all = append(all, classes(sub)...)
	}
	return all
}
