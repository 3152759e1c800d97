// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package hostexec

import (
	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
)

// ErrMissing means that a program is not installed. The error names the program's Debian package.
var ErrMissing = fault.ProgramMissing.New("program is not installed")
