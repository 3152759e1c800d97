// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build man

package main

import (
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra/doc"
)

// A release builds the program with this file to make its man pages: oxide-csi man FOLDER. The program that ships does
// not have it.
func init() {
	if len(os.Args) != 3 || os.Args[1] != "man" {
		return
	}
	root, epoch := command(nil, io.Discard, io.Discard), time.Unix(0, 0).UTC()
	root.DisableAutoGenTag = true
	err := os.MkdirAll(os.Args[2], 0o755)
	if err == nil {
		err = doc.GenManTree(root, &doc.GenManHeader{Section: "1", Source: "oxide-csi " + version, Date: &epoch}, os.Args[2])
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "oxide-csi: man pages: %v\n", err)
		os.Exit(exitFailed)
	}
	os.Exit(0)
}
