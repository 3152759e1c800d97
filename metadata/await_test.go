// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package metadata_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// script is a provider whose calls are answered one after the other.
type script []func(context.Context) (metadata.Instance, error)

func (s *script) Instance(ctx context.Context) (metadata.Instance, error) {
	next := (*s)[0]
	*s = (*s)[1:]
	return next(ctx)
}

func notReady(context.Context) (metadata.Instance, error) {
	return metadata.Instance{}, &metadata.Error{Kind: metadata.ErrNotReady, What: "wait", Next: "wait"}
}

func hangs(ctx context.Context) (metadata.Instance, error) {
	<-ctx.Done()
	return metadata.Instance{}, &metadata.Error{Kind: metadata.ErrNotReady, What: "wait", Cause: ctx.Err(), Next: "wait"}
}

func answers(context.Context) (metadata.Instance, error) { return metadata.Instance{ID: id}, nil }

func TestAwait(t *testing.T) {
	for name, tt := range map[string]struct {
		calls  script
		giveUp bool
		limit  time.Duration
		want   metadata.Instance
		failed int
		took   time.Duration
	}{
		"at once":        {calls: script{answers}, want: metadata.Instance{ID: id}},
		"later":          {calls: script{notReady, notReady, answers}, want: metadata.Instance{ID: id}, failed: 2, took: 750 * time.Millisecond},
		"after a hang":   {calls: script{hangs, answers}, want: metadata.Instance{ID: id}, failed: 1, took: 10250 * time.Millisecond},
		"given up":       {calls: script{notReady}, giveUp: true, failed: 1},
		"no time left":   {calls: script{notReady, notReady}, limit: 500 * time.Millisecond, failed: 2, took: 500 * time.Millisecond},
		"hang, no time":  {calls: script{hangs}, limit: time.Second, failed: 1, took: time.Second},
		"seldom at last": {calls: script{notReady, notReady, notReady, notReady, notReady, notReady, notReady, notReady, answers}, want: metadata.Instance{ID: id}, failed: 8, took: 35750 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx := t.Context()
				if tt.limit > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, tt.limit)
					defer cancel()
				}
				start, failed := time.Now(), 0
				got, err := metadata.Await(ctx, &tt.calls, func(error) bool { failed++; return !tt.giveUp })
				if got != tt.want || (err == nil) != (tt.want.ID != "") || err != nil && !errors.Is(err, metadata.ErrNotReady) {
					t.Errorf("got %+v, %v; want %+v", got, err, tt.want)
				}
				if failed != tt.failed || time.Since(start) != tt.took || len(tt.calls) != 0 {
					t.Errorf(
						"failed %d times in %s with %d calls left; want %d in %s",
						failed,
						time.Since(start),
						len(tt.calls),
						tt.failed,
						tt.took,
					)
				}
			})
		})
	}
}

// followed is a provider whose source reports changes.
type followed struct {
	script
	changes chan struct{}
	ended   <-chan struct{}
}

func (p *followed) Follow(ctx context.Context) <-chan struct{} {
	p.ended = ctx.Done()
	return p.changes
}

// Await asks a source again as soon as the source reports a change. It does not follow a source whose first answer
// succeeds.
func TestAwaitFollows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &followed{script: script{notReady, notReady, answers}, changes: make(chan struct{})}
		start := time.Now()
		go func() {
			for range 2 {
				time.Sleep(time.Millisecond)
				p.changes <- struct{}{}
			}
		}()
		got, err := metadata.Await(t.Context(), p, func(error) bool { return true })
		if took := time.Since(start); err != nil || got.ID != id || took != 2*time.Millisecond {
			t.Errorf("%+v, %v after %s", got, err, took)
		}
		<-p.ended
		p = &followed{script: script{answers}}
		if _, err := metadata.Await(t.Context(), p, func(error) bool { return true }); err != nil || p.ended != nil {
			t.Errorf("%v, followed: %v", err, p.ended != nil)
		}
	})
}
