// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"context"

	"github.com/oxidecomputer/oxide.go/oxide"
)

// Role is a role on the project. A higher role includes all lower ones.
type Role int

// The roles, from the lowest to the highest.
const (
	NoRole Role = iota
	Viewer
	// LimitedCollaborator may do all that the plugin does.
	LimitedCollaborator
	Collaborator
	Admin
)

// String returns the role as Oxide's documents write it.
func (r Role) String() string {
	return [...]string{"no role", "viewer", "limited-collaborator", "collaborator", "admin"}[r]
}

// projectRoles are the roles that a project's policy gives.
var projectRoles = map[oxide.ProjectRole]Role{
	oxide.ProjectRoleViewer: Viewer, oxide.ProjectRoleLimitedCollaborator: LimitedCollaborator,
	oxide.ProjectRoleCollaborator: Collaborator, oxide.ProjectRoleAdmin: Admin,
}

// siloRoles are the roles on a project that come from roles on its silo: omicron, nexus/auth/src/authz/omicron.polar.
var siloRoles = map[oxide.SiloRole]Role{
	oxide.SiloRoleViewer: Viewer, oxide.SiloRoleLimitedCollaborator: LimitedCollaborator,
	oxide.SiloRoleCollaborator: Admin, oxide.SiloRoleAdmin: Admin,
}

// Role returns the highest role on the project that the token's user has: by the policies of the project and of the
// silo, directly or through a group (docs/reference/rack.md §8). It only reads.
func (c *Client) Role(ctx context.Context) (Role, error) {
	who, err := c.identities(ctx)
	if err != nil {
		return NoRole, err
	}
	project, err := c.sdk.ProjectPolicyView(ctx, oxide.ProjectPolicyViewParams{Project: c.projectRef()})
	if err != nil {
		return NoRole, c.translate(ctx, err, "read the policy of project %q", c.project)
	}
	if err := checkPage(c, project.RoleAssignments, "read the policy of project %q", c.project); err != nil {
		return NoRole, err
	}
	silo, err := c.sdk.PolicyView(ctx)
	if err != nil {
		return NoRole, c.translate(ctx, err, "read the policy of the silo")
	}
	if err := checkPage(c, silo.RoleAssignments, "read the policy of the silo"); err != nil {
		return NoRole, err
	}
	highest := NoRole
	for _, a := range project.RoleAssignments {
		if who[a.IdentityId] {
			highest = max(highest, projectRoles[a.RoleName])
		}
	}
	for _, a := range silo.RoleAssignments {
		if who[a.IdentityId] {
			highest = max(highest, siloRoles[a.RoleName])
		}
	}
	return highest, nil
}

// identities are the IDs of the token's user and of the user's groups.
func (c *Client) identities(ctx context.Context) (map[string]bool, error) {
	const doing = "list the groups of this token's user"
	user, err := c.sdk.CurrentUserView(ctx)
	if err != nil {
		return nil, c.translate(ctx, err, "read this token's user")
	}
	ids := map[string]bool{user.Id: true}
	read := func(pageToken string, limit int) ([]oxide.Group, string, error) {
		page, err := c.sdk.CurrentUserGroups(ctx, oxide.CurrentUserGroupsParams{
			PageToken: pageToken, Limit: &limit, SortBy: oxide.IdSortModeIdAscending,
		})
		if err != nil {
			return nil, "", c.translate(ctx, err, doing)
		}
		return page.Items, page.NextPage, checkPage(c, page.Items, doing)
	}
	for item, err := range list(func(g oxide.Group) string { return g.Id }, Cursor{}, 0, read) {
		if err != nil {
			return nil, err
		}
		ids[item.Value.Id] = true
	}
	return ids, c.checkAnswer(identity{id: user.Id}, identity{}, "read this token's user")
}
