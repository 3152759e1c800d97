// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
)

func recordFrom(g *oxide.AntiAffinityGroup) record.Record {
	return record.Record{
		ID: g.Id, Name: string(g.Name), Text: g.Description,
		Created: timeOrZero(g.TimeCreated), Modified: timeOrZero(g.TimeModified),
	}
}

// Records lists all groups of the project by name whose names begin as those of records, of any cluster. A user may
// have made some of them by hand.
func (c *Client) Records(ctx context.Context) ([]record.Record, error) {
	var records []record.Record
	for token := ""; ; {
		page, err := c.sdk.AntiAffinityGroupList(ctx, oxide.AntiAffinityGroupListParams{
			Project:   c.projectRef(),
			PageToken: token,
			Limit:     oxide.NewPointer(maxPage),
			SortBy:    oxide.NameOrIdSortModeNameAscending,
		})
		if err != nil {
			return nil, c.translate(ctx, err, "list the anti-affinity groups of project %q", c.project)
		}
		if err := checkPage(c, page.Items, "list the anti-affinity groups of project %q", c.project); err != nil {
			return nil, err
		}
		for _, r := range convert(page.Items, recordFrom) {
			if strings.HasPrefix(r.Name, record.Prefix) {
				records = append(records, r)
			}
		}
		switch page.NextPage {
		case "":
			return records, nil
		case token:
			return nil, fmt.Errorf("rack %q: list the anti-affinity groups: %w", c.name, errSamePage)
		}
		token = page.NextPage
	}
}

// RecordNamed returns a record of the project by its name. It returns false if there is none: a token that has lost its
// role gets that, too.
func (c *Client) RecordNamed(ctx context.Context, name string) (r record.Record, found bool, err error) {
	group, err := c.sdk.AntiAffinityGroupView(ctx, oxide.AntiAffinityGroupViewParams{
		AntiAffinityGroup: oxide.NameOrId(name), Project: c.projectRef(),
	})
	if err != nil {
		err = c.translate(ctx, err, "look up anti-affinity group %q in project %q", name, c.project)
		if err = c.confirmNotFound(ctx, err); errors.Is(err, ErrNotFound) {
			err = nil
		}
		return record.Record{}, false, err
	}
	r = recordFrom(group)
	got, asked := identity{r.ID, r.Name, group.ProjectId}, identity{name: name, projectID: c.knownProjectID()}
	if err := c.checkAnswer(got, asked, "look up anti-affinity group %q", name); err != nil {
		return record.Record{}, false, err
	}
	return r, true, nil
}

// CreateRecord creates a record. [ErrAlreadyExists] means that the name is taken, perhaps by an earlier attempt of
// ours.
func (c *Client) CreateRecord(ctx context.Context, name, text string) (record.Record, error) {
	group, err := c.sdk.AntiAffinityGroupCreate(ctx, oxide.AntiAffinityGroupCreateParams{
		Project: c.projectRef(),
		Body: &oxide.AntiAffinityGroupCreate{
			Name: oxide.Name(name), Description: text, Policy: oxide.AffinityPolicyAllow, FailureDomain: oxide.FailureDomainSled,
		},
	})
	if err != nil {
		return record.Record{}, c.translate(ctx, err, "create anti-affinity group %q in project %q", name, c.project)
	}
	r := recordFrom(group)
	got, asked := identity{r.ID, r.Name, group.ProjectId}, identity{name: name, projectID: c.knownProjectID()}
	if err := c.checkAnswer(got, asked, "create anti-affinity group %q", name); err != nil {
		return record.Record{}, err
	}
	return r, nil
}

// UpdateRecord replaces the text of a record, by its ID. It returns false if the record was deleted, which is
// confirmed.
func (c *Client) UpdateRecord(ctx context.Context, id, text string) (found bool, err error) {
	group, err := c.sdk.AntiAffinityGroupUpdate(ctx, oxide.AntiAffinityGroupUpdateParams{
		AntiAffinityGroup: oxide.NameOrId(id), Body: &oxide.AntiAffinityGroupUpdate{Description: text},
	})
	if err != nil {
		return false, c.confirmGone(ctx, c.translate(ctx, err, "update anti-affinity group %s", id))
	}
	return true, c.checkAnswer(identity{id: group.Id}, identity{id: id}, "update anti-affinity group %s", id)
}

// DeleteRecord deletes a record by its ID. It succeeds if the record was deleted before, which is confirmed.
func (c *Client) DeleteRecord(ctx context.Context, id string) error {
	err := c.sdk.AntiAffinityGroupDelete(ctx, oxide.AntiAffinityGroupDeleteParams{AntiAffinityGroup: oxide.NameOrId(id)})
	return c.confirmGone(ctx, c.translate(ctx, err, "delete anti-affinity group %s", id))
}

// DeleteRecordNamed deletes a record of the project by its name. It succeeds if there is none.
func (c *Client) DeleteRecordNamed(ctx context.Context, name string) error {
	err := c.sdk.AntiAffinityGroupDelete(ctx, oxide.AntiAffinityGroupDeleteParams{
		AntiAffinityGroup: oxide.NameOrId(name), Project: c.projectRef(),
	})
	err = c.confirmNotFound(ctx, c.translate(ctx, err, "delete anti-affinity group %q", name))
	if errors.Is(err, ErrNotFound) {
		return nil
	}
	return err
}

// confirmGone turns an [ErrNotFound] into nil if it can be trusted.
func (c *Client) confirmGone(ctx context.Context, err error) error {
	if errors.Is(err, ErrNotFound) {
		return c.ConfirmProject(ctx)
	}
	return err
}
