// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"bufio"
	"errors"
	"os"
	"strings"
)

// auditLogs searches the programs' logs for panics, data races and the token.
func (w *world) auditLogs(b *results) error {
	for _, name := range []string{pluginLog, rackLog, otherRackLog} {
		if err := w.auditLog(name, b); err != nil {
			return err
		}
	}
	return nil
}

func (w *world) auditLog(name string, b *results) (err error) {
	file, err := os.Open(w.path(name))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	lines := bufio.NewScanner(file)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		for _, bad := range []string{"DATA RACE", "msg=panic", "panic:", w.sim.Token} {
			if strings.Contains(lines.Text(), bad) {
				b.violation("%s: %.300s", name, lines.Text())
			}
		}
	}
	return lines.Err()
}
