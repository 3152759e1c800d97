// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package diagnose

import (
	"maps"
	"slices"
)

// Tools are the programs that [ExamineNode] looks for.
func Tools() (names []string) {
	for _, tool := range tools {
		names = append(names, tool.name)
	}
	slices.Sort(names)
	return names
}

// NextFor is the next step of a symptom with the commands of an orchestrator.
func NextFor(s Symptom, orchestrator string) string { return s.nextFor(orchestrator) }

// ReasonsElsewhere are the reasons that have a next step of their own under an orchestrator, or without one.
func ReasonsElsewhere(orchestrator string) []string {
	return slices.Sorted(maps.Keys(nextElsewhere[orchestrator]))
}
