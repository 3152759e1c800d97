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

// RaceDetector reports whether this program was built with the race detector. If so, a test should also build the
// programs that it starts with it.
func RaceDetector() bool {
	info, ok := debug.ReadBuildInfo()
	return ok && slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"})
}

// ReleaseFiles is the folder of a release's files, with its programs and images, or empty. Tests then use these instead
// of building their own: test/release/inplace.sh.
func ReleaseFiles() string { return os.Getenv("OXIDE_RELEASE_FILES") }

// ReleaseVersion is the version of the [ReleaseFiles]. In pages VERSION stands for it.
func ReleaseVersion() string { return os.Getenv("OXIDE_RELEASE_VERSION") }

// Build builds both programs into a directory, if race is set with the race detector. It needs the source tree of this
// package. If there are [ReleaseFiles], it copies those programs.
func Build(dir string, race bool) (Programs, error) {
	made := Programs{Plugin: filepath.Join(dir, "oxide-csi"), Sim: filepath.Join(dir, "oxide-sim")}
	if released := ReleaseFiles(); released != "" {
		from := filepath.Join(released, "programs")
		output, err := exec.Command("cp", filepath.Join(from, "oxide-csi"), filepath.Join(from, "oxide-sim"), dir).
			CombinedOutput()
		if err != nil {
			err = fmt.Errorf("copy the programs of the release: %w: %s", err, output)
		}
		return made, err
	}
	_, file, _, ok := runtime.Caller(0)
	if !ok {
		return Programs{}, fmt.Errorf("build the programs: the source tree cannot be found")
	}
	args, env := []string{"build", "-o", dir + "/", "-ldflags=-s -w"}, os.Environ()
	if race {
		args = append(args, "-race")
	} else { // the same flags as make build
		args = append(args, "-trimpath")
		env = append(env, "CGO_ENABLED=0")
	}
	cmd := exec.Command("go", append(args, "./cmd/oxide-csi", "./cmd/oxide-sim")...)
	cmd.Dir = filepath.Join(filepath.Dir(file), "..", "..", "..")
	cmd.Env = env
	if output, err := cmd.CombinedOutput(); err != nil {
		return Programs{}, fmt.Errorf("build the programs: %w: %s", err, output)
	}
	return made, nil
}
