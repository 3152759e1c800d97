// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack

import (
	"time"

	"github.com/google/uuid"
)

// The policy of an anti-affinity group, and the failure domain in which it separates instances (docs/reference/rack.md
// §8).
var (
	groupPolicies  = []string{"allow", "fail"}
	failureDomains = []string{"sled"}
)

// group is the rack's record of an anti-affinity group. Groups have no members here and affect no placement. After its
// insertion only [Rack.updateGroup] may change it.
type group struct {
	ID            string    `json:"id"`
	Name          string    `json:"name"`
	Description   string    `json:"description"`
	ProjectID     string    `json:"project_id"`
	Policy        string    `json:"policy"`
	FailureDomain string    `json:"failure_domain"`
	Created       time.Time `json:"created"`
	Modified      time.Time `json:"modified"`

	project *project
}

func (g *group) key() (name, id string) { return g.Name, g.ID }

func projectGroups(p *project) *collection[*group] { return &p.groups }

func (r *Rack) lookupGroup(who caller, t target, want access) (*group, error) {
	return lookup(r, kindGroup, t, r.groups, projectGroups, func(g *group) *project { return g.project }, who, want)
}

// insertGroup adds a record to the indexes.
func (r *Rack) insertGroup(p *project, g *group) {
	g.project = p
	r.groups[g.ID] = g
	p.groups.put(g)
}

func (r *Rack) removeGroup(g *group) error {
	if err := r.store.write(deleteRecord(bucketGroups, g.ID)); err != nil {
		return err
	}
	delete(r.groups, g.ID)
	g.project.groups.remove(g)
	return nil
}

func parseGroupList(r *Rack, q *request) (action, error) {
	return parseList(r, q, projectGroups, (*group).view)
}

func parseGroupView(r *Rack, q *request) (action, error) {
	return parseView(r, q, r.lookupGroup, (*group).view)
}

func parseGroupCreate(r *Rack, q *request) (action, error) {
	project, err := q.needProject()
	if err != nil {
		return nil, err
	}
	body, err := readBody(q.http)
	if err != nil {
		return nil, err
	}
	g := group{ID: uuid.NewString()}
	if g.Name, err = body.name("name"); err != nil {
		return nil, err
	}
	if g.Description, err = body.text("description"); err != nil {
		return nil, err
	}
	if g.Policy, err = body.oneOf("policy", groupPolicies...); err != nil {
		return nil, err
	}
	if g.FailureDomain, err = body.oneOf("failure_domain", failureDomains...); err != nil {
		return nil, err
	}
	return func(who caller) (answer, error) { return r.createGroup(who, project, g) }, nil
}

// createGroup creates a group. Of concurrent requests with the same name one creates the group; the others get
// ObjectAlreadyExists.
func (r *Rack) createGroup(who caller, project selector, g group) (answer, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p, err := r.lookupProject(who, project, accessModify)
	if err != nil {
		return answer{}, err
	}
	if err := checkDescription(g.Description); err != nil {
		return answer{}, err
	}
	if _, taken := p.groups.named(g.Name); taken {
		return answer{}, alreadyExists(kindGroup.name, g.Name)
	}
	g.ProjectID, g.Created = p.ID, now()
	g.Modified = g.Created
	if err := r.store.write(putRecord(bucketGroups, g.ID, &g)); err != nil {
		return answer{}, err
	}
	r.insertGroup(p, &g)
	return answer{201, g.view()}, nil
}

// parseGroupUpdate reads a request that changes a group's name or description. A field that is missing or null stays
// unchanged.
func parseGroupUpdate(r *Rack, q *request) (action, error) {
	t, err := q.target()
	if err != nil {
		return nil, err
	}
	body, err := readBody(q.http)
	if err != nil {
		return nil, err
	}
	var name, description *string
	if !isNull(body.values["name"]) {
		text, err := body.name("name")
		if err != nil {
			return nil, err
		}
		name = &text
	}
	if !isNull(body.values["description"]) {
		text, err := body.text("description")
		if err != nil {
			return nil, err
		}
		description = &text
	}
	return func(who caller) (answer, error) { return r.updateGroup(who, t, name, description) }, nil
}

// updateGroup changes the values that are not nil. A name that is taken is an internal error, because a rack does not
// expect it.
func (r *Rack) updateGroup(who caller, t target, name, description *string) (answer, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	g, err := r.lookupGroup(who, t, accessModify)
	if err != nil {
		return answer{}, err
	}
	next := *g
	next.Name, next.Description, next.Modified = valueOr(name, g.Name), valueOr(description, g.Description), now()
	if err := checkDescription(next.Description); err != nil {
		return answer{}, err
	}
	if holder, taken := g.project.groups.named(next.Name); taken && holder != g {
		return answer{}, fail(500, codeInternal, messageInternal)
	}
	if err := r.store.write(putRecord(bucketGroups, g.ID, &next)); err != nil {
		return answer{}, err
	}
	g.project.groups.remove(g) // its position depends on its name
	*g = next
	g.project.groups.put(g)
	return answer{200, g.view()}, nil
}

func parseGroupDelete(r *Rack, q *request) (action, error) {
	t, err := q.target()
	if err != nil {
		return nil, err
	}
	return func(who caller) (answer, error) { return answer{status: 204}, r.deleteGroup(who, t) }, nil
}

func (r *Rack) deleteGroup(who caller, t target) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	g, err := r.lookupGroup(who, t, accessModify)
	if err != nil {
		return err
	}
	return r.removeGroup(g)
}
