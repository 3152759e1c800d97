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
	"google.golang.org/protobuf/proto"

	"github.com/oxidecomputer/oxide-csi-plugin/core/metrics"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// ListVolumes lists the disks that this plugin made for its cluster, and every attached disk of the project: CSI spec,
// ListVolumes. Kubernetes' external-attacher treats a volume that is not listed as detached, also a volume that a user
// made by hand. Boot disks are listed too, because they are attached.
func (c *Service) ListVolumes(ctx context.Context, req *csi.ListVolumesRequest) (*csi.ListVolumesResponse, error) {
	if err := validateList(req); err != nil {
		return nil, err
	}
	cluster, adoptable, err := c.adoptable(ctx)
	switch {
	case err != nil:
		return nil, err
	case adoptable != nil:
		return c.listAdoptable(ctx, req, cluster, adoptable)
	}
	if req.GetStartingToken() == "" {
		if err := c.sendNodeNames(ctx); err != nil {
			return nil, err
		}
	}
	details := newDetails(ctx)
	counts, unfinished := c.volumeCounts.get(req.GetStartingToken()), asked(ctx, rpc.MetadataAskUnfinished)
	if unfinished {
		counts = nil // as a list that another process began
	}
	var listed []listedDisk // of each entry, and of the first entry of the next page
	deferred, err := c.allDeferredDetaches(ctx)
	if err != nil {
		return nil, err
	}
	entries, next, err := listPage(
		ctx,
		c,
		c.disksAndReplaced,
		diskProject,
		req,
		func(rc rackController, disk rack.Disk) *csi.ListVolumesResponse_Entry {
			owner, described := rack.ParseDescription(disk.Description)
			ours := described && owner.Cluster == c.cluster
			if !isListed(disk, ours, unfinished) {
				return nil
			}
			listed = append(listed, listedDisk{rc.rack, ours, disk.InstanceID != "", owner.LUKS != 0})
			details.addVolume(c, disk)
			return &csi.ListVolumesResponse_Entry{
				Volume: rc.volume(disk, parameters{}),
				Status: &csi.ListVolumesResponse_VolumeStatus{PublishedNodeIds: publishedNodes(disk, deferred)},
			}
		},
	)
	if err != nil {
		return nil, err
	}
	if deferred, err = c.allDeferredDetaches(ctx); err != nil {
		return nil, err
	}
	hideDeferred(entries, deferred)
	if err := errors.Join(c.sendRestarts(ctx, ""), details.send(ctx)); err != nil {
		return nil, err
	}
	c.count(counts, listed[:len(entries)], next)
	return &csi.ListVolumesResponse{Entries: entries, NextToken: next}, nil
}

// hideDeferred shows as unpublished the volumes whose detach was deferred after their disks were listed. deferred are
// the instances by volume ID.
func hideDeferred(entries []*csi.ListVolumesResponse_Entry, deferred map[string]string) {
	for _, entry := range entries {
		nodes := entry.GetStatus().GetPublishedNodeIds()
		if len(nodes) > 0 && deferred[entry.GetVolume().GetVolumeId()] == nodes[0] {
			entry.Status.PublishedNodeIds = nil
		}
	}
}

// count adds the disks of a page to those of the pages before it. The last page, which has no next token, completes the
// metrics.
func (c *Service) count(counts volumeCounts, page []listedDisk, next string) {
	for _, disk := range page {
		counts.add(disk)
	}
	switch {
	case counts == nil: // another process began this list
	case next != "":
		c.volumeCounts.store(next, counts)
	default:
		for _, client := range c.racks.all {
			c.metrics.SetVolumes(client.Name(), counts[client])
		}
	}
}

// isListed reports whether ListVolumes lists a disk. Without unfinished it leaves out a disk in state Creating, whose
// creation can still fail, but not the new disk of a volume that grows. It leaves out a disk that the rack failed to
// delete: the volume is deleted, or has another disk.
func isListed(disk rack.Disk, ours, unfinished bool) bool {
	failable := disk.State == rack.Creating && !disk.Grown()
	return (!failable || unfinished) && !disk.HalfDeleted() && (disk.InstanceID != "" || ours)
}

