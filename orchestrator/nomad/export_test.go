// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package nomad

import "slices"

// PolicyRules are the rules that doctor looks for, by policy.
func PolicyRules() map[string][]string {
	all := map[string][]string{}
	for name, r := range policyRules {
		if r.node != "" {
			all[name] = append(all[name], "node "+r.node)
		}
		if r.plugin != "" {
			all[name] = append(all[name], "plugin "+r.plugin)
		}
		kind := "namespace "
		if r.namespace != anyNamespace {
			kind += r.namespace + " "
		}
		for _, capability := range r.capabilities {
			all[name] = append(all[name], kind+capability)
		}
		slices.Sort(all[name])
	}
	return all
}
