// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build man

package main

import (
	"io"

	"github.com/oxidecomputer/oxide-csi-plugin/deploy/release/man"
)

// A release builds the program with this file to make its man pages: oxide-cosi man FOLDER. The program that ships does
// not have it. The environment is empty, so that no variable of the builder appears as a default.
func init() { man.Main(command(func(string) string { return "" }, io.Discard, io.Discard)) }
