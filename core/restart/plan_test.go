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

// oneInstance is a rack that only knows the run state of an instance.
type oneInstance struct {
	Rack
	run string
}

func (r oneInstance) Instance(context.Context, string) (rack.Instance, error) {
	return rack.Instance{RunState: r.run}, nil
}

// A refusal by the node plugin does not matter once the owner has stopped the instance.
func TestStoppedInstanceIsEligibleDespiteRefusal(t *testing.T) {
	for run, want := range map[string]int{rack.Running: 0, rack.Stopped: 1} {
		t.Run(run, func(t *testing.T) {
			e := New(oneInstance{run: run}, Options{CoolDown: time.Hour, Log: slog.New(slog.DiscardHandler)})
			e.refusals["i"] = refusal{since: time.Now(), reason: "no"}
			eligible, err := e.eligible(t.Context(), []candidate{{instance: "i", freesDisk: "d"}}, restartStatuses{})
			if err != nil || len(eligible) != want {
				t.Errorf("eligible: %+v, %v, want %d", eligible, err, want)
			}
		})
	}
}

// An attach request lasts as long as it is repeated.
func TestUnrepeatedAttachRequestExpires(t *testing.T) {
	e := New(nil, Options{Log: slog.New(slog.DiscardHandler)})
	e.addRequest("repeated", "i")
	e.addRequest("not repeated", "i")
	e.requests["repeated"].repeatedAt = time.Now().Add(-requestLifetime + time.Minute)
	e.requests["not repeated"].repeatedAt = time.Now().Add(-requestLifetime)
	e.expireRequests()
	if len(e.requests) != 1 || e.requests["repeated"] == nil {
		t.Errorf("left: %v", sortedKeys(e.requests))
	}
	if requestLifetime != 10*time.Minute {
		t.Errorf("the docs say 10 minutes, not %s", requestLifetime)
	}
}
