// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"strings"
	"testing"
)

// A test that does not end has no "fail" of its own: only its package has one.
func Example_timeout() {
	r := result{skipped: map[string]string{}, output: map[string]*strings.Builder{}}
	for _, e := range []event{
		{Action: "run", Package: "core", Test: "TestA"},
		{Action: "output", Package: "core", Test: "TestA", Output: "a passed\n"},
		{Action: "pass", Package: "core", Test: "TestA"},
		{Action: "output", Package: "core", Test: "TestB", Output: "panic: test timed out after 20m0s\n"},
		{Action: "output", Package: "core/rack", Test: "TestC", Output: "another package\n"},
		{Action: "output", Package: "core", Output: "FAIL\tcore\n"},
		{Action: "fail", Package: "core", Elapsed: 1200},
	} {
		r.take(e)
	}
	// Output:
	// FAILED  core                                                                   1200.0s
	// FAIL	core
	// NOT ENDED  core TestB
	// panic: test timed out after 20m0s
}

// The reason of a failure stands at the end, also if a journal of hundreds of lines follows it in the test's output.
func Example_failures() {
	r := result{skipped: map[string]string{}, output: map[string]*strings.Builder{}}
	for _, output := range []string{
		"=== RUN   TestA\n", "    a_test.go:7: round 1\n", "    a_test.go:9: got 1\n", "        want 2\n",
		"    a_test.go:20: the journal:\n", "        Nov 27 file.go:1: a line\n",
	} {
		r.take(event{Action: "output", Package: "core", Test: "TestA", Output: output})
	}
	r.take(event{Action: "fail", Package: "core", Test: "TestA"})
	r.report(true, 0)
	// Output:
	// FAILED  core TestA
	// === RUN   TestA
	//     a_test.go:7: round 1
	//     a_test.go:9: got 1
	//         want 2
	//     a_test.go:20: the journal:
	//         Nov 27 file.go:1: a line
	// failed: core TestA
	//         a_test.go:7: round 1
	//         a_test.go:9: got 1
	//         a_test.go:20: the journal:
	// 0s
	// 0 passed, 1 failed, 0 skipped
}

func TestAvailableMemory(t *testing.T) {
	if left, known := availableMemory(); !known || left < 1 || left > 1<<24 {
		t.Errorf("%d MiB, %t", left, known)
	}
}
