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
func TestStoppedInstanceIsEligibleDespiteRefusal(t *testing.T) {
	for run, want := range map[string]int{rack.Running: 0, rack.Stopped: 1} {
		t.Run(run, func(t *testing.T) {
			e := New(oneInstance{run: run}, Options{CoolDown: time.Hour, Log: slog.New(slog.DiscardHandler)})
			e.refusals["i"] = refusal{since: time.Now(), reason: "no"}
			able, err := e.eligible(t.Context(), []candidate{{instance: "i", freesDisk: "d"}}, restartStatuses{})
			if err != nil || len(able) != want {
				t.Errorf("able: %+v, %v, want %d", able, err, want)
			}
		})
	}
}

// A wish lasts as long as somebody repeats it.
func TestUnrepeatedAttachRequestExpires(t *testing.T) {
	e := New(nil, Options{Log: slog.New(slog.DiscardHandler)})
	e.addRequest("repeated", "i")
	e.addRequest("not repeated", "i")
	e.requests["repeated"].repeatedAt = time.Now().Add(-requestLifetime + time.Minute)
	e.requests["not repeated"].repeatedAt = time.Now().Add(-requestLifetime)
	e.expireRequests()
	if len(e.requests) != 1 || e.requests["repeated"] == nil {
		t.Errorf("left are %v", sortedKeys(e.requests))
	}
	if requestLifetime != 10*time.Minute {
		t.Errorf("the docs say 10 minutes, not %s", requestLifetime)
	}
}

// records is a rack of which only the records are asked.
type records struct {
	Rack
	all []rack.Record
}

func (r records) Records(context.Context) ([]rack.Record, error) { return r.all, nil }

// A restart that another process carries out is looked at as often as one's own: how long its instance stays down,
// should that process die, depends on how soon it is missed.
func TestAnotherControllersRestartIsPolledOften(t *testing.T) {
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
			if got := e.runOnce(t.Context()); got != test.want {
				t.Errorf("looks again after %s, want %s", got, test.want)
			}
		})
	}
}
