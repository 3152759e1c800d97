// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// ListVolumes lists the disks that this plugin has made for its cluster, and every attached disk of the project: Kubernetes'
// attacher takes what is not listed for detached, also a volume that somebody made by hand. Boot disks are attached disks,
// too. CSI spec, ListVolumes.
func (c *Service) ListVolumes(ctx context.Context, req *csi.ListVolumesRequest) (*csi.ListVolumesResponse, error) {
	if err := validateList(req); err != nil {
		return nil, err
	}
	counts := volumeCounts{}
	lazy, err := c.allLazy(ctx)
	if err != nil {
		return nil, err
	}
	entries, next, err := listPage(
		ctx,
		c,
		(*rack.Client).Disks,
		diskProject,
		req,
		func(on onRack, disk rack.Disk) *csi.ListVolumesResponse_Entry {
			ours := c.owns(disk)
			if !listed(disk, ours) {
				return nil
			}
			if ours {
				counts.add(on.rack, disk)
			}
			return &csi.ListVolumesResponse_Entry{
				Volume: on.volume(disk, parameters{}),
				Status: &csi.ListVolumesResponse_VolumeStatus{PublishedNodeIds: publishedNodes(disk, lazy)},
			}
		},
	)
	if err != nil {
		return nil, err
	}
	if lazy, err = c.allLazy(ctx); err != nil {
		return nil, err
	}
	for _, entry := range entries {
		if nodes := entry.GetStatus().
			GetPublishedNodeIds(); len(nodes) > 0 &&
			lazy[entry.GetVolume().GetVolumeId()] == nodes[0] {
			entry.Status.PublishedNodeIds = nil
		}
	}
	if err := c.sendRestarts(ctx, ""); err != nil {
		return nil, err
	}
	if req.GetStartingToken() == "" && next == "" {
		for _, client := range c.racks.all {
			c.metrics.SetVolumes(client.Name(), counts[client].all, counts[client].attached)
		}
	}
	return &csi.ListVolumesResponse{Entries: entries, NextToken: next}, nil
}

// listed reports whether a disk counts as a volume here. One that is being made may not come to be.
func listed(disk rack.Disk, ours bool) bool {
	return disk.State != rack.Creating && (disk.InstanceID != "" || ours)
}

// owns reports whether this plugin has made a disk, for its cluster.
func (c *Service) owns(disk rack.Disk) bool {
	owner, ours := rack.ParseDescription(disk.Description)
	return ours && owner.Cluster == c.cluster
}

// volumeCount is how many volumes of this cluster a list has, and how many of them are attached.
type volumeCount struct{ all, attached int }

type volumeCounts map[*rack.Client]volumeCount

func (v volumeCounts) add(on *rack.Client, disk rack.Disk) {
	count := v[on]
	count.all++
	if disk.InstanceID != "" {
		count.attached++
	}
	v[on] = count
}

// allLazy is [onRack.lazy] for all racks.
func (c *Service) allLazy(ctx context.Context) (map[string]string, error) {
	all := map[string]string{}
	for _, client := range c.racks.all {
		lazy, err := c.on(client).deferredDetaches(ctx)
		if err != nil {
			return nil, err
		}
		maps.Copy(all, lazy)
	}
	return all, nil
}

// publishedNodes are the nodes that a volume is published on: the instance that holds its disk, unless it does so for nobody
// any more. A restart records that before it attaches a disk, and until after it has detached one: so what is lazy has to be
// asked for before the disk is looked at, and again afterwards.
func publishedNodes(disk rack.Disk, lazy map[string]string) []string {
	if disk.InstanceID == "" || lazy[disk.ID] == disk.InstanceID {
		return nil
	}
	return []string{disk.InstanceID}
}

func diskProject(disk rack.Disk) string             { return disk.ProjectID }
func snapshotProject(snapshot rack.Snapshot) string { return snapshot.ProjectID }

