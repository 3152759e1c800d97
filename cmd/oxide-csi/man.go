// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build man

package main

import (
	"io"

	"github.com/oxidecomputer/oxide-csi-plugin/deploy/release/man"
)

// A release builds the program with this file to make its man pages: oxide-csi man FOLDER. The program that ships does
// not have it.
func init() { man.Main(command(nil, io.Discard, io.Discard)) }
