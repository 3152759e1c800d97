// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package volumelock

import (
	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
)

var (
	// ErrHeld means that a program started for the same volume by an earlier process is still running.
	ErrHeld = fault.ProgramRunning.New("a program that an earlier process of the plugin started is still running")
	// ErrNodeHeld means that another volume of the node is using the memory for its key.
	ErrNodeHeld = fault.KeyDerivationBusy.New("the key of another volume is being derived on this node")
)