// disksAndReplaced is [expand.Expander.Disks] of a rack.
func (c *Service) disksAndReplaced(
	client *rack.Client, ctx context.Context, from rack.Cursor, wanted int,
) iter.Seq2[rack.ListItem[rack.Disk], error] {
	return c.expanders[client].Disks(ctx, from, wanted)
}

// ownsDisk reports whether this plugin made a disk for its cluster.
func (c *Service) ownsDisk(disk rack.Disk) bool {
	owner, ours := rack.ParseDescription(disk.Description)
	return ours && owner.Cluster == c.cluster
}

type volumeCounts map[*rack.Client]metrics.Volumes

// listedDisk is what the metrics need to know of a disk in a list.
type listedDisk struct {
	client                    *rack.Client
	ours, attached, encrypted bool
}

func (v volumeCounts) add(disk listedDisk) {
	if v == nil || !disk.ours {
		return
	}
	count := v[disk.client]
	count.All++
	if disk.attached {
		count.Attached++
	}
	if disk.encrypted {
		count.Encrypted++
	}
	v[disk.client] = count
}

// allDeferredDetaches is [rackController.deferredDetaches] for all racks.
func (c *Service) allDeferredDetaches(ctx context.Context) (map[string]string, error) {
	all := map[string]string{}
	for _, client := range c.racks.all {
		deferred, err := c.forRack(client).deferredDetaches(ctx)
		if err != nil {
			return nil, err
		}
		maps.Copy(all, deferred)
	}
	return all, nil
}

// publishedNodes are the nodes on which a volume is published: the instance to which its disk is attached, unless the
// disk is only waiting for its deferred detach. The record is created before the disk is attached and deleted after it
// is detached. So a caller must read the records before the disk and again after it.
func publishedNodes(disk rack.Disk, deferred map[string]string) []string {
	if disk.InstanceID == "" || deferred[disk.VolumeID] == disk.InstanceID {
		return nil
	}
	return []string{disk.InstanceID}
}

func diskProject(disk rack.Disk) string             { return disk.ProjectID }
func snapshotProject(snapshot rack.Snapshot) string { return snapshot.ProjectID }

// ControllerGetVolume returns a volume and the nodes on which it is published: CSI spec, ControllerGetVolume.
func (c *Service) ControllerGetVolume(
	ctx context.Context,
	req *csi.ControllerGetVolumeRequest,
) (*csi.ControllerGetVolumeResponse, error) {
	if err := rpc.CheckVolumeID(req.GetVolumeId()); err != nil {
		return nil, err
	}
	if err := c.sendNodeNames(ctx); err != nil {
		return nil, err
	}
	rc, disk, err := c.shownDisk(ctx, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	nodes := publishedNodes(disk, nil)
	if rc.defersDetaches() && len(nodes) > 0 {
		if disk, nodes, err = rc.publishedNow(ctx, disk.VolumeID); err != nil {
			return nil, err
		}
	}
	details := newDetails(ctx)
	details.addVolume(c, disk)
	if err := errors.Join(c.sendRestarts(ctx, disk.VolumeID), details.send(ctx)); err != nil {
		return nil, err
	}
	return &csi.ControllerGetVolumeResponse{
		Volume: rc.volume(disk, parameters{}),
		Status: &csi.ControllerGetVolumeResponse_VolumeStatus{PublishedNodeIds: nodes},
	}, nil
}

// publishedNow returns the disk of a volume and the nodes on which the volume is published, for a controller that
// defers detaches.
func (c rackController) publishedNow(ctx context.Context, volumeID string) (rack.Disk, []string, error) {
	before, err := c.deferredDetaches(ctx)
	if err != nil {
		return rack.Disk{}, nil, err
	}
	_, disk, err := c.shownDisk(ctx, volumeID)
	if err != nil {
		return rack.Disk{}, nil, err
	}
	after, err := c.deferredDetaches(ctx)
	if err != nil || after[volumeID] == disk.InstanceID {
		return disk, nil, err
	}
	return disk, publishedNodes(disk, before), nil
}

// ListSnapshots lists all snapshots of the project except the temporary snapshots of clones: CSI spec, ListSnapshots.
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
	_, adoptable, err := c.adoptable(ctx)
	if err != nil {
		return nil, err
	}
	details, unfinished := newDetails(ctx), asked(ctx, rpc.MetadataAskUnfinished)
	entry := func(rc rackController, snapshot rack.Snapshot) *csi.ListSnapshotsResponse_Entry {
		if snapshot.State == rack.SnapshotCreating && !unfinished || snapshot.Internal() ||
			(sourceOK && snapshot.VolumeID != source) {
			return nil
		}
		if adoptable != nil && !adoptable(snapshot.Description, snapshot.VolumeID) {
			return nil
		}
		details.addSnapshot(c, snapshot)
		return &csi.ListSnapshotsResponse_Entry{Snapshot: rc.snapshotMessage(snapshot)}
	}
	if _, _, err := c.parseStartingToken(req.GetStartingToken()); err != nil {
		return nil, err
	}
	list := &csi.ListSnapshotsResponse{}
	if req.GetSnapshotId() != "" {
		list.Entries, err = c.listSnapshot(ctx, req.GetSnapshotId(), entry)
	} else {
		list.Entries, list.NextToken, err = listPage(ctx, c, (*rack.Client).Snapshots, snapshotProject, req, entry)
	}
	if err == nil {
		err = details.send(ctx)
	}
	if err != nil {
		return nil, err
	}
	return list, nil
}

