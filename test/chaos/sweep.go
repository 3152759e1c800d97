// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"
	"go.etcd.io/bbolt"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// temporaryPrefix begins the names of the snapshots through which volumes are cloned.
const temporaryPrefix = "csi-tmp-"

// temporaryAge is the age at which a temporary snapshot counts as left behind.
const temporaryAge = time.Hour

// auditTemporary checks the temporary snapshots that exist although no clone is being made. Each must have a reason:
// the plugin was killed during the clone, or it logged that it could not delete the snapshot.
func (w *world) auditTemporary(ctx context.Context, workers []*worker, b *results) error {
	left, err := w.temporarySnapshots(ctx)
	if err != nil {
		return err
	}
	log, err := os.ReadFile(w.path(pluginLog))
	if err != nil {
		return err
	}
	killed := map[string]bool{}
	for _, worker := range workers {
		for _, v := range append(worker.volumes, worker.volumesPast...) {
			killed[diskname.ForClone(simtest.ClusterID, v.name)] = v.killedDuring
		}
	}
	for _, name := range left {
		if !killed[name] && !warnedOf(string(log), name) {
			b.violation("the temporary snapshot %s was left behind without a line in the log", name)
		}
	}
	b.done["temporary snapshots left for an hour"] = len(left)
	return nil
}

// warnedOf reports whether the plugin's log has a warning about this snapshot.
func warnedOf(log, name string) bool {
	for line := range strings.Lines(log) {
		if strings.Contains(line, " level=WARN ") && strings.Contains(line, " name="+name+" ") {
			return true
		}
	}
	return false
}

func (w *world) temporarySnapshots(ctx context.Context) (names []string, err error) {
	list, err := w.rack.SnapshotListAllPages(ctx, oxide.SnapshotListParams{Project: oxide.NameOrId(w.sim.Project)})
	for _, snapshot := range list {
		if strings.HasPrefix(string(snapshot.Name), temporaryPrefix) {
			names = append(names, string(snapshot.Name))
		}
	}
	return names, err
}

// sweepTime is how long the plugin may take after its start to delete old temporary snapshots.
const sweepTime = 30 * time.Second

// auditSweep stops controllers and rack, makes the snapshots an hour older, and starts both again. Then all temporary
// snapshots must be deleted.
func (w *world) auditSweep(ctx context.Context, b *results) error {
	for _, plugin := range w.plugins {
		if err := plugin.Stop(); err != nil {
			return err
		}
	}
	if err := w.sim.Stop(); err != nil {
		return err
	}
	if err := age(w.path("rack/rack.db"), temporaryAge+time.Minute); err != nil {
		return fmt.Errorf("let the rack's snapshots grow old: %w", err)
	}
	if err := w.startRack(ctx); err != nil {
		return err
	}
	for i := range w.plugins {
		if err := w.startPlugin(i); err != nil {
			return err
		}
	}
	for end := time.Now().Add(sweepTime); ; {
		left, err := w.temporarySnapshots(ctx)
		if err != nil || len(left) == 0 {
			return err
		}
		if time.Now().After(end) {
			b.violation("the temporary snapshots %v still exist %s after an hour", left, sweepTime)
			return nil
		}
		if err := pause(ctx, 50*time.Millisecond); err != nil {
			return err
		}
	}
}

// age makes all snapshots in the database of a stopped rack older.
func age(path string, by time.Duration) error {
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{Timeout: time.Second})
	if err != nil {
		return err
	}
	err = db.Update(func(tx *bbolt.Tx) error {
		snapshots := tx.Bucket([]byte("snapshots"))
		records := map[string][]byte{}
		err := snapshots.ForEach(func(id, record []byte) error {
			var fields map[string]any
			if err := json.Unmarshal(record, &fields); err != nil {
				return err
			}
			text, _ := fields["created"].(string)
			created, err := time.Parse(time.RFC3339Nano, text)
			if err != nil {
				return err
			}
			fields["created"] = created.Add(-by)
			records[string(id)], err = json.Marshal(fields)
			return err
		})
		if err != nil {
			return err
		}
		for id, record := range records {
			if err := snapshots.Put([]byte(id), record); err != nil {
				return err
			}
		}
		return nil
	})
	return errors.Join(err, db.Close())
}
