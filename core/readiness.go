// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package core

import (
	"context"
	"log/slog"
	"sync"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// Readiness says whether the plugin can do its work, and what it waits for if not. The zero value is ready.
type Readiness struct {
	mu      sync.Mutex
	waiting string
}

// Await makes the plugin not ready until what it waits for is there.
func (r *Readiness) Await(waiting string) { r.set(waiting) }

// Ready reports whether the plugin is ready, and otherwise what it waits for.
func (r *Readiness) Ready() (bool, string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.waiting == "", r.waiting
}

func (r *Readiness) set(waiting string) (changed bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	changed = r.waiting != waiting
	r.waiting = waiting
	return changed
}

// AwaitIdentity asks the provider until it knows who this node is, however long that takes, and then becomes ready. It
// returns when it is ready or the context ends. Whatever keeps it waiting is logged when it changes, and shown on /readyz.
func (r *Readiness) AwaitIdentity(ctx context.Context, provider metadata.Provider, log *slog.Logger) {
	instance, err := metadata.Await(ctx, provider, func(err error) (again bool) {
		if r.set("identity of this node: "+err.Error()) && ctx.Err() == nil {
			log.Warn("this node is not known yet", "error", err)
		}
		return true
	})
	if err != nil {
		return
	}
	r.set("")
	log.Info("this node is known", "node_id", instance.ID, "rack", instance.Rack)
}
