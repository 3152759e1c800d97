// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package diagnose

import "slices"

// Tools are the programs that [ExamineNode] looks for.
func Tools() (names []string) {
	for _, tool := range tools {
		names = append(names, tool.name)
	}
	slices.Sort(names)
	return names
}
