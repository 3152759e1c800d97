package restart

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// lostNode is an orchestrator that knows the node no more.
type lostNode struct{ metadata.RestartAsker }

var errLost = errors.New("no node is this instance")

func (lostNode) Answer(context.Context, string, string) (metadata.RestartAnswer, error) {
	return metadata.RestartAnswer{}, errLost
}
func (lostNode) Forget(context.Context, string, string) error                 { return errLost }
func (lostNode) Report(context.Context, string, metadata.RestartReport) error { return errLost }

// erasing is a rack that deletes records.
type erasing struct {
	Rack
	erased []string
}

func (r *erasing) DeleteRecord(_ context.Context, id string) error {
	r.erased = append(r.erased, id)
	return nil
}

// A node that was deleted while its instance was down does not keep all others from being restarted.
func TestNodeLost(t *testing.T) {
	for _, test := range []struct {
		since  time.Duration
		erased int
	}{{backTimeout / 2, 0}, {2 * backTimeout, 1}} {
		r := &erasing{}
		e := New(r, Options{Shutdown: Guest, Asker: lostNode{}, Log: slog.New(slog.DiscardHandler)})
		w := &work{record: restartRecord{ID: "1", Instance: "i", recordID: "r"}, stage: stageBack, since: time.Now().Add(-test.since)}
		e.works["1"] = w
		err := e.awaitBack(t.Context(), w)
		if over := err == nil; over != (test.erased == 1) || len(r.erased) != test.erased {
			t.Errorf("%s after the start: %v, %d records erased, want %d", test.since, err, len(r.erased), test.erased)
		}
	}
}

// panicking is a rack at which an engine breaks once.
type panicking struct {
	Rack
	calls int
}

func (r *panicking) Records(context.Context) ([]rack.Record, error) {
	r.calls++
	if r.calls == 1 {
		panic("a bug")
	}
	return nil, nil
}

// A panic ends one look at the restarts and not the engine, which may have taken an instance down.
func TestPanic(t *testing.T) {
	r := &panicking{}
	e := New(r, Options{Log: slog.New(slog.DiscardHandler)})
	for range 2 {
		if again := e.tick(t.Context()); again <= 0 {
			t.Errorf("again in %s", again)
		}
	}
	if r.calls != 2 {
		t.Errorf("the rack was asked %d times", r.calls)
	}
}
