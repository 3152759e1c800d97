// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/core/controller"
	"github.com/oxidecomputer/oxide-csi-plugin/core/metrics"
	"github.com/oxidecomputer/oxide-csi-plugin/core/metrics/metricstest"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

const day = 24 * time.Hour

// tokenRig is a controller that watches its token. The lines of its log begin with the time since the start.
type tokenRig struct {
	*bubbleRig
	metrics *metrics.Metrics
	log     *bytes.Buffer
	started time.Time
	events  *selfEvents
	// tokenID is the last token ID in the log.
	tokenID string
}

// selfEvents counts the events that the controller publishes about itself, by their text. With fail it publishes none.
type selfEvents struct {
	counts map[string]int
	fail   error
}

func (e *selfEvents) ReportSelf(_ context.Context, report orchestrator.Report) error {
	if e.fail == nil {
		e.counts[report.Event.Reason+": "+report.Message]++
	}
	return e.fail
}

// watchToken starts a controller with a token that expires. Each of others is the life of another token of its user.
func watchToken(t *testing.T, life time.Duration, others ...time.Duration) *tokenRig {
	t.Helper()
	return watchTokenWith(t, &selfEvents{counts: map[string]int{}}, life, others...)
}

func watchTokenWith(t *testing.T, events *selfEvents, life time.Duration, others ...time.Duration) *tokenRig {
	t.Helper()
	r := &tokenRig{
		bubbleRig: newBubbleRig(t),
		metrics:   metrics.New(metrics.Process{}),
		log:       &bytes.Buffer{},
		started:   time.Now(),
		events:    events,
	}
	r.token = r.makeToken(t, map[string]any{"role": "limited-collaborator", "expires_in_s": int(life.Seconds())})
	for _, life := range others {
		r.makeToken(t, map[string]any{"same_user_as": r.token, "expires_in_s": int(life.Seconds())})
	}
	log := slog.New(slog.NewTextHandler(r.log, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		switch a.Key {
		case slog.TimeKey:
			return slog.String("after", a.Value.Time().Sub(r.started).Round(time.Hour).String())
		case "token_id":
			r.tokenID = a.Value.String()
			return slog.Attr{}
		}
		return a
	}}))
	service := r.startController(t, controller.Options{Log: log, Metrics: r.metrics, Self: r.events})
	go service.WatchToken(t.Context(), r.client)
	return r
}

func (r *bubbleRig) makeToken(t *testing.T, fields map[string]any) string {
	t.Helper()
	body, err := json.Marshal(fields)
	coretest.Must(t, err)
	recorder := httptest.NewRecorder()
	r.rack.Control().ServeHTTP(recorder, httptest.NewRequest(http.MethodPost, "/v0/tokens", bytes.NewReader(body)))
	var made struct{ Token string }
	if err := json.Unmarshal(recorder.Body.Bytes(), &made); err != nil || made.Token == "" {
		t.Fatalf("%d %s, error %v", recorder.Code, recorder.Body, err)
	}
	return made.Token
}

func (r *tokenRig) samples(t *testing.T) metricstest.Samples {
	synctest.Wait()
	return metricstest.Read(t, metricstest.Page(r.metrics)).Matching("oxide_csi_rack_token")
}

func (r *tokenRig) wantLog(t *testing.T, want ...string) {
	t.Helper()
	synctest.Wait()
	if diff := cmp.Diff(want, strings.Split(strings.TrimSpace(r.log.String()), "\n")); diff != "" {
		t.Errorf("log (-want +got):\n%s", diff)
	}
	if strings.Contains(r.log.String(), "oxide-token-") {
		t.Errorf("a token in the log: %s", r.log)
	}
}

