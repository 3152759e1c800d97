package simrack

import (
	"encoding/base64"
	"encoding/json"
	"slices"
	"strconv"
	"strings"
)

// The sort orders of lists (docs/rack.md §1).
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

// record is a thing that is listed.
type record interface {
	comparable
	key() (name, id string)
}

// shelf keeps the things of one kind in one place in the two orders in which they are listed. Finding one and finding
// where a page begins take a binary search.
type shelf[T record] struct {
	byName []T
	byID   []T
}

func nameOf[T record](t T) string { name, _ := t.key(); return name }
func idOf[T record](t T) string   { _, id := t.key(); return id }

func find[T record](sorted []T, key string, keyOf func(T) string) (int, bool) {
	return slices.BinarySearchFunc(sorted, key, func(t T, key string) int { return strings.Compare(keyOf(t), key) })
}

func (s *shelf[T]) put(t T) {
	at, _ := find(s.byName, nameOf(t), nameOf[T])
	s.byName = slices.Insert(s.byName, at, t)
	at, _ = find(s.byID, idOf(t), idOf[T])
	s.byID = slices.Insert(s.byID, at, t)
}

func (s *shelf[T]) remove(t T) {
	if at, has := find(s.byName, nameOf(t), nameOf[T]); has {
		s.byName = slices.Delete(s.byName, at, at+1)
	}
	if at, has := find(s.byID, idOf(t), idOf[T]); has {
		s.byID = slices.Delete(s.byID, at, at+1)
	}
}

func (s *shelf[T]) named(name string) (T, bool) {
	at, has := find(s.byName, name, nameOf[T])
	if !has {
		var none T
		return none, false
	}
	return s.byName[at], true
}

// scan is where a list goes on: after the last key seen in this order, or from the beginning when that is empty (no key is
// empty). It is what a page token holds, beside the project.
type scan struct {
	project *selector
	sort    string
	last    string
	limit   int
}

// next returns the things of the page. Things that were put or removed since the last page shift nothing.
func (s *shelf[T]) next(sc scan) []T {
	sorted, keyOf := s.byName, nameOf[T]
	if sc.sort == sortID {
		sorted, keyOf = s.byID, idOf[T]
	}
	at, has := find(sorted, sc.last, keyOf)
	if sc.sort == sortNameDown {
		if sc.last == "" {
			at = len(sorted)
		}
		items := slices.Clone(sorted[max(0, at-sc.limit):at])
		slices.Reverse(items)
		return items
	}
	if has {
		at++
	}
	return slices.Clone(sorted[at:min(len(sorted), at+sc.limit)])
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

// pageToken is the content of a page token; clients may not look into it.
type pageToken struct {
	V         string    `json:"v"`
	PageStart pageStart `json:"page_start"`
}

type pageStart struct {
	SortBy   string `json:"sort_by"`
	Project  string `json:"project,omitempty"`
	LastSeen string `json:"last_seen"`
}

func (sc scan) token() string {
	t := pageToken{V: "v1", PageStart: pageStart{SortBy: sc.sort, LastSeen: sc.last}}
	if sc.project != nil {
		t.PageStart.Project = sc.project.String()
	}
	raw, err := json.Marshal(t)
	if err != nil {
		panic("a struct of strings does not marshal: " + err.Error())
	}
	return base64.URLEncoding.EncodeToString(raw)
}

// parseScan reads limit, page_token, sort_by and project of a list request. With a token, order and project come from it.
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
	if t.PageStart.Project != "" {
		project, err := parseSelector(t.PageStart.Project)
		if err != nil {
			return scan{}, badQuery(bad + "corrupted token")
		}
		sc.project = &project
	}
	if needProject && sc.project == nil {
		return scan{}, badQuery(bad + "corrupted token")
	}
	return sc, nil
}
