// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"slices"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

// The list of instances shows what a look-up of each shows.
func TestInstancesAreListedAsTheyAreLookedUp(t *testing.T) {
	r := newRig(t, simrack.Options{})
	listed, err := r.Instances(t.Context())
	must(t, err)
	one, err := r.Instance(t.Context(), r.node(t))
	must(t, err)
	if !slices.Equal(listed, []Instance{one}) {
		t.Errorf("listed %+v, looked up %+v", listed, one)
	}
}
