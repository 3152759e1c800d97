// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// releasePrefix begins the names of the rows of -release.
const releasePrefix = "release/"

// releaseSizes returns a measurement of the sizes of all files of a release. The rows have no version in their names.
func releaseSizes(folder string) func(context.Context, *bench) ([]row, error) {
	return func(context.Context, *bench) ([]row, error) {
		version, err := os.ReadFile("VERSION")
		if err != nil {
			return nil, err
		}
		paths, err := filepath.Glob(filepath.Join(folder, "*"))
		if err != nil {
			return nil, err
		}
		var rows []row
		for _, path := range paths {
			info, err := os.Stat(path)
			if err != nil {
				return nil, err
			}
			name := strings.Replace(filepath.Base(path), "-"+strings.TrimSpace(string(version)), "", 1)
			rows = append(rows, median(releasePrefix+name, "MB", []float64{float64(info.Size()) / megabyte}))
		}
		if err := unmeasured(rows, releasePrefix); err != nil {
			return nil, fmt.Errorf("%s lacks an image, run make release: %w", folder, err)
		}
		return rows, nil
	}
}