// listSnapshot returns a list of one snapshot, or an empty list.
func (c *Service) listSnapshot(
	ctx context.Context,
	id string,
	entry func(rackController, rack.Snapshot) *csi.ListSnapshotsResponse_Entry,
) ([]*csi.ListSnapshotsResponse_Entry, error) {
	if _, ok := diskname.ParseID(id); !ok {
		return nil, nil // no snapshot has such an ID
	}
	rc, snapshot, err := c.snapshot(ctx, id)
	if errors.Is(err, rack.ErrNotFound) {
		return nil, nil
	}
	if err != nil && !errors.Is(err, rack.ErrUnknown) {
		return nil, err
	}
	if e := entry(rc, snapshot); e != nil {
		return []*csi.ListSnapshotsResponse_Entry{e}, nil
	}
	return nil, nil
}

// listRequest is the common part of all list requests.
type listRequest interface {
	GetMaxEntries() int32
	GetStartingToken() string
}

// maxListBytes bounds the entries of a response, also without max_entries. A gRPC client accepts 4 MiB by default. The
// CSI specification lets a plugin return fewer entries than requested, with a next_token, and Kubernetes'
// external-attacher follows the token (pkg/attacher/lister.go).
const maxListBytes = 3 << 20

// entryOverhead is more than the tag and length of an entry in its response, in bytes.
const entryOverhead = 8

