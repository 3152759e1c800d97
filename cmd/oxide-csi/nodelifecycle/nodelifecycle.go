// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package nodelifecycle handles the beginning and the end of a node's life. At the beginning it removes the taint that
// keeps pods off until the scheduler knows the Node's volume limit. At the end it waits until the volumes of a Node that
// is given up are detached.
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
	// attemptTimeout bounds one request to the API server.
	attemptTimeout = 10 * time.Second
	// firstPause and longestPause are the bounds of the pause between two attempts.
	firstPause   = 500 * time.Millisecond
	longestPause = 10 * time.Second
	// watchTime is how long ClearTaint waits for a taint that the Node does not have. The program that creates Nodes may
	// add the taint after the plugin has started.
	watchTime = 5 * time.Minute
)

// ClearTaint removes a taint from the node once the orchestrator has the plugin's registration and volume limit. The
// provider tells the instance. It returns when the node has not had the taint for five minutes, or when ctx ends. It logs
// failures and retries.
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
				log.Log(ctx, level(err), "the startup taint is not removed yet", "taint", key, "error", err)
			}
			clean = time.Now()
		case had:
			log.Info("the startup taint was removed", "taint", key)
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

// level is the log level of an error: info while waiting may help, else error.
func level(err error) slog.Level {
	if errors.Is(err, metadata.ErrNotReady) {
		return slog.LevelInfo
	}
	return slog.LevelError
}

// AwaitDetached waits until none of the plugin's volumes is attached to the Node. If the Node is not given up, it returns
// nil at once. If ctx ends first, the error names the attached volumes.
func AwaitDetached(ctx context.Context, node metadata.Departure, log *slog.Logger) error {
	why, err := persist(ctx, node.Leaving)
	if err != nil {
		return fmt.Errorf("cannot find out whether the node is given up: %w", err)
	}
	if why == "" {
		log.Info("the node is not given up: nothing to wait for")
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
			return fmt.Errorf("cannot find out which volumes are attached: %w", err)
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
				"volumes are still attached after the timeout: %s; check which pods use them: a drain leaves pods of daemon sets",
				before,
			)
		}
	}
}

// persist repeats a request until there is an answer, an error that waiting does not repair, or no time left. The error is
// that of the last attempt that was not cut off.
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

// sleep waits for a time. It returns false if ctx has ended.
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
