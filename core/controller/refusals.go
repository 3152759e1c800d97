// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller

import (
	"log/slog"
	"sync"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// refusalTTL is how long a cached refusal is answered without a request to the rack. Nomad repeats some calls every
// second for each volume.
const refusalTTL = 5 * time.Second

type operation string

const (
	opAttach operation = "attach"
	opDetach operation = "detach"
)

// refusalCache keeps refused attaches and detaches for a short time. It is only for refusals whose reason lasts, such
// as a running instance.
type refusalCache struct {
	mu      sync.Mutex
	entries map[refusalKey]cachedRefusal
}

type refusalKey struct {
	operation            operation
	volumeID, instanceID string
}

type cachedRefusal struct {
	expires time.Time
	err     error
}

func newRefusalCache() *refusalCache {
	return &refusalCache{entries: map[refusalKey]cachedRefusal{}}
}

// put caches an error for [refusalTTL] and returns it.
func (r *refusalCache) put(op operation, volumeID, instanceID string, err error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	for key, entry := range r.entries {
		if now.After(entry.expires) {
			delete(r.entries, key)
		}
	}
	r.entries[refusalKey{op, volumeID, instanceID}] = cachedRefusal{expires: now.Add(refusalTTL), err: err}
	return err
}

// get returns the cached error, or nil. The error is logged at debug level only: it was logged when it was put.
func (r *refusalCache) get(op operation, volumeID, instanceID string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	entry, ok := r.entries[refusalKey{op, volumeID, instanceID}]
	if !ok || time.Now().After(entry.expires) {
		return nil
	}
	return rpc.LoggedAt(slog.LevelDebug, entry.err)
}

// removeVolume removes the entries of a volume, after its disk was attached.
func (r *refusalCache) removeVolume(volumeID string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for key := range r.entries {
		if key.volumeID == volumeID {
			delete(r.entries, key)
		}
	}
}
