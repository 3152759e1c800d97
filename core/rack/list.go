// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"context"
	"fmt"
	"iter"

	"github.com/oxidecomputer/oxide.go/oxide"
)

// Limits of the page size. A page is decoded as a whole, so the page size bounds the memory that a list of any length
// takes.
const (
	minPage = 100
	maxPage = 2000
)

// Cursor is a position in a list that is sorted by ID: after LastID. PageToken is the rack's token of the page that
// contains this position or an earlier one. It is opaque and has up to 512 bytes (docs/reference/rack.md §1).
type Cursor struct {
	LastID    string
	PageToken string
}

// Disks lists the disks of the project by ID, starting after the cursor's LastID. The zero cursor starts at the
// beginning. A cursor without a page token reads the list from its beginning to find the position. wanted is how many
// disks the caller needs, 0 for all: it sets the page size. An error ends the list; a list without an error is
// complete.
func (c *Client) Disks(ctx context.Context, from Cursor, wanted int) iter.Seq2[ListItem[Disk], error] {
	return list(
		func(d Disk) string { return string(d.ID) },
		from,
		wanted,
		func(token string, limit int) ([]Disk, string, error) {
			page, err := c.sdk.DiskList(ctx, oxide.DiskListParams{
				Project: c.projectRef(), PageToken: token, Limit: &limit, SortBy: oxide.NameOrIdSortModeIdAscending,
			})
			if err != nil {
				return nil, "", c.translate(ctx, err, "list the disks of project %q", c.project)
			}
			disks, err := c.checkDisks(page.Items, "list the disks of project %q", c.project)
			return disks, page.NextPage, err
		},
	)
}

// Snapshots lists the snapshots of the project in the same way as [Client.Disks] lists the disks.
func (c *Client) Snapshots(ctx context.Context, from Cursor, wanted int) iter.Seq2[ListItem[Snapshot], error] {
	return list(
		func(s Snapshot) string { return s.ID },
		from,
		wanted,
		func(token string, limit int) ([]Snapshot, string, error) {
			page, err := c.sdk.SnapshotList(ctx, oxide.SnapshotListParams{
				Project: c.projectRef(), PageToken: token, Limit: &limit, SortBy: oxide.NameOrIdSortModeIdAscending,
			})
			if err != nil {
				return nil, "", c.translate(ctx, err, "list the snapshots of project %q", c.project)
			}
			if err := checkPage(c, page.Items, "list the snapshots of project %q", c.project); err != nil {
				return nil, "", err
			}
			return convert(page.Items, snapshotFrom), page.NextPage, nil
		},
	)
}

// Instances lists the instances of the project. A list without an error is complete.
func (c *Client) Instances(ctx context.Context) ([]Instance, error) {
	var all []Instance
	read := func(token string, limit int) ([]Instance, string, error) {
		page, err := c.sdk.InstanceList(ctx, oxide.InstanceListParams{
			Project: c.projectRef(), PageToken: token, Limit: &limit, SortBy: oxide.NameOrIdSortModeIdAscending,
		})
		if err != nil {
			return nil, "", c.translate(ctx, err, "list the instances of project %q", c.project)
		}
		if err := checkPage(c, page.Items, "list the instances of project %q", c.project); err != nil {
			return nil, "", err
		}
		return convert(page.Items, instanceFrom), page.NextPage, nil
	}
	for item, err := range list(func(i Instance) string { return i.ID }, Cursor{}, 0, read) {
		if err != nil {
			return nil, err
		}
		all = append(all, item.Value)
	}
	return all, nil
}

func convert[From, To any](items []From, one func(*From) To) []To {
	converted := make([]To, 0, len(items))
	for i := range items {
		converted = append(converted, one(&items[i]))
	}
	return converted
}

// ListItem is one disk or snapshot of a list.
type ListItem[T any] struct {
	Value T
	ID    string
	// PageToken is the token of the page that contains the item. It is empty on the first page.
	PageToken string
}

// errSamePage means that a list would never end.
var errSamePage = fmt.Errorf("%w: a page of a list is followed by itself", errAnswer)

// list reads pages until the rack returns no token of a next page. The rack ends a list only with an empty page. A
// page that is not full does not end it, because the rack's own limit of a page may be lower than ours.
func list[T any](
	idOf func(T) string,
	from Cursor,
	wanted int,
	read func(token string, limit int) (items []T, next string, err error),
) iter.Seq2[ListItem[T], error] {
	limit := maxPage
	// Without a page token all pages before the position are read, so pages are full, however few items are wanted.
	if lost := from.LastID != "" && from.PageToken == ""; wanted > 0 && !lost {
		limit = min(max(wanted, minPage), maxPage)
	}
	return func(yield func(ListItem[T], error) bool) {
		token := from.PageToken
		for {
			items, next, err := read(token, limit)
			if err != nil {
				yield(ListItem[T]{}, err)
				return
			}
			for _, item := range items {
				if id := idOf(item); id > from.LastID && !yield(ListItem[T]{Value: item, ID: id, PageToken: token}, nil) {
					return
				}
			}
			if next == "" {
				return
			}
			if next == token {
				yield(ListItem[T]{}, errSamePage)
				return
			}
			token = next
		}
	}
}

// Storage returns the silo's storage quota and its use, in bytes (docs/reference/rack.md §7). Other projects of the
// silo count too. The API does not show the free space of the rack.
func (c *Client) Storage(ctx context.Context) (quotaBytes, usedBytes uint64, err error) {
	utilization, err := c.sdk.UtilizationView(ctx)
	if err != nil {
		return 0, 0, c.translate(ctx, err, "look up the silo's utilization")
	}
	return uint64(utilization.Capacity.Storage), uint64(utilization.Provisioned.Storage), nil
}
