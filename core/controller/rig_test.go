// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
)

// rig is a controller and a simulated rack, with the checks of this package's tests.
type rig struct{ *coretest.Rig }

func newRig(t *testing.T, change ...func(*coretest.Options)) *rig {
	t.Helper()
	return &rig{coretest.New(t, change...)}
}

// again starts another controller for the same rack: a replica, or the same controller after a restart.
func (r *rig) again(t *testing.T) *rig {
	t.Helper()
	return &rig{r.Again(t)}
}

// copy is another rig for the same rack. Its options can be changed before it is started.
func (r *rig) copy() *rig {
	other := *r.Rig
	return &rig{&other}
}
