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

type thing struct{ name, id string }

func (t *thing) key() (name, id string) { return t.name, t.id }

// TestCollectionIsSorted puts and removes several chunks full of objects, and compares every page with a sorted list.
func TestCollectionIsSorted(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var s collection[*thing]
	there := map[string]*thing{}
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
			there[name] = &thing{name, fmt.Sprintf("i-%04d-%s", rng.IntN(10000), name)}
			s.put(there[name])
		}
		checkShelf(t, &s, there)
		if round == 4 { // the last round begins with an empty collection
			for _, thing := range there {
				s.remove(thing)
			}
			clear(there)
			checkShelf(t, &s, there)
		}
	}
}

func checkShelf(t *testing.T, s *collection[*thing], there map[string]*thing) {
	t.Helper()
	var names, ids []string
	for name, thing := range there {
		names, ids = append(names, name), append(ids, thing.id)
		if got, has := s.named(name); !has || got != thing {
			t.Fatalf("%s is lost", name)
		}
		if got, has := s.withID(thing.id); !has || got != thing {
			t.Fatalf("%s is lost", thing.id)
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
				things := s.next(sc)
				if len(things) == 0 {
					break
				}
				for _, t := range things {
					sc.last = t.name
					if order == sortID {
						sc.last = t.id
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
