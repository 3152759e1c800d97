// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package filesystem

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
)

// rule says what may follow an option of mkfs: a value, a list of suboptions, or nothing.
type rule struct {
	// value matches the value of an option without suboptions. It is nil if the option has no value.
	value *regexp.Regexp
	// suboptions are the allowed suboptions, which the value separates by commas. Each has a pattern for the text
	// behind its "=". A nil pattern means that the suboption has no "=".
	suboptions map[string]*regexp.Regexp
}

var (
	number  = whole(`[0-9]{1,10}`)
	size    = whole(`[0-9]{1,10}[bskmgtKMGT]?`)
	some    = whole(`[1-9][0-9]{0,9}`)
	someKiB = whole(`[1-9][0-9]{0,9}[skmgKMG]?`)
	percent = whole(`[0-9]{1,2}`)
	flag    = whole(`[01]`)
	// The kernel of a guest mounts no larger blocks than its pages, which are 4096 bytes.
	block = whole(`1024|2048|4096|[124][kK]`)
	label = whole(`[A-Za-z0-9._-]{1,12}`)
	// What a value of 0 would switch off is always on in an xfs with checksums, which mkfs.xfs makes.
	always  = whole(`1`)
	xfsBool = map[string]*regexp.Regexp{"crc": always, "finobt": flag, "rmapbt": flag, "reflink": flag,
		"inobtcount": flag, "bigtime": flag}
	// Without has_journal, a power cut destroys files. Without extents, the filesystem counts as another type. With
	// fast_commit, e2fsck drops the journal after a power cut, and the kernel refuses some journals for ever. quota and
	// project need the kernel module quota_v2, and nothing shows before mkfs whether the kernel can load it.
	ext4Features = listOf(
		`64bit|bigalloc|dir_index|dir_nlink|ea_inode|ext_attr|extra_isize|filetype|flex_bg|huge_file|`+
			`inline_data|large_dir|large_file|meta_bg|metadata_csum|metadata_csum_seed|orphan_file|`+
			`resize_inode|sparse_super|sparse_super2|stable_inodes|uninit_bg|verity`,
		`has_journal|extents?`)
	// With any other feature, the filesystem counts as ext4.
	ext3Features = listOf(`dir_index|ext_attr|filetype|large_file|meta_bg|resize_inode|sparse_super`,
		`has_journal`)
)

// ext4Rules, ext3Rules, xfsRules and btrfsRules are the allow-list. It has every option that shapes the filesystem on
// this disk. It has no option that names another device or a file (an external journal or log, a real-time section,
// prototype and configuration files), sets the UUID, or switches off mkfs' own checks. It has no value that mkfs of
// Debian 12 always refuses, or that makes what the kernels of the guests cannot mount. What depends on the disk or on
// other options is in [CheckFit].
var (
	ext4Rules = map[string]rule{
		"-b": {value: whole(`1024|2048|4096`)},
		"-C": {value: someKiB},
		"-g": {value: some},
		"-G": {value: some},
		"-i": {value: whole(`[1-9][0-9]{3,7}`)},
		"-I": {value: whole(`128|256|512|1024|2048|4096`)},
		"-J": {suboptions: map[string]*regexp.Regexp{"size": number}},
		"-L": {value: label},
		"-m": {value: whole(`[0-4]?[0-9]|50`)},
		"-N": {value: some},
		"-O": {value: ext4Features},
		"-T": {value: whole(`(default|small|news|largefile|largefile4|big|huge)`)},
		"-E": {suboptions: map[string]*regexp.Regexp{
			"lazy_itable_init": flag, "lazy_journal_init": flag, "packed_meta_blocks": flag, "num_backup_sb": whole(`[0-2]`),
			"stride": number, "stripe_width": number, "stripe-width": number, "resize": size, "nodiscard": nil,
		}},
	}
	ext3Rules = withFeatures(ext4Rules, ext3Features, "-C", "-G")
	xfsRules  = map[string]rule{
		"-b": {suboptions: map[string]*regexp.Regexp{"size": block}},
		"-d": {suboptions: map[string]*regexp.Regexp{"agcount": some, "agsize": someKiB}},
		"-i": {suboptions: map[string]*regexp.Regexp{
			"attr":        whole(`2`),
			"maxpct":      percent,
			"size":        whole(`512|1024|2048|[12][kK]`),
			"sparse":      flag,
			"nrext64":     flag,
			"align":       always,
			"projid32bit": always,
		}},
		"-K": {},
		"-l": {suboptions: map[string]*regexp.Regexp{"size": size, "lazy-count": always, "version": whole(`2`)}},
		"-L": {value: label},
		"-m": {suboptions: xfsBool},
		"-n": {suboptions: map[string]*regexp.Regexp{
			"size": whole(`4096|8192|16384|32768|65536|(4|8|16|32|64)[kK]`), "ftype": always, "version": whole(`2`),
		}},
		"-s": {suboptions: map[string]*regexp.Regexp{"size": whole(`512|1024|2048|4096|[124][kK]`)}},
	}
	btrfsRules = map[string]rule{
		"-d":     {value: whole(`(single|dup)`)},
		"-K":     {},
		"-L":     {value: label},
		"-m":     {value: whole(`(single|dup)`)},
		"-M":     {},
		"-n":     {value: whole(`4096|8192|16384|32768|65536|(4|8|16|32|64)[kK]`)},
		"-O":     {value: listOf(`extref|mixed-bg|no-holes|skinny-metadata`, "")},
		"-s":     {value: whole(`4096|4[kK]`)},
		"--csum": {value: whole(`(crc32c|xxhash|sha256|blake2)`)},
	}
)

