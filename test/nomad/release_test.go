// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build nomad && release

package nomad_test

import "testing"

// TestRelease loads the images of a release into Docker, from its archives, and runs the jobs with them.
func TestRelease(t *testing.T) {
	c := newCluster(t, impatient)
	c.part("install", c.install)
	c.part("docker", c.containers)
}
