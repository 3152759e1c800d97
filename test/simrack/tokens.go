// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack

import "github.com/google/uuid"

// The roles of tokens, by the names that the control endpoint takes.
const (
	roleCollaborator        = "collaborator"
	roleLimitedCollaborator = "limited-collaborator"
	roleViewer              = "viewer"
	roleFleetViewer         = "fleet-viewer"
	roleNone                = "none"
)

// access is what somebody wants to do in a project.
type access int

const (
	accessNone access = iota
	accessRead
	accessModify
)

var errForbidden error = &apiError{status: 403, code: codeForbidden, message: "Forbidden"}

// token is an API token and whose it is.
type token struct {
	Token  string `json:"token"`
	Role   string `json:"role"`
	UserID string `json:"user_id"`
}

// caller is who makes a request.
type caller struct {
	userID string
	role   string
	// most is what the caller may do in every project; a role on the fleet alone opens no project.
	most  access
	fleet bool
}

func (t *token) caller() caller {
	who := caller{userID: t.UserID, role: t.Role, fleet: t.Role == roleFleetViewer}
	switch t.Role {
	case roleCollaborator, roleLimitedCollaborator:
		who.most = accessModify
	case roleViewer:
		who.most = accessRead
	}
	return who
}

// may answers nil, or missing for a thing that the caller may not even see, or 403 (docs/reference/rack.md §1).
func (c caller) may(want access, missing error) error {
	switch {
	case c.most == accessNone:
		return missing
	case c.most < want:
		return errForbidden
	}
	return nil
}

// addToken makes a token valid, unless it is already.
func (r *Rack) addToken(text, role string) error {
	if _, has := r.tokens[text]; has {
		return nil
	}
	t := &token{Token: text, Role: role, UserID: uuid.NewString()}
	if err := r.store.write(put(inTokens, text, t)); err != nil {
		return err
	}
	r.tokens[text] = t
	return nil
}
