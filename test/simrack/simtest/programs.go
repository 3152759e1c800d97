// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simtest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
)

// Programs are the paths of the built programs.
type Programs struct {
	// Plugin is oxide-csi.
	Plugin string
	// Sim is oxide-sim.
	Sim string
}

// RaceDetector reports whether this program was built with the race detector; the programs that a test starts then
// should be, too.
func RaceDetector() bool {
	info, ok := debug.ReadBuildInfo()
	return ok && slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"})
}

// Build builds both programs into a directory, with the race detector where that is asked for. It needs the source tree
// that this package was built from.
func Build(dir string, race bool) (Programs, error) {
	_, file, _, ok := runtime.Caller(0)
	if !ok {
		return Programs{}, fmt.Errorf("build the programs: the source tree is not known")
	}
	args, env := []string{"build", "-o", dir + "/", "-ldflags=-s -w"}, os.Environ()
	if race {
		args = append(args, "-race")
	} else { // as make build does
		args = append(args, "-trimpath")
		env = append(env, "CGO_ENABLED=0")
	}
	cmd := exec.Command("go", append(args, "./cmd/oxide-csi", "./cmd/oxide-sim")...)
	cmd.Dir = filepath.Join(filepath.Dir(file), "..", "..", "..")
	cmd.Env = env
	if output, err := cmd.CombinedOutput(); err != nil {
		return Programs{}, fmt.Errorf("build the programs: %w: %s", err, output)
	}
	return Programs{Plugin: filepath.Join(dir, "oxide-csi"), Sim: filepath.Join(dir, "oxide-sim")}, nil
}
