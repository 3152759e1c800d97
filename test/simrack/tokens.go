// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack

import "github.com/google/uuid"

// The roles of tokens, as the control endpoint names them.
const (
	roleCollaborator        = "collaborator"
	roleLimitedCollaborator = "limited-collaborator"
	roleViewer              = "viewer"
	roleFleetViewer         = "fleet-viewer"
	roleNone                = "none"
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
	Token  string `json:"token"`
	Role   string `json:"role"`
	UserID string `json:"user_id"`
}

// caller is the authenticated user of a request.
type caller struct {
	userID string
	role   string
	// access is what the caller may do in every project. A role on the fleet alone gives no access to projects.
	access access
	fleet  bool
}

func (t *token) caller() caller {
	who := caller{userID: t.UserID, role: t.Role, fleet: t.Role == roleFleetViewer}
	switch t.Role {
	case roleCollaborator, roleLimitedCollaborator:
		who.access = accessModify
	case roleViewer:
		who.access = accessRead
	}
	return who
}

// authorize returns nil, notFound for an object that the caller authorize not see, or 403 (docs/reference/rack.md §1).
func (c caller) authorize(want access, missing error) error {
	switch {
	case c.access == accessNone:
		return missing
	case c.access < want:
		return errForbidden
	}
	return nil
}

// addToken makes a token valid. A token that already exists stays as it is.
func (r *Rack) addToken(text, role string) error {
	if _, has := r.tokens[text]; has {
		return nil
	}
	t := &token{Token: text, Role: role, UserID: uuid.NewString()}
	if err := r.store.write(putRecord(bucketTokens, text, t)); err != nil {
		return err
	}
	r.tokens[text] = t
	return nil
}
