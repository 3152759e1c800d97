// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package volumerecord

import (
	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
)

var (
	// ErrUnreadable means that a record exists and cannot be read. So this node may hold the volume.
	ErrUnreadable = fault.RecordUnreadable.New("record of the volume cannot be read")
)