// warning is a line of the log.
func warning(after time.Duration, expires time.Time, tokens int) string {
	message := "the token of the rack expires soon: replace it"
	if tokens > 1 {
		message = "a token of the rack's user expires soon, and the rack does not tell whether the plugin uses this one: " +
			"see which one it uses; a user with one token makes this certain"
	}
	return fmt.Sprintf("after=%s level=WARN msg=%q rack=default expires=%s tokens=%d",
		after, message, expires.Format("2006-01-02T15:04:05.000Z07:00"), tokens)
}

// A user's only token is the controller's: a warning a week and a day before its expiry, and no other.
func TestOnlyTokenExpires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := watchToken(t, 10*day+time.Minute)
		time.Sleep(2 * time.Minute)
		expires := r.started.Add(10*day + time.Minute).UTC()
		coretest.WantSame(t, r.samples(t), metricstest.Samples{
			`oxide_csi_rack_tokens{rack="default"}`:                          1,
			`oxide_csi_rack_token_created_timestamp_seconds{rack="default"}`: float64(r.started.Unix()),
			`oxide_csi_rack_token_expiry_timestamp_seconds{rack="default"}`:  float64(expires.Unix()),
		})
		time.Sleep(10*day - time.Hour)
		r.wantLog(t, warning(3*day, expires, 1), warning(9*day, expires, 1))
		// One text, so that it is one event, at each of the looks of the last week.
		coretest.WantSame(t, r.events.counts, map[string]int{
			"TokenExpires: rack default, token ID " + r.tokenID + ", expiry " + expires.Format(time.RFC3339) +
				": the token of the rack expires soon: replace it": 7 * 24,
		})
	})
}

// An event that cannot be published is logged, and everything else goes on.
func TestTokenEventFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := watchTokenWith(t, &selfEvents{fail: errors.New("no right")}, day+time.Minute)
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		if got := r.log.String(); !strings.Contains(got, `could not publish that a token expires`) ||
			!strings.Contains(got, "the token of the rack expires soon") {
			t.Errorf("log:\n%s", got)
		}
		if len(r.samples(t)) != 3 {
			t.Errorf("samples %v", r.samples(t))
		}
	})
}

// With several tokens nothing is said about the controller's own.
func TestOneOfSeveralTokensExpires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := watchToken(t, 9*day+time.Minute, 0, 2*day)
		time.Sleep(2 * time.Minute)
		first, second := r.started.Add(2*day).UTC(), r.started.Add(9*day+time.Minute).UTC()
		coretest.WantSame(t, r.samples(t), metricstest.Samples{
			`oxide_csi_rack_tokens{rack="default"}`:                          3,
			`oxide_csi_rack_token_created_timestamp_seconds{rack="default"}`: float64(r.started.Unix()),
			`oxide_csi_rack_token_expiry_timestamp_seconds{rack="default"}`:  float64(first.Unix()),
		})
		time.Sleep(2*day + time.Hour)
		r.wantLog(t, warning(0, first, 3), warning(day, first, 3), warning(2*day, second, 2))
	})
}

// A token that never expires is no news. Nor is a rack without the list, after it was said once.
func TestNoExpiryIsKnown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := watchToken(t, 0)
		time.Sleep(2 * time.Hour)
		coretest.WantSame(t, r.samples(t), metricstest.Samples{
			`oxide_csi_rack_tokens{rack="default"}`:                          1,
			`oxide_csi_rack_token_created_timestamp_seconds{rack="default"}`: float64(r.started.Unix()),
		})
		r.wantLog(t, "")
	})
	synctest.Test(t, func(t *testing.T) {
		r := watchToken(t, 0)
		r.inject(t, simtest.Fault{
			Operation: "current_user_access_token_list", Kind: simtest.FaultStatus, Status: 404, Message: "Not Found",
			Count: new(int), // for ever
		})
		time.Sleep(10 * time.Hour)
		synctest.Wait()
		if got := strings.Count(r.log.String(), "cannot read when the token of the rack expires"); got != 1 {
			t.Errorf("said %d times:\n%s", got, r.log)
		}
	})
}
