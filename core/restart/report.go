package restart

import (
	"context"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// Event is what is counted.
type Event string

const (
	// EventRestarted: an instance that was stopped runs again.
	EventRestarted Event = "restarted"
	// EventRefused: a restart was given up with nothing stopped, or nothing changed.
	EventRefused Event = "refused"
)

func (e *Engine) count(event Event) {
	if e.opts.Count != nil {
		e.opts.Count(event)
	}
}

// tell reports to those who watch the node. That it may fail is not worth more than a line.
func (e *Engine) tell(ctx context.Context, w *work, reason, message string) {
	e.send(ctx, w, metadata.RestartReport{Reason: reason, Message: message})
}

// problem reports what somebody should look at, once, and lets the RPCs that wait for the restart say it.
func (e *Engine) problem(ctx context.Context, w *work, reason, message string) {
	e.hinderAll(w.record.Instance, message)
	if w.told == reason {
		return
	}
	w.told = reason
	e.opts.Log.Error("a restart needs a look", "instance_id", w.record.Instance, "restart_id", w.record.ID, "reason", reason, "problem", message)
	e.send(ctx, w, metadata.RestartReport{Problem: true, Reason: reason, Message: message})
}

func (e *Engine) send(ctx context.Context, w *work, report metadata.RestartReport) {
	if e.opts.Asker == nil {
		return
	}
	if err := e.opts.Asker.Report(ctx, w.record.Instance, report); err != nil {
		e.opts.Log.Warn("a report about a node could not be delivered", "instance_id", w.record.Instance, "error", err.Error())
	}
}
