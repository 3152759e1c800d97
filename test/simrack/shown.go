// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack

import (
	"bytes"
	"encoding/json"
	"maps"
	"net/http"
	"sync"

	"github.com/google/uuid"
)

// shown are fields that answers show of an object instead of the real ones, by the object's ID. So a rack can be
// simulated that is newer than its clients: an object in a state that no client knows. The rack itself goes by the real
// fields.
type shown struct {
	mu     sync.Mutex
	fields map[string]map[string]any
}

// shownHeader is in an answer that shows such fields, since it does not fit the schema.
const shownHeader = "X-Simulated-Fields"

func (s *shown) set(id string, fields map[string]any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fields == nil {
		s.fields = map[string]map[string]any{}
	}
	s.fields[id] = fields
	if len(fields) == 0 {
		delete(s.fields, id)
	}
}

// apply changes the JSON of an answer. It reports whether it has changed anything.
func (s *shown) apply(body []byte) ([]byte, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.fields) == 0 {
		return body, false
	}
	var answer any
	d := json.NewDecoder(bytes.NewReader(body))
	d.UseNumber()
	if d.Decode(&answer) != nil || !s.change(answer) {
		return body, false
	}
	return encode(answer, ""), true
}

// change changes an object, or the objects of a page.
func (s *shown) change(answer any) (changed bool) {
	object, _ := answer.(map[string]any)
	items, _ := object["items"].([]any)
	for _, item := range items {
		changed = s.change(item) || changed
	}
	id, _ := object["id"].(string)
	maps.Copy(object, s.fields[id])
	return changed || len(s.fields[id]) > 0
}

// patchShown sets the fields that are shown of an object. An empty object shows the real ones again.
func (r *Rack) patchShown(req *http.Request) (int, any, error) {
	var fields map[string]any
	if err := readControl(req, &fields); err != nil {
		return 0, nil, err
	}
	id, err := uuid.Parse(req.PathValue("key"))
	if err != nil {
		return 0, nil, err
	}
	r.shown.set(id.String(), fields)
	return 204, nil, nil
}
