// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller

import (
	"cmp"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

const (
	// refusalTTL is how long a refusal is answered without a request to the rack. Nomad repeats some calls every second
	// for each volume.
	refusalTTL = 5 * time.Second
	// refusalMemory is how long a refusal is reported after its last repetition. Kubernetes' external-attacher repeats a
	// call at least every five minutes.
	refusalMemory = 10 * time.Minute
)

type operation string

const (
	opAttach operation = "attach"
	opDetach operation = "detach"
)

// refusals keeps refused attaches and detaches, for repetitions and for the report of attach mode hot. It is only for
// refusals whose reason lasts, such as a running instance.
type refusals struct {
	mu      sync.Mutex
	entries map[refusalKey]refusal
}

type refusalKey struct {
	operation            operation
	volumeID, instanceID string
}

type refusal struct {
	// since is the time of the first refused request, repeated that of the last one, asked that of the rack's last answer.
	since, repeated, asked time.Time
	err                    error
}

func newRefusals() *refusals { return &refusals{entries: map[refusalKey]refusal{}} }

// put keeps an error for [refusalTTL] and returns it.
func (r *refusals) put(op operation, volumeID, instanceID string, err error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	now, key := time.Now(), refusalKey{op, volumeID, instanceID}
	r.forgetOld(now)
	entry, known := r.entries[key]
	if !known {
		entry.since = now
	}
	entry.repeated, entry.asked, entry.err = now, now, err
	r.entries[key] = entry
	return err
}

// get returns the error of a repeated request, or nil. The error is logged at debug level only: it was logged when it
// was put.
func (r *refusals) get(op operation, volumeID, instanceID string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	now, key := time.Now(), refusalKey{op, volumeID, instanceID}
	entry, ok := r.entries[key]
	if !ok || now.Sub(entry.asked) > refusalTTL {
		return nil
	}
	entry.repeated = now
	r.entries[key] = entry
	return rpc.LoggedAt(slog.LevelDebug, entry.err)
}

// remove removes the entries of a volume on an instance, or on any instance if instanceID is "".
func (r *refusals) remove(volumeID, instanceID string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	maps.DeleteFunc(r.entries, func(key refusalKey, _ refusal) bool {
		return key.volumeID == volumeID && (instanceID == "" || key.instanceID == instanceID)
	})
}

func (r *refusals) forgetOld(now time.Time) {
	maps.DeleteFunc(r.entries, func(_ refusalKey, entry refusal) bool {
		return now.Sub(entry.repeated) > refusalMemory
	})
}

// report returns the instances that wait for a stop, sorted. Each has the volumes to attach and to detach while it is
// stopped.
func (r *refusals) report() []rpc.Restart {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.forgetOld(time.Now())
	all := []rpc.Restart{}
	byVolume := func(x, y refusalKey) int {
		return cmp.Or(strings.Compare(x.instanceID, y.instanceID), strings.Compare(x.volumeID, y.volumeID))
	}
	for _, key := range slices.SortedFunc(maps.Keys(r.entries), byVolume) {
		entry := r.entries[key]
		if len(all) == 0 || all[len(all)-1].InstanceID != key.instanceID {
			all = append(all, rpc.Restart{
				InstanceID: key.instanceID, Since: entry.since, Reason: rpc.ReasonManual,
				Message: "this rack attaches and detaches disks only while it is stopped, and --attach-mode=hot stops nothing; " +
					"on a plain host repeat the command then",
			})
		}
		one := &all[len(all)-1]
		if entry.since.Before(one.Since) {
			one.Since = entry.since
		}
		if key.operation == opDetach {
			one.Detach = append(one.Detach, key.volumeID)
			continue
		}
		one.Attach = append(one.Attach, rpc.PendingAttach{
			VolumeID: key.volumeID, Since: entry.since, LastRequested: entry.repeated,
		})
	}
	return all
}