// listPage returns one page of a list over all racks, one rack after the other, sorted by ID. The function toEntry
// makes a list entry, or returns nil to leave it out; only entries count towards max_entries and [maxListBytes]. The
// next token is empty on the last page. A rack that does not answer, or shows another project than before, is an error:
// to an orchestrator, a volume that is missing in the list is deleted or detached.
func listPage[T, E any, P interface {
	*E
	proto.Message
}](
	ctx context.Context, c *Service,
	list func(*rack.Client, context.Context, rack.Cursor, int) iter.Seq2[rack.ListItem[T], error],
	projectOf func(T) string,
	req listRequest,
	toEntry func(rackController, T) *E,
) (entries []*E, next string, err error) {
	firstRack, cursor, err := c.parseStartingToken(req.GetStartingToken())
	if err != nil {
		return nil, "", err
	}
	maxEntries := int(req.GetMaxEntries())
	last, lastPage, bytes := "", "", 0
	for _, client := range c.racks.all[firstRack:] {
		rc := c.forRack(client)
		project, err := client.ProjectID(ctx)
		if err != nil {
			return nil, "", retryableIfUnknown(
				ctx, fmt.Errorf("the list would be incomplete without rack %q: %w", client.Name(), err))
		}
		empty := true
		wanted := 0 // all
		if maxEntries > 0 {
			wanted = maxEntries - len(entries) + 1
		}
		for listed, err := range list(client, ctx, cursor, wanted) {
			if err != nil {
				return nil, "", retryableIfUnknown(ctx, err)
			}
			if of := projectOf(listed.Value); of != project {
				return nil, "", rpc.Unavailable(
					"rack %q shows project %s, but project %q had the ID %s before: check its host, token and project",
					client.Name(), of, client.ProjectName(), project)
			}
			empty = false
			entry := toEntry(rc, listed.Value)
			if entry == nil {
				continue
			}
			bytes += proto.Size(P(entry)) + entryOverhead
			if maxEntries > 0 && len(entries) == maxEntries || bytes > maxListBytes {
				c.pageTokens.store(last, lastPage)
				return entries, last, nil
			}
			entries = append(entries, entry)
			last, lastPage = client.Name()+tokenSeparator+listed.ID, listed.PageToken
		}
		if empty {
			// A different project with the same name may be empty.
			if err := client.ConfirmProject(ctx); err != nil {
				return nil, "", retryable(ctx, err)
			}
		}
		cursor = rack.Cursor{}
	}
	return entries, "", nil
}

// tokenSeparator separates the rack's name and the last ID in a token. A rack's name may contain it.
const tokenSeparator = "."

// parseStartingToken returns the index of the rack at which the list continues, and the position there. A token is
// valid for every replica and after a restart: a process that did not issue the token, and so has no page token of the
// rack for it, reads the rack's list from its start. An unrecognised token is ABORTED, on which a caller starts the
// list again.
func (c *Service) parseStartingToken(token string) (firstRack int, cursor rack.Cursor, err error) {
	if token == "" {
		return 0, rack.Cursor{}, nil
	}
	end := strings.LastIndex(token, tokenSeparator)
	if end < 0 {
		return 0, cursor, rpc.Aborted("starting_token %.80q is not a token of this plugin: start the list again", token)
	}
	name := token[:end]
	id, ok := diskname.ParseID(token[end+1:])
	firstRack = slices.IndexFunc(c.racks.all, func(client *rack.Client) bool { return client.Name() == name })
	if !ok || firstRack < 0 {
		return 0, cursor, rpc.Aborted("starting_token %.80q is not a token of this plugin: start the list again", token)
	}
	return firstRack, rack.Cursor{LastID: id, PageToken: c.pageTokens.get(token)}, nil
}

// pageTokens maps the tokens of this plugin to the racks' own page tokens, which are longer than CSI allows.
type pageTokens struct {
	mu    sync.Mutex
	pages map[string]string
}

// maxPageTokens bounds the memory; an entry has about half a kilobyte. Without its entry a list is read from the start.
const maxPageTokens = 200

func newPageTokens() *pageTokens { return &pageTokens{pages: map[string]string{}} }

func (p *pageTokens) store(token, page string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.pages) >= maxPageTokens {
		clear(p.pages)
	}
	if page != "" {
		p.pages[token] = page
	}
}

func (p *pageTokens) get(token string) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.pages[token]
}

// pageCounts are the volumes of the pages before a token, so that the last page of a list completes the metrics.
type pageCounts struct {
	mu     sync.Mutex
	counts map[string]volumeCounts
}

func newPageCounts() *pageCounts { return &pageCounts{counts: map[string]volumeCounts{}} }

func (p *pageCounts) store(token string, counts volumeCounts) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.counts) >= maxPageTokens {
		clear(p.counts)
	}
	p.counts[token] = counts
}

// get returns a copy, because a caller may repeat a page. It returns nil for a token that this process does not know.
func (p *pageCounts) get(token string) volumeCounts {
	if token == "" {
		return volumeCounts{}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return maps.Clone(p.counts[token])
}
