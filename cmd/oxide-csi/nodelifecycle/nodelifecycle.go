// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package nodelifecycle is what the plugin does for its node at the beginning and at the end of its life, where an
// operator wants it: it takes away the taint that keeps pods off until the scheduler knows how many volumes the Node
// takes, and it keeps the plugin going until the volumes of a Node that is given up are detached.
package nodelifecycle

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

const (
	// attemptTimeout bounds one question to the API server.
	attemptTimeout = 10 * time.Second
	// firstPause and longestPause lie between two questions that have not brought what is waited for.
	firstPause   = 500 * time.Millisecond
	longestPause = 10 * time.Second
	// watchTime is for how long a taint that is not there is looked for: what makes Nodes may add its taints after the
	// kubelet has made the Node and started the plugin.
	watchTime = 5 * time.Minute
)

// ClearTaint takes a taint off the node once the orchestrator knows the plugin there, as the instance that the provider
// finds, with a limit of volumes. It returns when the taint has not been seen for five minutes, or when ctx ends.
// Failures are logged, and what has failed is tried again.
func ClearTaint(
	ctx context.Context, node metadata.StartupTaint, key string, identity metadata.Provider, log *slog.Logger,
) {
	self, err := metadata.Await(ctx, identity, func(error) bool { return true })
	if err != nil {
		return // ctx has ended.
	}
	registration := metadata.Registration{Driver: rpc.PluginName, NodeID: self.ID}
	following, cancel := context.WithCancel(ctx)
	defer cancel()
	changes := node.Follow(following)
	reason := ""
	clean := time.Now()
	for pause := firstPause; ; {
		had, err := attempt(
			ctx,
			func(ctx context.Context) (bool, error) { return node.RemoveTaint(ctx, key, registration) },
		)
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			if err.Error() != reason {
				reason = err.Error()
				log.Log(ctx, level(err), "the startup taint stays", "taint", key, "error", err)
			}
			clean = time.Now()
		case had:
			log.Info("the startup taint is removed", "taint", key)
			reason, clean, pause = "", time.Now(), firstPause
		case time.Since(clean) >= watchTime:
			return
		}
		if err != nil {
			pause = min(2*pause, longestPause)
		} else {
			pause = max(firstPause, watchTime-time.Since(clean))
		}
		select {
		case <-time.After(pause):
		case <-changes:
		case <-ctx.Done():
			return
		}
	}
}

// level is that of waiting, or of what time alone does not mend.
func level(err error) slog.Level {
	if errors.Is(err, metadata.ErrNotReady) {
		return slog.LevelInfo
	}
	return slog.LevelError
}

// AwaitDetached returns nil at once when nobody gives the Node up, and otherwise when none of the plugin's volumes is
// attached to it. When ctx ends before, the error names those that are.
func AwaitDetached(ctx context.Context, node metadata.Departure, log *slog.Logger) error {
	why, err := persist(ctx, node.Leaving)
	if err != nil {
		return fmt.Errorf("not known whether the node is given up: %w", err)
	}
	if why == "" {
		log.Info("the node stays: nothing to wait for")
		return nil
	}
	log.Info("the node is given up: waiting for its volumes to be detached", "reason", why)
	before := ""
	for pause := firstPause; ; pause = min(2*pause, longestPause/2) {
		volumes, err := persist(
			ctx,
			func(ctx context.Context) ([]string, error) { return node.Attachments(ctx, rpc.PluginName) },
		)
		if err != nil {
			return fmt.Errorf("not known what is attached: %w", err)
		}
		if len(volumes) == 0 {
			log.Info("no volume is attached")
			return nil
		}
		if now := strings.Join(volumes, ", "); now != before {
			before = now
			log.Info("volumes are attached", "volumes", now)
		}
		if !sleep(ctx, pause) {
			return fmt.Errorf(
				"still attached when the time was up: %s; see which pods use them: drain leaves those of daemon sets",
				before,
			)
		}
	}
}

// persist asks until there is an answer, an error that waiting does not mend, or no time left; then the error is that
// of the last answer.
func persist[T any](ctx context.Context, ask func(context.Context) (T, error)) (answer T, err error) {
	for pause := firstPause; ; pause = min(2*pause, longestPause) {
		var said error
		if answer, said = attempt(ctx, ask); said == nil {
			return answer, nil
		}
		if err == nil || ctx.Err() == nil {
			err = said
		}
		if !errors.Is(said, metadata.ErrNotReady) || !sleep(ctx, pause) {
			return answer, err
		}
	}
}

func attempt[T any](ctx context.Context, ask func(context.Context) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	return ask(ctx)
}

// sleep waits, and reports whether ctx has not ended meanwhile.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
