// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// bug is a bug to plant.
type bug struct {
	// name is permanent and unique: the package's name, and what is wrong.
	name string
	// file is the path of the file, from the module's root.
	file string
	// original is the text that planted replaces. It occurs exactly once in the file.
	original, planted string
	// pkg is the folder of the package with the test, from the module's root.
	pkg string
	// test is the test that must fail: its name, or its name, a slash, and a regular expression for subtests. It takes a
	// few seconds at most.
	test string
	// flag is a flag for the test, such as -model=1m, or "".
	flag string
}

// apply returns the content of the file with the bug.
func (b bug) apply(root string) (string, error) {
	content, err := os.ReadFile(filepath.Join(root, b.file))
	if err != nil {
		return "", err
	}
	if n := strings.Count(string(content), b.original); n != 1 {
		return "", fmt.Errorf("the original text occurs %d times in %s, not once: correct the row in planted.go", n, b.file)
	}
	return strings.Replace(string(content), b.original, b.planted, 1), nil
}

// digest identifies the row: a result is of this row only. Where the text is does not count: code that moves to another
// file, or to another package with its test, keeps its results.
func (b bug) digest() string {
	row := []string{b.original, b.planted, b.test, b.flag}
	sum := sha256.Sum256([]byte(strings.Join(row, "\x00")))
	return hex.EncodeToString(sum[:6])
}

// choose returns the bugs whose names match. Of these it takes count, unless that is 0. The seed decides which, so that
// the same commit always gets the same sample.
func choose(bugs []bug, match *regexp.Regexp, count int, seed string) []bug {
	chosen := slices.DeleteFunc(slices.Clone(bugs), func(b bug) bool { return !match.MatchString(b.name) })
	if count == 0 || count >= len(chosen) {
		return chosen
	}
	order := func(b bug) string {
		sum := sha256.Sum256([]byte(seed + "\x00" + b.name))
		return string(sum[:])
	}
	slices.SortFunc(chosen, func(x, y bug) int { return cmp.Compare(order(x), order(y)) })
	return chosen[:count]
}
