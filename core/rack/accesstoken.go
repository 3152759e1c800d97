// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"context"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"
)

// AccessToken describes a token, without the credentials.
type AccessToken struct {
	ID string
	// Created is zero if the rack does not tell.
	Created time.Time
	// Expires is zero for a token that never expires.
	Expires time.Time
}

// AccessTokens lists the valid tokens of the user whose token the client has. The rack does not tell which of them that
// is, unless there is only one (docs/reference/rack.md §8).
func (c *Client) AccessTokens(ctx context.Context) ([]AccessToken, error) {
	const doing = "list the tokens of this token's user"
	var all []AccessToken
	read := func(pageToken string, limit int) ([]AccessToken, string, error) {
		page, err := c.sdk.CurrentUserAccessTokenList(ctx, oxide.CurrentUserAccessTokenListParams{
			PageToken: pageToken, Limit: &limit, SortBy: oxide.IdSortModeIdAscending,
		})
		if err != nil {
			return nil, "", c.translate(ctx, err, doing)
		}
		if err := checkPage(c, page.Items, doing); err != nil {
			return nil, "", err
		}
		for _, token := range page.Items {
			if err := c.checkAnswer(identity{id: token.Id}, identity{}, doing); err != nil {
				return nil, "", err
			}
		}
		return convert(page.Items, accessTokenFrom), page.NextPage, nil
	}
	for item, err := range list(func(t AccessToken) string { return t.ID }, Cursor{}, 0, read) {
		if err != nil {
			return nil, err
		}
		all = append(all, item.Value)
	}
	return all, nil
}

func accessTokenFrom(token *oxide.DeviceAccessToken) AccessToken {
	described := AccessToken{ID: token.Id}
	if token.TimeCreated != nil {
		described.Created = *token.TimeCreated
	}
	if token.TimeExpires != nil {
		described.Expires = *token.TimeExpires
	}
	return described
}
