// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// tokenWarnings are the times before a token's expiry at which the log warns, longest first.
var tokenWarnings = []time.Duration{7 * 24 * time.Hour, 24 * time.Hour}

const (
	// tokenCheckDelay keeps the first look out of the start, when the rack has other requests to answer.
	tokenCheckDelay = time.Minute
	// tokenCheckInterval is also the longest time for which a replaced token is still shown.
	tokenCheckInterval = time.Hour
)

// WatchToken measures when the tokens of a rack's user expire, until ctx ends. It logs a week and a day before that a
// token expires, and in this week it publishes an event at each look: orchestrators keep events only for a while. One
// of the tokens is the one that this controller has. The rack tells which one only if the user has no other, so with
// several tokens log and event say that the token may be another one.
func (c *Service) WatchToken(ctx context.Context, client *rack.Client) {
	w := tokenWatch{rack: client.Name(), self: c.self, log: c.log.With("rack", client.Name())}
	for wait := tokenCheckDelay; ; wait = tokenCheckInterval {
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
		tokens, err := client.AccessTokens(ctx)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			w.failed(err)
			continue
		}
		w.silent = false
		c.metrics.SetTokens(client.Name(), len(tokens), earliestCreation(tokens), earliestExpiry(tokens))
		w.warn(ctx, tokens)
	}
}

func earliestCreation(tokens []rack.AccessToken) time.Time {
	return earliest(tokens, func(token rack.AccessToken) time.Time { return token.Created })
}

func earliestExpiry(tokens []rack.AccessToken) time.Time {
	return earliest(tokens, func(token rack.AccessToken) time.Time { return token.Expires })
}

// earliest returns the first of the times that the tokens have, or zero if none has one.
func earliest(tokens []rack.AccessToken, of func(rack.AccessToken) time.Time) (first time.Time) {
	for _, token := range tokens {
		if at := of(token); !at.IsZero() && (first.IsZero() || at.Before(first)) {
			first = at
		}
	}
	return first
}

// tokenWatch is what [Service.WatchToken] has logged about one rack.
type tokenWatch struct {
	rack string
	self orchestrator.SelfReporter // may be nil
	log  *slog.Logger
	// warned is the last of [tokenWarnings] that was logged for a token, by the token's ID.
	warned map[string]time.Duration
	// silent means that the last look failed, which is logged once.
	silent bool
}

func (w *tokenWatch) failed(err error) {
	if !w.silent {
		w.log.Warn("cannot read when the token of the rack expires: watch its expiry elsewhere", "error", err)
	}
	w.silent = true
}

// warn logs each token that expires soon, once for each of [tokenWarnings], and publishes an event of it each time.
func (w *tokenWatch) warn(ctx context.Context, tokens []rack.AccessToken) {
	warned := map[string]time.Duration{}
	for _, token := range tokens {
		due := dueWarning(token.Expires)
		if due == 0 {
			continue
		}
		if last := w.warned[token.ID]; last == 0 || due < last {
			w.log.Warn(expiryMessage(len(tokens)), "token_id", token.ID, "expires", token.Expires, "tokens", len(tokens))
		}
		warned[token.ID] = due
		w.publish(ctx, token, len(tokens))
	}
	w.warned = warned
}

// publish publishes that a token expires. A failure is only logged.
func (w *tokenWatch) publish(ctx context.Context, token rack.AccessToken, tokens int) {
	if w.self == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, reportTimeout)
	defer cancel()
	report := orchestrator.Report{Event: orchestrator.EventTokenExpires, Message: fmt.Sprintf(
		"rack %s, token ID %s, expiry %s: %s",
		w.rack, token.ID, token.Expires.UTC().Format(time.RFC3339), expiryMessage(tokens))}
	if err := w.self.ReportSelf(ctx, report); err != nil {
		w.log.Warn("could not publish that a token expires", "error", err.Error())
	}
}

// dueWarning returns the shortest of [tokenWarnings] that has begun, or 0.
func dueWarning(expires time.Time) (due time.Duration) {
	if expires.IsZero() {
		return 0
	}
	for _, before := range tokenWarnings {
		if time.Until(expires) <= before {
			due = before
		}
	}
	return due
}

func expiryMessage(tokens int) string {
	if tokens == 1 {
		return "the token of the rack expires soon: replace it"
	}
	return "a token of the rack's user expires soon, and the rack does not tell whether the plugin uses this one: " +
		"see which one it uses; a user with one token makes this certain"
}
