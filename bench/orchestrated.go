// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
)

// timedTest is a test on a real orchestrator that writes the times which it has measured to a file.
type timedTest struct {
	// prefix begins the names of its rows. Only its own command writes these rows.
	prefix          string
	tags, run, path string
}

// onNomad measures how long a job is without its volume. The grace period of the job files is 60 s.
var onNomad = timedTest{
	prefix: "nomad/", tags: "nomad", run: "^TestDeferredDetach$", path: "./test/nomad",
}

// ofUpgrades measures how long a pod that writes waits while the plugin is replaced, and how long a new volume does.
var ofUpgrades = timedTest{
	prefix: "upgrade/", tags: "k8s,upgrade", run: "^TestUpgrade$", path: "./test/k8s",
}

// measure runs the test.
func (t timedTest) measure(ctx context.Context, b *bench) ([]row, error) {
	file := filepath.Join(b.dir, "measured.json")
	cmd := exec.CommandContext(
		ctx, "go", "test", "-tags="+t.tags, "-count=1", "-timeout=30m", "-run="+t.run, t.path)
	cmd.Env = append(os.Environ(), "OXIDE_CSI_MEASURED="+file)
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	if err := cmd.Run(); err != nil {
		return nil, err
	}
	measured, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("the test has measured nothing, perhaps it was skipped: %w", err)
	}
	return t.rows(bytes.NewReader(measured))
}

// rows reads what the test has measured: a JSON object for each time.
func (t timedTest) rows(measured io.Reader) (rows []row, err error) {
	for decoder := json.NewDecoder(measured); ; {
		var m struct {
			Name    string
			Seconds float64
		}
		if err := decoder.Decode(&m); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, err
		}
		rows = append(rows, median(t.prefix+m.Name, "s", []float64{m.Seconds}))
	}
	return rows, unmeasured(rows, t.prefix)
}
