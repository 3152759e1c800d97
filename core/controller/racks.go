// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/core/detach"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// racks are the racks of a controller. An ID does not tell its rack, and no two racks use the same ID
// (docs/reference/rack.md §8). A disk or snapshot is therefore looked up on the rack where it was found last, and
// otherwise on all racks. It counts as deleted only if every rack that could have it says so. Several of them can be
// projects of one rack, which then finds an ID in any of these projects.
type racks struct {
	all []*rack.Client
	// topology is the topology of everything on a rack. All messages share it: a separate copy for each entry would
	// make a list of thousands half as large again.
	topology map[*rack.Client][]*csi.Topology

	mu sync.Mutex
	// locations maps the ID of a disk or snapshot to the rack where it was found last.
	locations map[string]*rack.Client
}

// maxLocations bounds the memory of the location cache. An ID without an entry is looked up on all racks.
const maxLocations = 20_000

func newRacks(all []*rack.Client) *racks {
	r := &racks{all: all, topology: map[*rack.Client][]*csi.Topology{}, locations: map[string]*rack.Client{}}
	for _, client := range all {
		r.topology[client] = []*csi.Topology{rpc.Topology(client.Name())}
	}
	return r
}

func (r *racks) names() string {
	names := make([]string, 0, len(r.all))
	for _, client := range r.all {
		names = append(names, client.Name())
	}
	return strings.Join(names, ", ")
}

// cachedLocation returns the rack where an ID was found last, or nil.
func (r *racks) cachedLocation(id string) *rack.Client {
	if len(r.all) == 1 {
		return r.all[0]
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.locations[id]
}

func (r *racks) cacheLocation(id string, client *rack.Client) {
	if len(r.all) == 1 {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.locations) >= maxLocations {
		clear(r.locations)
	}
	r.locations[id] = client
}

func (r *racks) dropLocation(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.locations, id)
}

// locate returns the disk of a volume and its rack. If the disk has no ID, the volume exists and its disk is being
// replaced. NOT_FOUND means that no rack has the volume; each rack has then confirmed that this token would see it.
func (c *Service) locate(ctx context.Context, volumeID string) (rackController, rack.Disk, error) {
	id, ok := diskname.ParseID(volumeID)
	if !ok {
		return rackController{}, rack.Disk{}, rpc.NotFound(
			"volume_id %q is not a UUID: give the ID that CreateVolume returned",
			volumeID,
		)
	}
	client, disk, err := find(ctx, c.racks, id, diskOrReplaced, diskProject)
	switch {
	case errors.Is(err, rack.ErrNotFound):
		return c.locateGrown(ctx, id, err)
	case errors.Is(err, rack.ErrUnknown):
		c.forget(id)
	}
	return c.forRack(client), disk, err
}

// locateGrown is [Service.locate] for a volume that no rack has by its ID. If it has grown, the record that leads to
// its disk may have been deleted by hand, and then a list of all disks shows the disk. A volume without one is
// notFound.
func (c *Service) locateGrown(ctx context.Context, id string, notFound error) (rackController, rack.Disk, error) {
	for _, client := range c.racks.all {
		switch disk, found, err := client.GrownDisk(ctx, id); {
		case err != nil:
			return rackController{}, rack.Disk{}, retryable(ctx, err)
		case found:
			c.log.Warn("the record of a volume that has grown is missing; its disk was found in the list of all disks",
				"volume_id", id, "record", record.Replacements.Named("", id), "disk_id", disk.ID)
			c.racks.cacheLocation(id, client)
			return c.forRack(client), disk, nil
		}
	}
	return rackController{}, rack.Disk{}, notFound
}

// snapshot returns a snapshot and its rack. NOT_FOUND means that no rack has the snapshot; each rack has then confirmed
// that this token would see it.
func (c *Service) snapshot(ctx context.Context, snapshotID string) (rackController, rack.Snapshot, error) {
	id, ok := diskname.ParseID(snapshotID)
	if !ok {
		return rackController{}, rack.Snapshot{}, rpc.NotFound(
			"snapshot_id %q is not a UUID: the ID of a snapshot is its UUID on the rack",
			snapshotID,
		)
	}
	client, snapshot, err := find(ctx, c.racks, id, (*rack.Client).Snapshot, snapshotProject)
	return c.forRack(client), snapshot, err
}

// waitForDisk waits until a disk is not changing state, as long as the caller's deadline allows. [rack.ErrNotFound]
// means that the rack confirmed that this token would see the disk.
func (c rackController) waitForDisk(ctx context.Context, disk rack.Disk) (rack.Disk, error) {
	return c.waitForDiskWithin(ctx, disk, rpc.WaitBudget(ctx))
}

// waitBriefly is waitForDisk for a publish. With a grace period the caller may be Nomad, so it waits no longer than
// [detach.MaxWait].
func (c rackController) waitBriefly(ctx context.Context, disk rack.Disk) (rack.Disk, error) {
	maxWait := rpc.WaitBudget(ctx)
	if c.timed {
		maxWait = min(maxWait, detach.MaxWait)
	}
	return c.waitForDiskWithin(ctx, disk, maxWait)
}

func (c rackController) waitForDiskWithin(
	ctx context.Context, disk rack.Disk, maxWait time.Duration,
) (rack.Disk, error) {
	disk, err := c.rack.WaitForDisk(ctx, disk, maxWait)
	if errors.Is(err, rack.ErrNotFound) {
		if unconfirmed := c.confirmNotFound(ctx); unconfirmed != nil {
			err = unconfirmed
		}
	}
	return disk, err
}

