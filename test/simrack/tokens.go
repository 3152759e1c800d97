// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack

import (
	"strings"
	"time"

	"github.com/google/uuid"
)

// The roles of tokens, as the control endpoint names them.
const (
	roleCollaborator        = "collaborator"
	roleLimitedCollaborator = "limited-collaborator"
	roleViewer              = "viewer"
	roleFleetViewer         = "fleet-viewer"
	roleNone                = "none"
	roleOperator            = "operator" // of the control endpoint
)

// access is a level of rights in a project.
type access int

const (
	accessNone access = iota
	accessRead
	accessModify
)

var errForbidden error = &apiError{status: 403, code: codeForbidden, message: "Forbidden"}

// token is an API token with its user and role.
type token struct {
	Token string `json:"token"`
	Role  string `json:"role"`
	// Roles are the roles in single projects, by name. They count instead of Role.
	Roles  map[string]string `json:"roles,omitempty"`
	UserID string            `json:"user_id"`
	// Via says where the role is assigned: "" to the user, [viaGroup] to a group of the user, [viaSilo] on the silo.
	Via     string    `json:"via,omitempty"`
	Created time.Time `json:"created"`
	// Expires is nil for a token that never expires.
	Expires *time.Time `json:"expires,omitempty"`
}

func (t *token) expired() bool { return t.Expires != nil && !now().Before(*t.Expires) }

// key makes tokens a list. A token has no name.
func (t *token) key() (name, id string) { return "", derivedID(t.Token, "token") }

type tokenView struct {
	ID          string     `json:"id"`
	TimeCreated time.Time  `json:"time_created"`
	TimeExpires *time.Time `json:"time_expires"`
}

func (t *token) view() tokenView {
	return tokenView{ID: idOf(t), TimeCreated: t.Created, TimeExpires: t.Expires}
}

// parseTokenList reads a request for the valid tokens of the caller's user. The list does not tell which of them the
// request has.
func parseTokenList(r *Rack, q *request) (action, error) {
	sc, err := q.parseScan(sortsByID, false)
	if err != nil {
		return nil, err
	}
	return func(who caller) (answer, error) {
		r.mu.Lock()
		defer r.mu.Unlock()
		var valid collection[*token]
		for _, t := range r.tokens {
			if t.UserID == who.userID && !t.expired() {
				valid.byID.put(t, idOf[*token])
			}
		}
		return answer{200, makePage(valid.next(sc), sc, (*token).view)}, nil
	}, nil
}

// The places where a role can be assigned, other than to the user on the projects.
const (
	viaGroup = "group"
	viaSilo  = "silo"
)

// group is the ID of the user's group, or "" if the user is in none.
func (t *token) group() string {
	if t.Via != viaGroup {
		return ""
	}
	return derivedID(t.UserID, "group")
}

// userGroup is a group of users.
type userGroup struct{ id string }

func (g userGroup) key() (name, id string) { return "", g.id }

// parseUserGroups reads a request for the groups of the caller.
func parseUserGroups(r *Rack, q *request) (action, error) {
	sc, err := q.parseScan(sortsByID, false)
	if err != nil {
		return nil, err
	}
	return func(who caller) (answer, error) {
		r.mu.Lock()
		defer r.mu.Unlock()
		var groups collection[userGroup]
		if who.group != "" {
			groups.byID.put(userGroup{who.group}, idOf[userGroup])
		}
		return answer{200, makePage(groups.next(sc), sc, func(g userGroup) userGroupView {
			return userGroupView{
				ID: g.id, DisplayName: "storage", SiloID: r.identity.SiloID,
				TimeCreated: r.identity.Created, TimeModified: r.identity.Created,
			}
		})}, nil
	}, nil
}

// parseSiloPolicy reads a request for the roles on the silo, which all its users may see.
func parseSiloPolicy(r *Rack, _ *request) (action, error) {
	return func(caller) (answer, error) {
		r.mu.Lock()
		defer r.mu.Unlock()
		return answer{200, r.policy(nil)}, nil
	}, nil
}

// parseProjectPolicy reads a request for the roles on a project.
func parseProjectPolicy(r *Rack, q *request) (action, error) {
	sel, err := parseSelector(q.segment)
	if err != nil {
		return nil, badRequest("bad parameter in URL path: %v", err)
	}
	return func(who caller) (answer, error) {
		r.mu.Lock()
		defer r.mu.Unlock()
		p, err := r.lookupProject(who, sel, accessRead)
		if err != nil {
			return answer{}, err
		}
		return answer{200, r.policy(p)}, nil
	}, nil
}

// policy lists the roles that are assigned on a project, or on the silo if p is nil.
func (r *Rack) policy(p *project) policyView {
	view := policyView{RoleAssignments: []assignmentView{}}
	seen := map[assignmentView]bool{}
	for _, t := range r.tokens {
		role := t.caller().roleIn(p)
		a := assignmentView{IdentityID: t.UserID, IdentityType: "silo_user", RoleName: strings.ReplaceAll(role, "-", "_")}
		if group := t.group(); group != "" {
			a.IdentityID, a.IdentityType = group, "silo_group"
		}
		if accessOf(role) == accessNone || (p == nil) != (t.Via == viaSilo) || seen[a] {
			continue
		}
		seen[a] = true
		view.RoleAssignments = append(view.RoleAssignments, a)
	}
	return view
}

// caller is the authenticated user of a request.
type caller struct {
	userID string
	role   string
	// roles are those of [token.Roles].
	roles map[string]string
	group string
	fleet bool
}

// roleIn is the caller's role in a project. It is the one in all projects if p is nil.
func (c caller) roleIn(p *project) string {
	if p != nil {
		if role, has := c.roles[p.Name]; has {
			return role
		}
	}
	return c.role
}

// accessOf is what a role allows. A role on the fleet alone gives no access to projects.
func accessOf(role string) access {
	switch role {
	case roleOperator, roleCollaborator, roleLimitedCollaborator:
		return accessModify
	case roleViewer:
		return accessRead
	}
	return accessNone
}

func (t *token) caller() caller {
	return caller{userID: t.UserID, role: t.Role, roles: t.Roles, group: t.group(), fleet: t.Role == roleFleetViewer}
}

// authorize returns nil, missing for an object of the project that the caller may not see, or 403
// (docs/reference/rack.md §1).
func (c caller) authorize(p *project, want access, missing error) error {
	switch has := accessOf(c.roleIn(p)); {
	case has == accessNone:
		return missing
	case has < want:
		return errForbidden
	}
	return nil
}

// addToken makes a token of a new user valid. A token that already exists stays as it is.
func (r *Rack) addToken(text, role string) error {
	if _, has := r.tokens[text]; has {
		return nil
	}
	return r.insertToken(&token{Token: text, Role: role, UserID: uuid.NewString()})
}

func (r *Rack) insertToken(t *token) error {
	t.Created = now()
	if err := r.store.write(putRecord(bucketTokens, t.Token, t)); err != nil {
		return err
	}
	r.tokens[t.Token] = t
	return nil
}
