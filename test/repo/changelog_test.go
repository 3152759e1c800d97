// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package repo

import (
	"regexp"
	"strings"
	"testing"
)

// versionHeading matches the heading of a version in CHANGELOG.md: the version, and its date or Unreleased.
var versionHeading = regexp.MustCompile(`(?m)^## \[(.+?)\](?: - (.*))?$`)

// TestChangelog checks that all changes are listed under the version that is released next.
func TestChangelog(t *testing.T) {
	version := strings.TrimSpace(read(t, "VERSION"))
	if problem := changelogProblem(read(t, "CHANGELOG.md"), version); problem != "" {
		t.Errorf("CHANGELOG.md: %s", problem)
	}
}

// changelogProblem returns what is wrong with the first version of a changelog, or an empty text. While VERSION ends in
// -dev, the changes are those of the version without this suffix, which is not released. There are no changes under
// Unreleased, because a release made now has them.
func changelogProblem(changelog, version string) string {
	next, isDev := strings.CutSuffix(version, "-dev")
	headings := versionHeading.FindAllStringSubmatch(changelog, -1)
	if len(headings) == 0 {
		return "it has no version"
	}
	first, date := headings[0][1], headings[0][2]
	isDate := regexp.MustCompile(`^\d{4}-\d{2}-\d{2}$`).MatchString(date)
	switch {
	case first != next:
		return "the first version is " + first + ", but VERSION is " + version + ": list the changes under " + next
	case isDev && isDate:
		return first + " has a date, but VERSION is " + version + ", which is not released"
	case date != "Unreleased" && !isDate:
		return first + " has neither a date nor Unreleased in its heading"
	case !strings.Contains(changelog, "\n["+first+"]: "):
		return "there is no link for " + first
	}
	for _, heading := range headings[1:] {
		if heading[1] == "Unreleased" || heading[2] == "Unreleased" {
			return heading[0] + " is below the version that is released next"
		}
	}
	return ""
}

func TestChangelogsThatAreRefused(t *testing.T) {
	const link = "\n[1.3.0]: https://example.com/1.3.0\n"
	for name, test := range map[string]struct {
		changelog, version, problem string
	}{
		"not released":    {"## [1.3.0] - Unreleased\n" + link, "1.3.0", ""},
		"in development":  {"## [1.3.0] - Unreleased\n## [1.2.0] - 2026-01-02\n" + link, "1.3.0-dev", ""},
		"about to be":     {"## [1.3.0] - 2026-02-03\n## [1.2.0] - 2026-01-02\n" + link, "1.3.0", ""},
		"a candidate":     {"## [1.3.0-rc.1] - 2026-02-03\n\n[1.3.0-rc.1]: https://example.com\n", "1.3.0-rc.1", ""},
		"Unreleased":      {"## [Unreleased]\n- a change\n## [1.3.0] - 2026-02-03\n" + link, "1.3.0", "is Unreleased"},
		"below":           {"## [1.3.0] - Unreleased\n## [Unreleased]\n" + link, "1.3.0", "is below"},
		"another version": {"## [1.2.0] - 2026-01-02\n" + link, "1.3.0-dev", "list the changes under 1.3.0"},
		"dated too early": {"## [1.3.0] - 2026-02-03\n" + link, "1.3.0-dev", "has a date"},
		"no date":         {"## [1.3.0]\n" + link, "1.3.0", "neither a date"},
		"no link":         {"## [1.3.0] - Unreleased\n", "1.3.0", "no link"},
		"empty":           {"# Changelog\n", "1.3.0", "no version"},
	} {
		got := changelogProblem(test.changelog, test.version)
		if (got == "") != (test.problem == "") || !strings.Contains(got, test.problem) {
			t.Errorf("%s: %q, want %q", name, got, test.problem)
		}
	}
}