// find looks up an ID with get, and returns the value and its rack: the one with the value's project, if one has it.
// [rack.ErrNotFound] means that no rack has the ID, and that each rack has confirmed that this token would see it.
// After any other error the value may exist. [rack.ErrUnknown] comes with the value, for callers that only show it.
func find[T any](
	ctx context.Context,
	r *racks,
	id string,
	get func(*rack.Client, context.Context, string) (T, error),
	project func(T) string,
) (*rack.Client, T, error) {
	remaining := r.all
	var notFound error
	if cached := r.cachedLocation(id); cached != nil {
		value, err := get(cached, ctx, id)
		if !errors.Is(err, rack.ErrNotFound) {
			return cached, value, err
		}
		notFound = err
		remaining = slices.DeleteFunc(slices.Clone(r.all), func(c *rack.Client) bool { return c == cached })
	}
	client, value, foreign, err := findOnAny(ctx, remaining, id, get, project, notFound)
	if err == nil {
		if !foreign {
			r.cacheLocation(id, client)
		}
		return client, value, nil
	}
	if errors.Is(err, rack.ErrNotFound) {
		r.dropLocation(id)
		if unconfirmed := r.confirmNotFound(ctx); unconfirmed != nil {
			err = unconfirmed
		}
	}
	return client, value, err
}

// findOnAny queries racks concurrently and returns the first that has the ID in its project. If it is only in another
// project, foreign is true. The parameter notFound is the answer of a rack that was queried before.
func findOnAny[T any](
	ctx context.Context,
	clients []*rack.Client,
	id string,
	get func(*rack.Client, context.Context, string) (T, error),
	project func(T) string,
	notFound error,
) (on *rack.Client, value T, foreign bool, err error) {
	type found struct {
		value T
		own   bool
	}
	look := func(ctx context.Context, client *rack.Client) (found, error) {
		value, err := get(client, ctx, id)
		if err != nil {
			return found{value: value}, err
		}
		own, err := client.ProjectID(ctx)
		in := project(value)
		return found{value, in == "" || in == own}, err // a volume without a disk was found by the project's record
	}
	var failed error
	for client, result := range queryAll(ctx, clients, look) {
		switch {
		case result.err == nil && result.value.own:
			return client, result.value.value, false, nil
		case result.err == nil:
			on, value, foreign = client, result.value.value, true
		case errors.Is(result.err, rack.ErrNotFound):
			notFound = result.err
		case errors.Is(result.err, rack.ErrUnknown), errors.Is(result.err, record.ErrFormat):
			return client, result.value.value, false, result.err // this rack has it
		default:
			failed = errors.Join(failed, result.err)
		}
	}
	if failed != nil {
		// The code of one rack's error would be wrong here: the disk or snapshot may exist on that rack.
		return nil, value, false, retryable(
			ctx, fmt.Errorf("%s may be on a rack that does not respond: %w", id, singleLine(failed)))
	}
	if foreign {
		return on, value, true, nil
	}
	return nil, value, false, notFound
}

// confirmNotFound returns nil if a 404 of every rack can be trusted. Otherwise the error is UNAVAILABLE, or the end of
// ctx: no orchestrator may conclude then that the disk or snapshot was deleted.
func (r *racks) confirmNotFound(ctx context.Context) error {
	for _, result := range queryAll(ctx, r.all, func(ctx context.Context, client *rack.Client) (struct{}, error) {
		return struct{}{}, client.ConfirmProject(ctx)
	}) {
		if result.err != nil {
			return retryable(ctx, result.err)
		}
	}
	return nil
}

// confirmNotFound is [racks.confirmNotFound] for this rack only.
func (c rackController) confirmNotFound(ctx context.Context) error {
	if err := c.rack.ConfirmProject(ctx); err != nil {
		return retryable(ctx, err)
	}
	return nil
}

// result is the answer of one rack.
type result[T any] struct {
	value T
	err   error
	// panicked is the value of a panic in the query. The goroutine that reads the results panics with it.
	panicked any
}

// queryAll calls query for all racks concurrently and yields the results as they arrive. Stopping the iteration cancels
// the remaining queries.
func queryAll[T any](
	ctx context.Context,
	clients []*rack.Client,
	query func(context.Context, *rack.Client) (T, error),
) iter.Seq2[*rack.Client, result[T]] {
	return func(yield func(*rack.Client, result[T]) bool) {
		if len(clients) == 1 {
			value, err := query(ctx, clients[0])
			yield(clients[0], result[T]{value: value, err: err})
			return
		}
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		type rackResult struct {
			client *rack.Client
			result[T]
		}
		results := make(
			chan rackResult,
			len(clients),
		) // buffered for all, so that no goroutine blocks after the reader stopped
		for _, client := range clients {
			go func() {
				r := rackResult{client: client}
				defer func() {
					r.panicked = recover()
					results <- r
				}()
				r.value, r.err = query(ctx, client)
			}()
		}
		for range clients {
			r := <-results
			if r.panicked != nil {
				panic(r.panicked)
			}
			if !yield(r.client, r.result) {
				return
			}
		}
	}
}

// singleLine joins the lines of an error's text.
func singleLine(err error) error { return singleLineError{err} }

type singleLineError struct{ error }

func (e singleLineError) Error() string { return strings.ReplaceAll(e.error.Error(), "\n", "; ") }
func (e singleLineError) Unwrap() error { return e.error }
