// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

type value struct{ name, id string }

func (t *value) key() (name, id string) { return t.name, t.id }

// TestCollectionIsSorted puts and removes several chunks full of objects, and compares every page with a sorted list.
func TestCollectionIsSorted(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var s collection[*value]
	there := map[string]*value{}
	for round := range 6 {
		for range 3 * maxChunk {
			name := fmt.Sprintf("n-%04d", rng.IntN(4000))
			if old := there[name]; old != nil {
				s.remove(old)
				delete(there, name)
				if _, has := s.named(name); has {
					t.Fatalf("%s is still there", name)
				}
				continue
			}
			there[name] = &value{name, fmt.Sprintf("i-%04d-%s", rng.IntN(10000), name)}
			s.put(there[name])
		}
		checkCollection(t, &s, there)
		if round == 4 { // the last round begins with an empty collection
			for _, v := range there {
				s.remove(v)
			}
			clear(there)
			checkCollection(t, &s, there)
		}
	}
}

func checkCollection(t *testing.T, s *collection[*value], there map[string]*value) {
	t.Helper()
	var names, ids []string
	for name, v := range there {
		names, ids = append(names, name), append(ids, v.id)
		if got, has := s.named(name); !has || got != v {
			t.Fatalf("%s is lost", name)
		}
		if got, has := s.withID(v.id); !has || got != v {
			t.Fatalf("%s is lost", v.id)
		}
	}
	slices.Sort(names)
	slices.Sort(ids)
	down := slices.Clone(names)
	slices.Reverse(down)
	for order, want := range map[string][]string{sortName: names, sortNameDown: down, sortID: ids} {
		for _, limit := range []int{7, 1000, maxLimit} {
			var got []string
			for sc := (scan{sort: order, limit: limit}); ; {
				values := s.next(sc)
				if len(values) == 0 {
					break
				}
				for _, v := range values {
					sc.last = v.name
					if order == sortID {
						sc.last = v.id
					}
					got = append(got, sc.last)
				}
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Fatalf("%s in pages of %d: %s", order, limit, diff)
			}
		}
	}
}
