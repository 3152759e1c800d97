// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack

import (
	"encoding/base64"
	"encoding/json"
	"iter"
	"slices"
	"strconv"
	"strings"
)

// The sort orders of lists (docs/reference/rack.md §1).
const (
	sortName       = "name_ascending"
	sortNameDown   = "name_descending"
	sortID         = "id_ascending"
	defaultLimit   = 100
	maxLimit       = 10000
	maxTokenLength = 512
)

var (
	sortsByNameOrID = []string{sortName, sortNameDown, sortID}
	sortsByID       = []string{sortID}
)

// record is an object that can be listed.
type record interface {
	comparable
	key() (name, id string)
}

// collection keeps the objects of one kind in the two orders in which they are listed.
type collection[T record] struct {
	byName sortedList[T]
	byID   sortedList[T]
}

func nameOf[T record](t T) string { name, _ := t.key(); return name }
func idOf[T record](t T) string   { _, id := t.key(); return id }

func (s *collection[T]) put(t T) {
	s.byName.put(t, nameOf[T])
	s.byID.put(t, idOf[T])
}

func (s *collection[T]) remove(t T) {
	s.byName.remove(nameOf(t), nameOf[T])
	s.byID.remove(idOf(t), idOf[T])
}

func (s *collection[T]) named(name string) (T, bool) { return s.byName.get(name, nameOf[T]) }
func (s *collection[T]) withID(id string) (T, bool)  { return s.byID.get(id, idOf[T]) }
func (s *collection[T]) sortedByName() iter.Seq[T]   { return s.byName.from(position{}) }

// next returns the objects of one page. Objects that were added or removed since the previous page shift nothing.
func (s *collection[T]) next(sc scan) []T {
	o, keyOf := &s.byName, nameOf[T]
	if sc.sort == sortID {
		o, keyOf = &s.byID, idOf[T]
	}
	at, has := o.find(sc.last, keyOf)
	rest := o.from(at)
	switch {
	case sc.sort == sortNameDown && sc.last == "":
		rest = o.before(position{chunk: len(o.chunks)})
	case sc.sort == sortNameDown:
		rest = o.before(at)
	case has:
		rest = o.from(position{at.chunk, at.item + 1})
	}
	var items []T
	for t := range rest {
		if len(items) == sc.limit {
			break
		}
		items = append(items, t)
	}
	return items
}

// maxChunk is the size at which a chunk of a sortedList is split in two.
const maxChunk = 512

// sortedList keeps objects sorted by a key. It is split into chunks, so that an insert into a very long list moves few
// objects.
type sortedList[T record] struct{ chunks [][]T }

// position is where an object is in a sortedList, or would be inserted.
type position struct{ chunk, item int }

func search[E any](sorted []E, key string, keyOf func(E) string) (int, bool) {
	return slices.BinarySearchFunc(sorted, key, func(e E, key string) int { return strings.Compare(keyOf(e), key) })
}

func (o *sortedList[T]) find(key string, keyOf func(T) string) (position, bool) {
	chunk, first := search(o.chunks, key, func(chunk []T) string { return keyOf(chunk[0]) })
	if !first {
		chunk = max(0, chunk-1) // the last chunk that begins before the key
	}
	if len(o.chunks) == 0 {
		return position{}, false
	}
	item, has := search(o.chunks[chunk], key, keyOf)
	return position{chunk, item}, has
}

func (o *sortedList[T]) get(key string, keyOf func(T) string) (T, bool) {
	at, has := o.find(key, keyOf)
	if !has {
		var none T
		return none, false
	}
	return o.chunks[at.chunk][at.item], true
}

func (o *sortedList[T]) put(t T, keyOf func(T) string) {
	if len(o.chunks) == 0 {
		o.chunks = [][]T{{t}}
		return
	}
	at, _ := o.find(keyOf(t), keyOf)
	chunk := slices.Insert(o.chunks[at.chunk], at.item, t)
	o.chunks[at.chunk] = chunk
	if len(chunk) > maxChunk {
		o.chunks[at.chunk] = slices.Clone(chunk[:maxChunk/2])
		o.chunks = slices.Insert(o.chunks, at.chunk+1, slices.Clone(chunk[maxChunk/2:]))
	}
}

func (o *sortedList[T]) remove(key string, keyOf func(T) string) {
	at, has := o.find(key, keyOf)
	if !has {
		return
	}
	o.chunks[at.chunk] = slices.Delete(o.chunks[at.chunk], at.item, at.item+1)
	if len(o.chunks[at.chunk]) == 0 {
		o.chunks = slices.Delete(o.chunks, at.chunk, at.chunk+1)
	}
}

// from yields the object at a position and all after it.
func (o *sortedList[T]) from(at position) iter.Seq[T] {
	return func(yield func(T) bool) {
		skip := at.item
		for chunk := at.chunk; chunk < len(o.chunks); chunk++ {
			for _, t := range o.chunks[chunk][skip:] {
				if !yield(t) {
					return
				}
			}
			skip = 0
		}
	}
}

