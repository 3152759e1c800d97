#!/usr/bin/env bash
# client-go's event recorders drop what a program reports often, each in its own way.
#
# Version: k8s.io/client-go v0.37.2
# Guess:   40 different events of one object all reach the API server. Of five equal events the last count is 5.
# Seen:    tools/record sends 25 of the 40, and then one in five minutes; nothing is returned or logged. tools/events
#          sends the first of five equal events, then a count of 2, and no other before six minutes are over. 40
#          different events all pass there.
# Why:     Event and Eventf return nothing, so a caller cannot know. The documentation speaks of aggregation, which keeps
#          a count; the limit of 25 per object and the silence of a series stand only in the source.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
cat >go.mod <<'END'
module finding

go 1.26

require (
	k8s.io/api v0.37.2
	k8s.io/client-go v0.37.2
)
END
cat >main.go <<'END'
package main

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/tools/record"
)

var node = &corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: "a"}

func main() {
	old := &oldSink{}
	broadcaster := record.NewBroadcaster(record.WithSleepDuration(time.Millisecond))
	broadcaster.StartRecordingToSink(old)
	recorder := broadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: "finding"})
	for i := range 40 {
		recorder.Event(node, "Warning", fmt.Sprint("Reason", i), fmt.Sprint("message ", i))
		time.Sleep(20 * time.Millisecond)
	}
	time.Sleep(3 * time.Second)
	fmt.Println("record, 40 different:", old.created, "created,", old.patched, "patched")
	for _, different := range []bool{true, false} {
		sink := &sink{}
		broadcaster := events.NewBroadcaster(sink)
		check(broadcaster.StartRecordingToSinkWithContext(context.Background()))
		recorder := broadcaster.NewRecorder(scheme.Scheme, "finding")
		number := 5
		if different {
			number = 40
		}
		for i := range number {
			reason := "Reason"
			if different {
				reason = fmt.Sprint("Reason", i)
			}
			recorder.Eventf(node, nil, "Warning", reason, "Act", "message")
			time.Sleep(20 * time.Millisecond)
		}
		time.Sleep(3 * time.Second)
		fmt.Println("events, different:", different, "reported:", number, "created:", sink.created, "counts sent:", sink.counts)
	}
}

type oldSink struct{ created, patched int }

func (s *oldSink) Create(event *corev1.Event) (*corev1.Event, error) { s.created++; return event, nil }
func (s *oldSink) Update(event *corev1.Event) (*corev1.Event, error) { return event, nil }
func (s *oldSink) Patch(event *corev1.Event, _ []byte) (*corev1.Event, error) {
	s.patched++
	return event, nil
}

type sink struct {
	created int
	counts  []int32
}

func (s *sink) Create(_ context.Context, event *eventsv1.Event) (*eventsv1.Event, error) {
	s.created++
	return event, nil
}
func (s *sink) Update(_ context.Context, event *eventsv1.Event) (*eventsv1.Event, error) { return event, nil }
func (s *sink) Patch(_ context.Context, event *eventsv1.Event, _ []byte) (*eventsv1.Event, error) {
	s.counts = append(s.counts, event.Series.Count)
	return event, nil
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
END
GOFLAGS=-mod=mod go run . >output 2>log || { cat log >&2; exit 1; }
diff - output <<'END' || { echo "changed: see above" >&2; exit 1; }
record, 40 different: 25 created, 0 patched
events, different: true reported: 40 created: 40 counts sent: []
events, different: false reported: 5 created: 1 counts sent: [2]
END
echo "still so: events are dropped"
