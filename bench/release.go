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

// imageLimits are the limits of the images, in MB. Their layers are compressed.
var imageLimits = map[string]float64{
	"oxide-csi-plugin.oci.tar": 40, "oxide-csi-controller.oci.tar": 16, "oxide-cosi.oci.tar": 16,
}

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
		limited := 0
		for _, path := range paths {
			info, err := os.Stat(path)
			if err != nil {
				return nil, err
			}
			name := strings.Replace(filepath.Base(path), "-"+strings.TrimSpace(string(version)), "", 1)
			limit := bar{}
			if most, ok := imageLimits[name]; ok {
				limit = strictly(atMost(most))
				limited++
			}
			rows = append(rows, median(releasePrefix+name, "MB", limit, []float64{float64(info.Size()) / megabyte}))
		}
		if limited != len(imageLimits) {
			return nil, fmt.Errorf("%s has %d of %d images: run make release", folder, limited, len(imageLimits))
		}
		return rows, nil
	}
}
