// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package kubernetes

import (
	"slices"
	"time"
)

// tracedPod has the fields of a Pod that are read.
type tracedPod struct {
	object
	Spec struct {
		NodeName string
		Volumes  []struct {
			PersistentVolumeClaim *struct{ ClaimName string }
			Ephemeral             *struct{}
			Name                  string
		}
	}
	Status struct {
		Phase     string
		StartTime time.Time
	}
}

// claims are the names of the pod's claims.
func (p tracedPod) claims() (names []string) {
	for _, v := range p.Spec.Volumes {
		switch {
		case v.PersistentVolumeClaim != nil:
			names = append(names, v.PersistentVolumeClaim.ClaimName)
		case v.Ephemeral != nil:
			names = append(names, p.Name+"-"+v.Name)
		}
	}
	return names
}

// tracedAttachment has the fields of a VolumeAttachment that are read.
type tracedAttachment struct {
	object
	Spec struct {
		Attacher, NodeName string
		Source             struct{ PersistentVolumeName string }
	}
	Status struct {
		Attached                 bool
		AttachError, DetachError *struct {
			Message string
			Time    time.Time
		}
	}
}

// released reports whether the claim of the volume is gone.
func (v persistentVolume) released() bool {
	return v.Status.Phase == "Released" || v.Status.Phase == "Failed"
}

// grows reports whether the claim requests more than it has.
func (c claim) grows() bool {
	return slices.ContainsFunc(c.Status.Conditions, func(c condition) bool {
		return c.Status == "True" && (c.Type == "Resizing" || c.Type == "FileSystemResizePending" ||
			c.Type == "ControllerResizeError" || c.Type == "NodeResizeError")
	})
}
