// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
)

// oneInstance is a rack of which only the state of an instance is asked.
type oneInstance struct {
	Rack
	run string
}

func (r oneInstance) Instance(context.Context, string) (rack.Instance, error) {
	return rack.Instance{RunState: r.run}, nil
}

// What its node plugin has refused says nothing about an instance that somebody stops after that.
func TestRefusedThenStopped(t *testing.T) {
	for run, want := range map[string]int{rack.Running: 0, rack.Stopped: 1} {
		t.Run(run, func(t *testing.T) {
			e := New(oneInstance{run: run}, Options{CoolDown: time.Hour, Log: slog.New(slog.DiscardHandler)})
			e.rest["i"] = refusal{since: time.Now(), reason: "no"}
			able, err := e.able(t.Context(), []candidate{{instance: "i", frees: "d"}}, outlooks{})
			if err != nil || len(able) != want {
				t.Errorf("able: %+v, %v, want %d", able, err, want)
			}
		})
	}
}

// A wish lasts as long as somebody repeats it.
func TestWishEnds(t *testing.T) {
	e := New(nil, Options{Log: slog.New(slog.DiscardHandler)})
	e.want("repeated", "i")
	e.want("not repeated", "i")
	e.wishes["repeated"].repeated = time.Now().Add(-wishLifetime + time.Minute)
	e.wishes["not repeated"].repeated = time.Now().Add(-wishLifetime)
	e.endWishes()
	if len(e.wishes) != 1 || e.wishes["repeated"] == nil {
		t.Errorf("left are %v", sortedKeys(e.wishes))
	}
	if wishLifetime != 10*time.Minute {
		t.Errorf("the docs say 10 minutes, not %s", wishLifetime)
	}
}

// records is a rack of which only the records are asked.
type records struct {
	Rack
	all []rack.Record
}

func (r records) Records(context.Context) ([]rack.Record, error) { return r.all, nil }

// A restart that another process carries out is looked at as often as one's own: how long its instance stays down, should that
// process die, depends on how soon it is missed.
func TestLooksAfterOthers(t *testing.T) {
	theirs := restartRecord{Version: 1, Cluster: "c", ID: "r", Instance: "i", Holder: "another"}
	for name, test := range map[string]struct {
		all  []rack.Record
		want time.Duration
	}{
		"nobody's":  {nil, defaultIdle},
		"another's": {[]rack.Record{{ID: "1", Name: restartName("c", 0, 1), Text: encode(theirs)}}, defaultPoll},
	} {
		t.Run(name, func(t *testing.T) {
			e := New(records{all: test.all}, Options{Cluster: "c", MaxDown: 1, Log: slog.New(slog.DiscardHandler)})
			if got := e.tick(t.Context()); got != test.want {
				t.Errorf("looks again after %s, want %s", got, test.want)
			}
		})
	}
}