// ControllerGetVolume tells what there is to know of a volume: CSI spec, ControllerGetVolume.
func (c *Service) ControllerGetVolume(
	ctx context.Context,
	req *csi.ControllerGetVolumeRequest,
) (*csi.ControllerGetVolumeResponse, error) {
	if err := rpc.CheckVolumeID(req.GetVolumeId()); err != nil {
		return nil, err
	}
	on, disk, err := c.disk(ctx, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	nodes := publishedNodes(disk, nil)
	if on.engine != nil && len(nodes) > 0 {
		if disk, nodes, err = on.publishedNow(ctx, disk.ID); err != nil {
			return nil, err
		}
	}
	if err := c.sendRestarts(ctx, disk.ID); err != nil {
		return nil, err
	}
	return &csi.ControllerGetVolumeResponse{
		Volume: on.volume(disk, parameters{}),
		Status: &csi.ControllerGetVolumeResponse_VolumeStatus{PublishedNodeIds: nodes},
	}, nil
}

// publishedNow looks at a disk, and where it is published, in attach mode restart.
func (c onRack) publishedNow(ctx context.Context, diskID string) (rack.Disk, []string, error) {
	before, err := c.deferredDetaches(ctx)
	if err != nil {
		return rack.Disk{}, nil, err
	}
	_, disk, err := c.disk(ctx, diskID)
	if err != nil {
		return rack.Disk{}, nil, err
	}
	after, err := c.deferredDetaches(ctx)
	if err != nil || after[diskID] == disk.InstanceID {
		return disk, nil, err
	}
	return disk, publishedNodes(disk, before), nil
}

// ListSnapshots lists the snapshots of the project, whoever made them, without those that this plugin makes for a moment in
// order to copy a disk. CSI spec, ListSnapshots.
func (c *Service) ListSnapshots(
	ctx context.Context,
	req *csi.ListSnapshotsRequest,
) (*csi.ListSnapshotsResponse, error) {
	if err := validateListSnapshots(req); err != nil {
		return nil, err
	}
	source, sourceOK := diskname.ParseID(req.GetSourceVolumeId())
	if req.GetSourceVolumeId() != "" && !sourceOK {
		return &csi.ListSnapshotsResponse{}, nil // no disk has such an ID
	}
	entry := func(on onRack, snapshot rack.Snapshot) *csi.ListSnapshotsResponse_Entry {
		if snapshot.State == rack.SnapshotCreating || snapshot.Temporary() || (sourceOK && snapshot.DiskID != source) {
			return nil
		}
		return &csi.ListSnapshotsResponse_Entry{Snapshot: on.snapshotMessage(snapshot)}
	}
	if _, _, err := c.startOf(req.GetStartingToken()); err != nil {
		return nil, err
	}
	if req.GetSnapshotId() != "" {
		return c.listSnapshot(ctx, req.GetSnapshotId(), entry)
	}
	entries, next, err := listPage(ctx, c, (*rack.Client).Snapshots, snapshotProject, req, entry)
	if err != nil {
		return nil, err
	}
	return &csi.ListSnapshotsResponse{Entries: entries, NextToken: next}, nil
}

// listSnapshot is a list of one snapshot, or of none.
func (c *Service) listSnapshot(
	ctx context.Context,
	id string,
	entry func(onRack, rack.Snapshot) *csi.ListSnapshotsResponse_Entry,
) (*csi.ListSnapshotsResponse, error) {
	list := &csi.ListSnapshotsResponse{}
	if _, ok := diskname.ParseID(id); !ok {
		return list, nil // no snapshot has such an ID
	}
	on, snapshot, err := c.snapshot(ctx, id)
	if errors.Is(err, rack.ErrNotFound) {
		return list, nil
	}
	if err != nil {
		return nil, err
	}
	if one := entry(on, snapshot); one != nil {
		list.Entries = append(list.Entries, one)
	}
	return list, nil
}

// listRequest is what the requests for lists have in common.
type listRequest interface {
	GetMaxEntries() int32
	GetStartingToken() string
}

// listPage lists things of all racks, one rack after the other, by ID. Entry makes an entry of a thing, or nil where the list
// leaves it out. A page is filled after that; the next token is empty where nothing follows. A rack that does not answer, or
// shows another project than it did, is an error: a list without its disks would say that they are gone.
func listPage[T, E any](
	ctx context.Context, c *Service,
	list func(*rack.Client, context.Context, rack.Cursor, int) iter.Seq2[rack.ListItem[T], error],
	projectOf func(T) string,
	req listRequest,
	entry func(onRack, T) *E,
) (entries []*E, next string, err error) {
	from, at, err := c.startOf(req.GetStartingToken())
	if err != nil {
		return nil, "", err
	}
	most := int(req.GetMaxEntries())
	var last, lastPage string
	for _, client := range c.racks.all[from:] {
		on := c.on(client)
		project, err := client.ProjectID(ctx)
		if err != nil {
			return nil, "", unknownOutcome(
				ctx,
				fmt.Errorf("a list without rack %q would not be complete: %w", client.Name(), err),
			)
		}
		empty := true
		wanted := 0
		if most > 0 {
			wanted = most - len(entries) + 1
		}
		for listed, err := range list(client, ctx, at, wanted) {
			if err != nil {
				return nil, "", unclear(ctx, err)
			}
			if of := projectOf(listed.Value); of != project {
				return nil, "", rpc.Unavailable(
					"rack %q lists things of project %s, and project %q had the ID %s: check its host, token and project",
					client.Name(),
					of,
					client.ProjectName(),
					project,
				)
			}
			empty = false
			one := entry(on, listed.Value)
			if one == nil {
				continue
			}
			if most > 0 && len(entries) == most {
				c.cursors.keep(last, lastPage)
				return entries, last, nil
			}
			entries = append(entries, one)
			last, lastPage = client.Name()+tokenSeparator+listed.ID, listed.PageToken
		}
		if empty {
			// Nothing at all is also what a project shows that has only the name of ours.
			if err := client.ConfirmProject(ctx); err != nil {
				return nil, "", unknownOutcome(ctx, err)
			}
		}
		at = rack.Cursor{}
	}
	return entries, "", nil
}

// tokenSeparator stands between the rack's name and the last ID in a token. Names of racks may have it, too.
const tokenSeparator = "."

// startOf reads a token: which rack to go on with, and where. A token is good for every replica and after a restart; the page
// of the rack that it leads to is remembered by the process that gave it out, and looked for by any other.
func (c *Service) startOf(token string) (from int, at rack.Cursor, err error) {
	if token == "" {
		return 0, rack.Cursor{}, nil
	}
	end := strings.LastIndex(token, tokenSeparator)
	if end < 0 {
		return 0, at, rpc.Aborted("starting_token %.80q is none of this plugin's: begin the list anew", token)
	}
	name := token[:end]
	id, ok := diskname.ParseID(token[end+1:])
	from = slices.IndexFunc(c.racks.all, func(client *rack.Client) bool { return client.Name() == name })
	if !ok || from < 0 {
		return 0, at, rpc.Aborted("starting_token %.80q is none of this plugin's: begin the list anew", token)
	}
	return from, rack.Cursor{LastID: id, PageToken: c.cursors.page(token)}, nil
}

// cursors remembers the racks' own page tokens for ours, which are too short to hold them.
type cursors struct {
	mu    sync.Mutex
	pages map[string]string
}

// cursorLimit bounds the memory: half a kilobyte each. One that is forgotten costs reading the list from its start.
const cursorLimit = 200

func newCursors() *cursors { return &cursors{pages: map[string]string{}} }

func (c *cursors) keep(token, page string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.pages) >= cursorLimit {
		clear(c.pages)
	}
	if page != "" {
		c.pages[token] = page
	}
}

func (c *cursors) page(token string) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.pages[token]
}
