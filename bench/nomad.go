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

// nomadPrefix begins the names of the rows of make bench-nomad. Only make bench-nomad writes these rows.
const nomadPrefix = "nomad/"

// nomadBars are the limits in seconds of how long a job is without its volume. The grace period of the job files is 60 s.
var nomadBars = map[string]bar{
	"redeployment on the same client": atMost(5),
	"move to another client":          atMost(60 + 60),
}

// nomadTimes runs the test of deferred detaches on a real Nomad (test/nomad), which writes what it has measured to a
// file.
func nomadTimes(ctx context.Context, b *bench) ([]row, error) {
	file := filepath.Join(b.dir, "measured.json")
	cmd := exec.CommandContext(
		ctx, "go", "test", "-tags=nomad", "-count=1", "-timeout=30m", "-run=^TestDeferredDetach$", "./test/nomad")
	cmd.Env = append(os.Environ(), "OXIDE_CSI_MEASURED="+file)
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	if err := cmd.Run(); err != nil {
		return nil, err
	}
	measured, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("the test has measured nothing, perhaps it was skipped: %w", err)
	}
	return nomadRows(bytes.NewReader(measured))
}

// nomadRows reads what the test has measured: a JSON object for each time.
func nomadRows(measured io.Reader) (rows []row, err error) {
	missing := len(nomadBars)
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
		limit, known := nomadBars[m.Name]
		if known {
			missing--
		}
		rows = append(rows, median(nomadPrefix+m.Name, "s", limit, []float64{m.Seconds}))
	}
	if missing > 0 {
		return nil, fmt.Errorf("the test has not measured all times that have a limit: %v", rows)
	}
	return rows, nil
}
