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

// Readiness says whether the plugin can serve, and what it waits for if not. The zero value is ready.
type Readiness struct {
	mu sync.Mutex
	// waitingFor is empty when the plugin is ready.
	waitingFor string
}

// SetWaiting makes the plugin not ready, with what it waits for. An empty string makes it ready. It reports whether
// that changed anything.
func (r *Readiness) SetWaiting(waitingFor string) (changed bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	changed = r.waitingFor != waitingFor
	r.waitingFor = waitingFor
	return changed
}

// Ready reports whether the plugin is ready, and what it waits for if not.
func (r *Readiness) Ready() (bool, string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.waitingFor == "", r.waitingFor
}

// AwaitIdentity asks the provider for the identity of this node, again and again until it answers, and then becomes
// ready. It blocks until then or until ctx ends. What it waits for is shown on /readyz, and logged on each change.
func (r *Readiness) AwaitIdentity(ctx context.Context, provider metadata.Provider, log *slog.Logger) {
	instance, err := metadata.Await(ctx, provider, func(err error) (again bool) {
		if r.SetWaiting("identity of this node: "+err.Error()) && ctx.Err() == nil {
			log.Warn("this node is not known yet", "error", err)
		}
		return true
	})
	if err != nil {
		return
	}
	r.SetWaiting("")
	log.Info("this node is known", "node_id", instance.ID, "rack", instance.Rack)
}