// whole compiles a regular expression that matches whole values only.
func whole(pattern string) *regexp.Regexp { return regexp.MustCompile(`^(?:` + pattern + `)$`) }

// listOf matches a list of words, separated by commas. Each word of words may begin with ^, a word of required may not.
func listOf(words, required string) *regexp.Regexp {
	one := `\^?(` + words + `)`
	if required != "" {
		one = `(` + one + `|` + required + `)`
	}
	return whole(one + `(,` + one + `)*`)
}

// withFeatures returns a copy of ext rules with other features and without the options that need one of the old ones.
func withFeatures(rules map[string]rule, features *regexp.Regexp, without ...string) map[string]rule {
	rules = maps.Clone(rules)
	rules["-O"] = rule{value: features}
	for _, option := range without {
		delete(rules, option)
	}
	return rules
}

// rulesOf returns the allow-list for a filesystem type, or nil. An empty type means the default.
func rulesOf(fsType string) map[string]rule {
	return map[string]map[string]rule{
		"": ext4Rules, "ext4": ext4Rules, "ext3": ext3Rules, "xfs": xfsRules, "btrfs": btrfsRules,
	}[fsType]
}

// MkfsPatterns returns the allow-list for a filesystem type: the pattern of each option's value, or nil if the option
// has none. A suboption is behind its option and a blank: "-d agcount".
func MkfsPatterns(fsType string) map[string]*regexp.Regexp {
	patterns := map[string]*regexp.Regexp{}
	for option, rule := range rulesOf(fsType) {
		if rule.suboptions == nil {
			patterns[option] = rule.value
		}
		for suboption, value := range rule.suboptions {
			patterns[option+" "+suboption] = value
		}
	}
	return patterns
}

// ParseMkfsOptions parses mkfs options in the form of a command line ("-i 65536 -E stride=4") and returns them as
// arguments. It returns [ErrOption] with the first option that is not on the list for this filesystem type. An empty
// type means the default. There is no quoting, because no option on the list needs it.
func ParseMkfsOptions(fsType, options string) ([]string, error) {
	rules := rulesOf(fsType)
	if rules == nil {
		return nil, fmt.Errorf("%w: %q: use one of %s", ErrUnsupported, fsType, strings.Join(Types(), ", "))
	}
	var args []string
	words := strings.Fields(options)
	for len(words) > 0 {
		option, value := words[0], ""
		words = words[1:]
		if strings.HasPrefix(option, "--") {
			option, value, _ = strings.Cut(option, "=")
		} else if len(option) > 2 {
			option, value = option[:2], option[2:]
		}
		rule, ok := rules[option]
		if !ok {
			return nil, fmt.Errorf("mkfs options for %s: %w: %q", nameOf(fsType), ErrOption, option)
		}
		if rule.value == nil && rule.suboptions == nil {
			if value != "" {
				return nil, fmt.Errorf("mkfs options for %s: %w: %s takes no value", nameOf(fsType), ErrOption, option)
			}
			args = append(args, option)
			continue
		}
		if value == "" && len(words) > 0 {
			value, words = words[0], words[1:]
		}
		if err := rule.check(value); err != nil {
			return nil, fmt.Errorf("mkfs options for %s: %w: %s %q", nameOf(fsType), err, option, value)
		}
		args = append(args, option, value)
	}
	return args, nil
}

// KeepsItsSize reports whether the options make a filesystem that may never grow. One with bigalloc grows only while it
// is mounted, and only if the node plugin has CAP_SYS_RESOURCE, which the controller cannot know.
func KeepsItsSize(options []string) bool {
	for i, option := range options {
		if option == "-O" && slices.Contains(strings.Split(options[i+1], ","), "bigalloc") {
			return true
		}
	}
	return false
}

func nameOf(fsType string) string {
	if fsType == "" {
		return Types()[0]
	}
	return fsType
}

func (r rule) check(value string) error {
	if r.suboptions == nil {
		if !r.value.MatchString(value) {
			return ErrOption
		}
		return nil
	}
	for _, part := range strings.Split(value, ",") {
		key, given, hasValue := strings.Cut(part, "=")
		allowed, ok := r.suboptions[key]
		if !ok || hasValue != (allowed != nil) || hasValue && !allowed.MatchString(given) {
			return fmt.Errorf("%w: suboption %q", ErrOption, key)
		}
	}
	return nil
}
