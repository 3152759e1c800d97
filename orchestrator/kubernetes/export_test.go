// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package kubernetes

import (
	"cmp"
	"strings"
)

// Rights are the rights that doctor asks for, as "account; component; where; resource; verbs".
func Rights() (all []string) {
	for _, r := range rights {
		component, in := cmp.Or(r.component, "always"), "cluster"
		if r.namespaced {
			in = "namespace"
		}
		verbs := strings.ReplaceAll(r.verbs, " ", ", ")
		all = append(all, strings.Join([]string{r.account, component, in, r.resource, verbs}, "; "))
	}
	return all
}

// SidecarVersions are the versions that doctor looks for, by the container.
func SidecarVersions() map[string]string { return sidecarVersions }
