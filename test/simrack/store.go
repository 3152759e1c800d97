// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/google/uuid"
	"go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"
)

// The kinds of records; each is a bucket of JSON by ID.
const (
	bucketIdentity  = "identity"
	bucketTokens    = "tokens"
	bucketProjects  = "projects"
	bucketDisks     = "disks"
	bucketInstances = "instances"
	bucketSnapshots = "snapshots"
	bucketGroups    = "anti_affinity_groups"
)

var buckets = []string{
	bucketIdentity,
	bucketTokens,
	bucketProjects,
	bucketDisks,
	bucketInstances,
	bucketSnapshots,
	bucketGroups,
}

// store keeps the records of a rack in a file, so that they outlive the process. A change is written before any client
// can see it. Writes are not synced: the process may die, but the machine is not expected to. A nil store keeps
// nothing.
type store struct{ db *bbolt.DB }

// openStore opens the file in a folder. Without a folder it returns nil. A file that another process has open is an
// error.
func openStore(dir string) (*store, error) {
	if dir == "" {
		return nil, nil
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("make the state directory: %w", err)
	}
	path := filepath.Join(dir, "rack.db")
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{
		Timeout: 100 * time.Millisecond, NoSync: true, NoGrowSync: true, NoFreelistSync: true,
		FreelistType: bbolt.FreelistMapType,
	})
	if errors.Is(err, berrors.ErrTimeout) {
		return nil, fmt.Errorf("%s is in use by another process: give each rack its own state directory", path)
	}
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	err = db.Update(func(tx *bbolt.Tx) error {
		for _, b := range buckets {
			if _, err := tx.CreateBucketIfNotExists([]byte(b)); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("prepare %s: %w", path, err), db.Close())
	}
	return &store{db: db}, nil
}

func (s *store) close() error {
	if s == nil {
		return nil
	}
	return s.db.Close()
}

// change is one record to write. A nil value removes the record.
type change struct {
	bucket, key string
	value       any
}

func putRecord(bucket, key string, value any) change { return change{bucket, key, value} }
func deleteRecord(bucket, key string) change         { return change{bucket, key, nil} }

// write makes all the changes or none.
func (s *store) write(changes ...change) error {
	if s == nil {
		return nil
	}
	err := s.db.Update(func(tx *bbolt.Tx) error {
		for _, c := range changes {
			if err := c.apply(tx.Bucket([]byte(c.bucket))); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("write the rack's records: %w", err)
	}
	return nil
}

func (c change) apply(b *bbolt.Bucket) error {
	if c.value == nil {
		return b.Delete([]byte(c.key))
	}
	raw, err := json.Marshal(c.value)
	if err != nil {
		return err
	}
	return b.Put([]byte(c.key), raw)
}

// readAll reads every record of a bucket.
func readAll[T any](s *store, bucket string, take func(*T)) error {
	if s == nil {
		return nil
	}
	return s.db.View(func(tx *bbolt.Tx) error {
		return tx.Bucket([]byte(bucket)).ForEach(func(k, v []byte) error {
			record := new(T)
			if err := json.Unmarshal(v, record); err != nil {
				return fmt.Errorf("read record %q of %s: %w", k, bucket, err)
			}
			take(record)
			return nil
		})
	})
}

// load reads the records into an empty rack, and gives a new rack its identity.
func (r *Rack) load() error {
	byID := map[string]*project{}
	if err := errors.Join(
		readAll(r.store, bucketIdentity, func(i *identity) { r.identity = *i }),
		readAll(r.store, bucketTokens, func(t *token) { r.tokens[t.Token] = t }),
		readAll(r.store, bucketProjects, func(p *project) { byID[p.ID] = p; r.projects.put(p) }),
	); err != nil {
		return err
	}
	// Instances come before the disks that are attached to them.
	if err := readAll(r.store, bucketInstances, func(i *instance) { r.insertInstance(byID[i.ProjectID], i) }); err != nil {
		return err
	}
	if err := readAll(r.store, bucketDisks, func(d *disk) { r.insertDisk(byID[d.ProjectID], d) }); err != nil {
		return err
	}
	if err := readAll(r.store, bucketSnapshots, func(s *snapshot) { r.insertSnapshot(byID[s.ProjectID], s) }); err != nil {
		return err
	}
	if err := readAll(r.store, bucketGroups, func(g *group) { r.insertGroup(byID[g.ProjectID], g) }); err != nil {
		return err
	}
	if r.identity.RackID != "" {
		return nil
	}
	r.identity = identity{RackID: uuid.NewString(), SiloID: uuid.NewString(), Created: now()}
	return r.store.write(putRecord(bucketIdentity, "rack", &r.identity))
}

// resume ends the operations that a dead process left unfinished, as a rack does. An object in creation is removed, and
// an instance in transition reaches its target state. Guests do not outlive a process: each instance gets a new guest,
// and the guests of running instances are powered on.
func (r *Rack) resume() error {
	for _, d := range r.disks {
		if err := r.resumeDisk(d); err != nil {
			return err
		}
	}
	for _, s := range r.snapshots {
		if err := r.resumeSnapshot(s); err != nil {
			return err
		}
	}
	for _, i := range r.instances {
		if err := r.resumeInstance(i); err != nil {
			return err
		}
	}
	return nil
}

func (r *Rack) resumeDisk(d *disk) error {
	switch d.State {
	case diskCreating:
		if err := r.callGuests("delete disk "+d.ID, func(g Guests) error { return g.DeleteDisk(d.ID) }); err != nil {
			return err
		}
		return r.removeDisk(d)
	case diskAttaching:
		return r.changeDisk(d, func(d *disk) { d.State = diskAttached })
	case diskDetaching:
		return r.changeDisk(d, (*disk).detach)
	}
	return nil
}

func (r *Rack) resumeInstance(i *instance) error {
	if i.RunState == runCreating {
		return r.removeInstance(i)
	}
	release, err := r.lock(func() ([]string, error) { return []string{i.ID}, nil })
	if err != nil {
		return err
	}
	defer release()
	if err := r.createGuest(i); err != nil {
		return err
	}
	switch i.RunState {
	case runRunning, runMigrating:
		return r.powerOn(i)
	case runStarting, runRebooting:
		r.finishLater(i, runRunning)
	case runStopping:
		r.finishLater(i, runStopped)
	}
	return nil
}
