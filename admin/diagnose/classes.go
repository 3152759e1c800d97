// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package diagnose

import (
	"context"

	"github.com/oxidecomputer/oxide-csi-plugin/core/controller"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// ExamineClasses looks whether CreateVolume accepts what the storage classes of an orchestrator ask for.
func ExamineClasses(ctx context.Context, lister orchestrator.ClassLister, area string) []orchestrator.Finding {
	const looked = "storage classes"
	e := &examination{area: area}
	classes, err := lister.StorageClasses(ctx)
	switch {
	case err != nil:
		e.warn(looked, "repeat the command with credentials that may read them", "%s", err)
	case len(classes) == 0:
		e.warn(looked, "apply a StorageClass with the plugin's name as provisioner", "none names this plugin")
	}
	for _, class := range classes {
		if err := controller.CheckParameters(class.Parameters, class.FSType, class.MountFlags); err != nil {
			e.fail(looked, "correct the parameter: delete the class and apply it again", "%s: %s", class.Name, err)
			continue
		}
		e.ok(looked, "%s", class.Name)
	}
	return e.findings
}
