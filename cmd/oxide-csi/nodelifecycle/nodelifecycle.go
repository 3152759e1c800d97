// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package nodelifecycle handles the beginning and the end of a node's life. At the beginning it removes the taint that
// keeps pods off until the scheduler knows the Node's volume limit. At the end it waits until the volumes of a Node
// that is given up are detached.
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
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

const (
	// attemptTimeout bounds one request to the API server.
	attemptTimeout = 10 * time.Second
	// firstPause and longestPause are the bounds of the pause between two attempts.
	firstPause   = 500 * time.Millisecond
	longestPause = 10 * time.Second
	// watchDuration is how long ClearTaint waits for a taint that the Node does not have. The program that creates
	// Nodes may add the taint after the plugin has started.
	watchDuration = 5 * time.Minute
)

// ClearTaint removes a taint from the node once the orchestrator has the plugin's registration and volume limit. The
// provider identifies the instance. ClearTaint returns when the node has not had the taint for five minutes, or when
// ctx ends. It logs failures and retries.
func ClearTaint(
	ctx context.Context, node orchestrator.StartupTaint, key string, identity metadata.Provider, log *slog.Logger,
) {
	self, err := metadata.Await(ctx, identity, func(error) bool { return true })
	if err != nil {
		return // ctx has ended.
	}
	registration := orchestrator.Registration{Driver: rpc.PluginName, NodeID: self.ID}
	followCtx, cancel := context.WithCancel(ctx)
	defer cancel()
	changes := node.Follow(followCtx)
	reason := ""
	absentSince := time.Now()
	for pause := firstPause; ; {
		removed, err := attempt(ctx,
			func(ctx context.Context) (bool, error) { return node.RemoveTaint(ctx, key, registration) })
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			if err.Error() != reason {
				reason = err.Error()
				log.Log(ctx, logLevel(err), "the startup taint is not removed yet", "taint", key, "error", err)
			}
			absentSince = time.Now()
		case removed:
			log.Info("the startup taint was removed", "taint", key)
			reason, absentSince, pause = "", time.Now(), firstPause
		case time.Since(absentSince) >= watchDuration:
			return
		}
		if err != nil {
			pause = min(2*pause, longestPause)
		} else {
			pause = max(firstPause, watchDuration-time.Since(absentSince))
		}
		select {
		case <-time.After(pause):
		case <-changes:
		case <-ctx.Done():
			return
		}
	}
}

// logLevel returns the log level of an error: info if waiting may help, otherwise error.
func logLevel(err error) slog.Level {
	if errors.Is(err, metadata.ErrNotReady) {
		return slog.LevelInfo
	}
	return slog.LevelError
}

// AwaitDetached waits until none of the plugin's volumes is attached to the Node. If the Node is not given up, it
// returns nil at once. If ctx ends first, the error names the attached volumes.
func AwaitDetached(ctx context.Context, node orchestrator.Departure, log *slog.Logger) error {
	reason, err := retry(ctx, node.Leaving)
	if err != nil {
		return fmt.Errorf("check whether the node is given up: %w", err)
	}
	if reason == "" {
		log.Info("the node is not given up: nothing to wait for")
		return nil
	}
	log.Info("the node is given up: waiting for its volumes to be detached", "reason", reason)
	logged := ""
	for pause := firstPause; ; pause = min(2*pause, longestPause/2) {
		volumes, err := retry(ctx,
			func(ctx context.Context) ([]string, error) { return node.Attachments(ctx, rpc.PluginName) })
		if err != nil {
			return fmt.Errorf("list the attached volumes: %w", err)
		}
		if len(volumes) == 0 {
			log.Info("no volume is attached")
			return nil
		}
		if now := strings.Join(volumes, ", "); now != logged {
			logged = now
			log.Info("volumes are attached", "volumes", now)
		}
		if !sleep(ctx, pause) {
			return fmt.Errorf(
				"volumes are still attached after the timeout: %s: check which pods use them: a drain does not evict pods of DaemonSets",
				logged,
			)
		}
	}
}

// retry repeats a request until it succeeds, until it returns an error that waiting does not repair, or until ctx ends.
// The error is that of the last attempt that ctx did not interrupt.
func retry[T any](ctx context.Context, request func(context.Context) (T, error)) (answer T, err error) {
	for pause := firstPause; ; pause = min(2*pause, longestPause) {
		var attemptErr error
		if answer, attemptErr = attempt(ctx, request); attemptErr == nil {
			return answer, nil
		}
		if err == nil || ctx.Err() == nil {
			err = attemptErr
		}
		if !errors.Is(attemptErr, metadata.ErrNotReady) || !sleep(ctx, pause) {
			return answer, err
		}
	}
}

// attempt makes one request with its timeout.
func attempt[T any](ctx context.Context, request func(context.Context) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	return request(ctx)
}

// sleep waits for d. It returns false if ctx ends first.
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
