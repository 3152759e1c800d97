// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package kubernetes

import (
	"context"
	"encoding/json"
	"time"
)

// slowNode is a Node that takes a time of slowness to decode, as on a machine without a free processor.
type slowNode struct{ node }

var slowness chan time.Duration

func (s *slowNode) UnmarshalJSON(text []byte) error {
	time.Sleep(<-slowness)
	return json.Unmarshal(text, &s.node)
}

// WatchSlowly watches a Node until ctx ends. Decoding the Node takes these times, one after the other. The result
// returns an annotation of the Node as the watch knows it.
func WatchSlowly(ctx context.Context, o Options, times ...time.Duration) func(context.Context, string) (string, error) {
	slowness = make(chan time.Duration, len(times))
	for _, t := range times {
		slowness <- t
	}
	close(slowness)
	w := &Watch[slowNode]{Client: NewClient(o), Collection: Nodes, Resource: "nodes", Kind: "Node"}
	w.Follow(ctx)
	return func(ctx context.Context, name string) (string, error) {
		s, _ := w.Get(ctx)
		return s.Object.Annotations[name], s.Err
	}
}