// before yields the objects before a position, backwards.
func (o *sortedList[T]) before(at position) iter.Seq[T] {
	return func(yield func(T) bool) {
		for chunk := min(at.chunk, len(o.chunks)-1); chunk >= 0; chunk-- {
			items := o.chunks[chunk]
			if chunk == at.chunk {
				items = items[:at.item]
			}
			for _, t := range slices.Backward(items) {
				if !yield(t) {
					return
				}
			}
		}
	}
}

// scan is the state of a list: it continues after the key last, or begins when last is empty, which no key is. A page
// token holds it together with the project, and with the instance where the query names one.
type scan struct {
	project  *selector
	instance *selector
	sort     string
	last     string
	limit    int
}

// page is the answer to a list request. NextPage is null only on an empty page.
type page[V any] struct {
	Items    []V     `json:"items"`
	NextPage *string `json:"next_page"`
}

func makePage[T record, V any](things []T, sc scan, view func(T) V) page[V] {
	p := page[V]{Items: make([]V, 0, len(things))}
	for _, t := range things {
		p.Items = append(p.Items, view(t))
	}
	if len(things) > 0 {
		last := things[len(things)-1]
		sc.last = nameOf(last)
		if sc.sort == sortID {
			sc.last = idOf(last)
		}
		token := sc.token()
		p.NextPage = &token
	}
	return p
}

// pageToken is the content of a page token. Clients must treat it as opaque.
type pageToken struct {
	V         string    `json:"v"`
	PageStart pageStart `json:"page_start"`
}

type pageStart struct {
	SortBy   string `json:"sort_by"`
	Project  string `json:"project,omitempty"`
	Instance string `json:"instance,omitempty"`
	LastSeen string `json:"last_seen"`
}

func (sc scan) token() string {
	t := pageToken{V: "v1", PageStart: pageStart{SortBy: sc.sort, LastSeen: sc.last}}
	if sc.project != nil {
		t.PageStart.Project = sc.project.String()
	}
	if sc.instance != nil {
		t.PageStart.Instance = sc.instance.String()
	}
	raw, err := json.Marshal(t)
	if err != nil {
		panic("a struct of strings does not marshal: " + err.Error())
	}
	return base64.URLEncoding.EncodeToString(raw)
}

// parseScan reads limit, page_token, sort_by and project of a list request. A token determines order and project.
func (q *request) parseScan(sorts []string, needProject bool) (scan, error) {
	sc := scan{limit: defaultLimit, sort: sorts[0]}
	limit, has, err := q.param("limit")
	if err != nil {
		return scan{}, err
	}
	if has {
		if sc.limit, err = parseLimit(limit); err != nil {
			return scan{}, err
		}
	}
	token, has, err := q.param("page_token")
	if err != nil {
		return scan{}, err
	}
	if has {
		return sc.resume(token, sorts, needProject)
	}
	sortBy, has, err := q.param("sort_by")
	if err != nil {
		return scan{}, err
	}
	if has {
		if !slices.Contains(sorts, sortBy) {
			return scan{}, badQuery("unknown variant `%s`, expected %s", sortBy, quoteWords(sorts))
		}
		sc.sort = sortBy
	}
	if sc.project, err = q.project(); err != nil {
		return scan{}, err
	}
	if needProject && sc.project == nil {
		return scan{}, badQuery("missing field `project`")
	}
	return sc, nil
}

func parseLimit(s string) (int, error) {
	n, err := strconv.ParseUint(s, 10, 32)
	switch {
	case err != nil && strings.HasSuffix(err.Error(), strconv.ErrRange.Error()):
		return 0, badQuery("number too large to fit in target type")
	case err != nil:
		return 0, badQuery("invalid digit found in string")
	case n == 0:
		return 0, badQuery("expected a non-zero value")
	}
	return int(min(n, maxLimit)), nil
}

// resume takes order, project and last key from a token.
func (sc scan) resume(token string, sorts []string, needProject bool) (scan, error) {
	const bad = "failed to parse pagination token: "
	if len(token) > maxTokenLength {
		return scan{}, badQuery(bad + "too large")
	}
	raw, err := base64.URLEncoding.DecodeString(token)
	if err != nil {
		return scan{}, badQuery(bad+"%v", err)
	}
	var t pageToken
	if json.Unmarshal(raw, &t) != nil || t.PageStart.LastSeen == "" || !slices.Contains(sorts, t.PageStart.SortBy) {
		return scan{}, badQuery(bad + "corrupted token")
	}
	if t.V != "v1" {
		return scan{}, badQuery(bad + "unsupported version")
	}
	sc.sort, sc.last = t.PageStart.SortBy, t.PageStart.LastSeen
	project, projectErr := optionalSelector(t.PageStart.Project)
	instance, instanceErr := optionalSelector(t.PageStart.Instance)
	if projectErr != nil || instanceErr != nil || (needProject && project == nil) {
		return scan{}, badQuery(bad + "corrupted token")
	}
	sc.project, sc.instance = project, instance
	return sc, nil
}

// optionalSelector is nil for an empty text.
func optionalSelector(s string) (*selector, error) {
	if s == "" {
		return nil, nil
	}
	sel, err := parseSelector(s)
	return &sel, err
}
