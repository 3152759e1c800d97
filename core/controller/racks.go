// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
	"sync"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// racks are the racks of a controller. An ID says nothing of its rack, and no two racks have the same ID (docs/reference/rack.md §8):
// a disk is looked for on the rack where it was seen last, else on all. That it is gone is said only when every rack that
// could have it has said so.
type racks struct {
	all []*rack.Client
	// topology is that of everything on a rack. All messages share it: a list of thousands with one for each would take
	// half as much memory again.
	topology map[*rack.Client][]*csi.Topology

	mu   sync.Mutex
	seen map[string]*rack.Client
}

// seenLimit bounds the memory of where things were seen; what is forgotten is looked for on all racks.
const seenLimit = 20_000

func newRacks(all []*rack.Client) *racks {
	r := &racks{all: all, topology: map[*rack.Client][]*csi.Topology{}, seen: map[string]*rack.Client{}}
	for _, client := range all {
		r.topology[client] = []*csi.Topology{rpc.Topology(client.Name())}
	}
	return r
}

func (r *racks) names() string {
	names := make([]string, 0, len(r.all))
	for _, client := range r.all {
		names = append(names, client.Name())
	}
	return strings.Join(names, ", ")
}

func (r *racks) lastSeen(id string) *rack.Client {
	if len(r.all) == 1 {
		return r.all[0]
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.seen[id]
}

// saw remembers where a thing is; a nil client forgets it.
func (r *racks) saw(id string, client *rack.Client) {
	if len(r.all) == 1 {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if client == nil {
		delete(r.seen, id)
		return
	}
	if len(r.seen) >= seenLimit {
		clear(r.seen)
	}
	r.seen[id] = client
}

// find asks the racks for the thing with an ID and returns it with its rack. [rack.ErrNotFound] means that it is on none of
// them, and that each has confirmed that this token would see it; whatever else a rack answers leaves that open.
func find[T any](
	ctx context.Context,
	r *racks,
	id string,
	ask func(*rack.Client, context.Context, string) (T, error),
) (*rack.Client, T, error) {
	others := r.all
	var missing error
	if known := r.lastSeen(id); known != nil {
		thing, err := ask(known, ctx, id)
		if !errors.Is(err, rack.ErrNotFound) {
			return known, thing, err
		}
		missing = err
		others = slices.DeleteFunc(slices.Clone(r.all), func(c *rack.Client) bool { return c == known })
	}
	client, thing, err := findAnywhere(ctx, others, id, ask, missing)
	if err == nil {
		r.saw(id, client)
		return client, thing, nil
	}
	if errors.Is(err, rack.ErrNotFound) {
		r.saw(id, nil)
		if unconfirmed := r.unconfirmed(ctx); unconfirmed != nil {
			err = unconfirmed
		}
	}
	return nil, thing, err
}

// findAnywhere asks racks at the same time and takes the first that has the thing. Missing is what a rack that was asked before
// has answered.
func findAnywhere[T any](
	ctx context.Context,
	clients []*rack.Client,
	id string,
	ask func(*rack.Client, context.Context, string) (T, error),
	missing error,
) (*rack.Client, T, error) {
	var none T
	var failed error
	for client, found := range askAll(ctx, clients, func(ctx context.Context, client *rack.Client) (T, error) { return ask(client, ctx, id) }) {
		switch {
		case found.err == nil:
			return client, found.thing, nil
		case errors.Is(found.err, rack.ErrNotFound):
			missing = found.err
		default:
			failed = errors.Join(failed, found.err)
		}
	}
	if failed != nil {
		// Not the code of whatever is wrong with one rack: the thing may be there, or elsewhere.
		return nil, none, unknownOutcome(ctx, fmt.Errorf("%s may be on a rack that does not answer: %w", id, oneLine(failed)))
	}
	return nil, none, missing
}

// unconfirmed is UNAVAILABLE, or the end of the caller's own time, when a 404 cannot be believed: nothing is known about the thing then, and no orchestrator
// may conclude that it is gone.
func (r *racks) unconfirmed(ctx context.Context) error {
	for _, confirmed := range askAll(ctx, r.all, func(ctx context.Context, client *rack.Client) (struct{}, error) {
		return struct{}{}, client.ConfirmProject(ctx)
	}) {
		if confirmed.err != nil {
			return unknownOutcome(ctx, confirmed.err)
		}
	}
	return nil
}

// answer is what one rack said.
type answer[T any] struct {
	thing T
	err   error
	// panicked is the panic of the question, which belongs to whoever reads the answers.
	panicked any
}

// askAll puts a question to racks at the same time and yields their answers as they come in. Who has heard enough ends the other
// questions.
func askAll[T any](
	ctx context.Context,
	clients []*rack.Client,
	ask func(context.Context, *rack.Client) (T, error),
) iter.Seq2[*rack.Client, answer[T]] {
	return func(yield func(*rack.Client, answer[T]) bool) {
		if len(clients) == 1 {
			thing, err := ask(ctx, clients[0])
			yield(clients[0], answer[T]{thing: thing, err: err})
			return
		}
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		type reply struct {
			client *rack.Client
			answer[T]
		}
		replies := make(chan reply, len(clients)) // with room for all: nobody is left waiting when the reader has gone
		for _, client := range clients {
			go func() {
				r := reply{client: client}
				defer func() {
					r.panicked = recover()
					replies <- r
				}()
				r.thing, r.err = ask(ctx, client)
			}()
		}
		for range clients {
			r := <-replies
			if r.panicked != nil {
				panic(r.panicked)
			}
			if !yield(r.client, r.answer) {
				return
			}
		}
	}
}

// oneLine joins the lines of an error that has several.
func oneLine(err error) error { return joined{err} }

type joined struct{ error }

func (j joined) Error() string { return strings.ReplaceAll(j.error.Error(), "\n", "; ") }
func (j joined) Unwrap() error { return j.error }
