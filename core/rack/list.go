// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"context"
	"iter"

	"github.com/oxidecomputer/oxide.go/oxide"
)

// How many things one request lists, where not fewer are wanted. A page is decoded as a whole, so its size is what a list of
// any length costs in memory.
const (
	leastPage = 100
	mostPage  = 500
)

// Cursor is a place in a list that is sorted by ID: behind LastID. PageToken is the rack's own for a page that begins no later;
// it is up to 512 bytes, and means nothing to anybody else (docs/reference/rack.md §1).
type Cursor struct {
	LastID    string
	PageToken string
}

// Disks lists the disks of the project by their IDs, from behind the cursor's last ID on; the zero cursor is the start. A
// cursor without page token is found by reading the list from its start. Each disk comes with the token of its page. About
// as many as wanted are read at a time, where that is not 0 and the page is known. An error ends the list; a list without one is complete.
func (c *Client) Disks(ctx context.Context, from Cursor, wanted int) iter.Seq2[Listed[Disk], error] {
	return list(func(d Disk) string { return d.ID }, from, wanted, func(token string, limit int) ([]Disk, string, error) {
		page, err := c.sdk.DiskList(ctx, oxide.DiskListParams{
			Project: c.projectRef(), PageToken: token, Limit: &limit, SortBy: oxide.NameOrIdSortModeIdAscending,
		})
		if err != nil {
			return nil, "", c.translate(ctx, err, "list the disks of project %q", c.project)
		}
		return convert(page.Items, diskFrom), page.NextPage, nil
	})
}

// Snapshots lists the snapshots of the project as [Client.Disks] does the disks.
func (c *Client) Snapshots(ctx context.Context, from Cursor, wanted int) iter.Seq2[Listed[Snapshot], error] {
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
			return convert(page.Items, snapshotFrom), page.NextPage, nil
		},
	)
}

func convert[From, To any](items []From, one func(*From) To) []To {
	converted := make([]To, 0, len(items))
	for i := range items {
		converted = append(converted, one(&items[i]))
	}
	return converted
}

// Listed is a thing in a list.
type Listed[T any] struct {
	Thing T
	ID    string
	// PageToken leads to the page that the thing is on; it is empty on the first.
	PageToken string
}

// list reads pages until the rack says that there is no other, which it says only of an empty one: a page that is not full
// may have another behind it if the rack limits pages more than we do.
func list[T any](
	idOf func(T) string,
	from Cursor,
	wanted int,
	read func(token string, limit int) (items []T, next string, err error),
) iter.Seq2[Listed[T], error] {
	limit := mostPage
	// To look for a place without its page's token, all pages before it are read, whatever is wanted from there on.
	if lost := from.LastID != "" && from.PageToken == ""; wanted > 0 && !lost {
		limit = min(max(wanted, leastPage), mostPage)
	}
	return func(yield func(Listed[T], error) bool) {
		token := from.PageToken
		for {
			items, next, err := read(token, limit)
			if err != nil {
				yield(Listed[T]{}, err)
				return
			}
			for _, item := range items {
				if id := idOf(item); id > from.LastID && !yield(Listed[T]{Thing: item, ID: id, PageToken: token}, nil) {
					return
				}
			}
			if next == "" {
				return
			}
			token = next
		}
	}
}

// Storage returns the quota of the silo and what is taken of it, in bytes, docs/reference/rack.md §7. What other projects of the silo
// take counts too; the space on the rack is nobody's to see.
func (c *Client) Storage(ctx context.Context) (quotaBytes, usedBytes uint64, err error) {
	utilization, err := c.sdk.UtilizationView(ctx)
	if err != nil {
		return 0, 0, c.translate(ctx, err, "look up the silo's utilization")
	}
	return uint64(utilization.Capacity.Storage), uint64(utilization.Provisioned.Storage), nil
}
