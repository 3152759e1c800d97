// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package man makes the man pages of a program. A release builds each program with the tag man, and runs it once as
// PROGRAM man FOLDER. The programs that ship do not have this package.
package man

import (
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

// Main writes the pages of a program and ends it, if it was started to write them. Programs call it before their main
// function.
func Main(root *cobra.Command) {
	if len(os.Args) != 3 || os.Args[1] != "man" {
		return
	}
	if err := write(root, os.Args[2]); err != nil {
		fmt.Fprintf(os.Stderr, "%s: man pages: %v\n", root.Name(), err)
		os.Exit(1)
	}
	os.Exit(0)
}

// write writes a page for each command. The pages have no date of their own, so equal sources have equal pages.
func write(root *cobra.Command, folder string) error {
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	root.DisableAutoGenTag = true
	epoch := time.Unix(0, 0).UTC()
	header := &doc.GenManHeader{Section: "1", Source: root.Name() + " " + root.Version, Date: &epoch}
	return doc.GenManTree(root, header, folder)
}
