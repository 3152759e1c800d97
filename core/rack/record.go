// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"
)

// Record is a small text that the rack keeps under a name, visible to all users of the project. It is stored as an
// anti-affinity group without members, which affects nothing and counts against no quota (docs/reference/rack.md §8).
// Creating a record is atomic, because names are unique. Updating it is not atomic.
type Record struct {
	ID   string
	Name string
	// Text has at most 512 bytes.
	Text string
	// Created and Modified are by the rack's clock. Each update moves Modified.
	Created, Modified time.Time
}

func recordFrom(g *oxide.AntiAffinityGroup) Record {
	return Record{
		ID: g.Id, Name: string(g.Name), Text: g.Description,
		Created: timeOrZero(g.TimeCreated), Modified: timeOrZero(g.TimeModified),
	}
}

// RecordText encodes a struct of strings, numbers and booleans as the text of a record.
func RecordText(record any) string {
	text, err := json.Marshal(record)
	if err != nil {
		panic(fmt.Sprintf("a struct of strings, numbers and booleans always encodes: %v", err))
	}
	return string(text)
}

// checkFormat returns [ErrFormat] for a record of this plugin that this version would misread. A group of another
// owner may have any text.
func (c *Client) checkFormat(r Record) error {
	if !strings.HasPrefix(r.Name, "csi-") {
		return nil
	}
	return checkFormat(fmt.Sprintf("rack %q: anti-affinity group %q", c.name, r.Name), r.Text)
}

// Records lists all records of the project by name, including anti-affinity groups that are not ours. It returns
// [ErrFormat] if one of any cluster has a newer format: without that record the list would not be whole.
func (c *Client) Records(ctx context.Context) ([]Record, error) {
	var records []Record
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
		for _, record := range convert(page.Items, recordFrom) {
			if err := c.checkFormat(record); err != nil {
				return nil, err
			}
			records = append(records, record)
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

// RecordNamed returns a record of the project by its name. [ErrNotFound] means that there is none, as for
// [Client.DiskByName].
func (c *Client) RecordNamed(ctx context.Context, name string) (Record, error) {
	group, err := c.sdk.AntiAffinityGroupView(ctx, oxide.AntiAffinityGroupViewParams{
		AntiAffinityGroup: oxide.NameOrId(name), Project: c.projectRef(),
	})
	if err != nil {
		err = c.translate(ctx, err, "look up anti-affinity group %q in project %q", name, c.project)
		return Record{}, c.confirmNotFound(ctx, err)
	}
	record := recordFrom(group)
	got, asked := identity{record.ID, record.Name, group.ProjectId}, identity{name: name, projectID: c.knownProjectID()}
	if err := c.checkAnswer(got, asked, "look up anti-affinity group %q", name); err != nil {
		return Record{}, err
	}
	if err := c.checkFormat(record); err != nil {
		return Record{}, err
	}
	return record, nil
}

// CreateRecord creates a record. [ErrAlreadyExists] means that the name is taken, perhaps by an earlier attempt of
// ours.
func (c *Client) CreateRecord(ctx context.Context, name, text string) (Record, error) {
	group, err := c.sdk.AntiAffinityGroupCreate(ctx, oxide.AntiAffinityGroupCreateParams{
		Project: c.projectRef(),
		Body: &oxide.AntiAffinityGroupCreate{
			Name: oxide.Name(name), Description: text, Policy: oxide.AffinityPolicyAllow, FailureDomain: oxide.FailureDomainSled,
		},
	})
	if err != nil {
		return Record{}, c.translate(ctx, err, "create anti-affinity group %q in project %q", name, c.project)
	}
	record := recordFrom(group)
	got, asked := identity{record.ID, record.Name, group.ProjectId}, identity{name: name, projectID: c.knownProjectID()}
	if err := c.checkAnswer(got, asked, "create anti-affinity group %q", name); err != nil {
		return Record{}, err
	}
	return record, nil
}

// UpdateRecord replaces the text of a record, by its ID.
func (c *Client) UpdateRecord(ctx context.Context, id, text string) error {
	group, err := c.sdk.AntiAffinityGroupUpdate(ctx, oxide.AntiAffinityGroupUpdateParams{
		AntiAffinityGroup: oxide.NameOrId(id), Body: &oxide.AntiAffinityGroupUpdate{Description: text},
	})
	if err != nil {
		return c.translate(ctx, err, "update anti-affinity group %s", id)
	}
	return c.checkAnswer(identity{id: group.Id}, identity{id: id}, "update anti-affinity group %s", id)
}

// DeleteRecord deletes a record by its ID. A second call returns [ErrNotFound].
func (c *Client) DeleteRecord(ctx context.Context, id string) error {
	err := c.sdk.AntiAffinityGroupDelete(ctx, oxide.AntiAffinityGroupDeleteParams{AntiAffinityGroup: oxide.NameOrId(id)})
	return c.translate(ctx, err, "delete anti-affinity group %s", id)
}

// DeleteRecordNamed deletes a record of the project by its name. [ErrNotFound] means that there is none.
func (c *Client) DeleteRecordNamed(ctx context.Context, name string) error {
	err := c.sdk.AntiAffinityGroupDelete(ctx, oxide.AntiAffinityGroupDeleteParams{
		AntiAffinityGroup: oxide.NameOrId(name), Project: c.projectRef(),
	})
	return c.confirmNotFound(ctx, c.translate(ctx, err, "delete anti-affinity group %q", name))
}
