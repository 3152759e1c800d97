#!/usr/bin/env bash
# A candidate of client-go's leader election waits up to 2.2 times its retry period between two attempts.
#
# Version: k8s.io/client-go v0.37.2
# Guess:   a candidate tries every RetryPeriod, so a lease that ended is taken after at most that time. If the period is
#          varied, then around its value.
# Seen:    the pauses are between 1 and 2.2 times the period, 1.6 times on average, and never shorter than it.
# Why:     the field's comment calls it the time that clients wait between tries. JitterFactor is 1.2, and a jitter is
#          only ever added. So a new leader is there up to LeaseDuration + 2.2 x RetryPeriod after the old one's last
#          renewal: with 150 s and 60 s that is 282 s, and not 210 s.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
cat >go.mod <<'END'
module finding

go 1.26

require (
	k8s.io/apimachinery v0.37.2
	k8s.io/client-go v0.37.2
)
END
cat >main.go <<'END'
package main

import (
	"context"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
)

const period = 50 * time.Millisecond

// held is a lock that another candidate renews all the time. It notes when somebody looks.
type held struct{ looks []time.Time }

func (h *held) Get(context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	h.looks = append(h.looks, time.Now())
	record := resourcelock.LeaderElectionRecord{
		HolderIdentity: "other", LeaseDurationSeconds: 3600, RenewTime: metav1.Now(),
	}
	return &record, []byte(fmt.Sprint(len(h.looks))), nil
}
func (*held) Create(context.Context, resourcelock.LeaderElectionRecord) error { panic("not reached") }
func (*held) Update(context.Context, resourcelock.LeaderElectionRecord) error { panic("not reached") }
func (*held) RecordEvent(string)                                             {}
func (*held) Identity() string                                               { return "me" }
func (*held) Describe() string                                               { return "lock" }

func main() {
	lock := &held{}
	ctx, cancel := context.WithTimeout(context.Background(), 16*time.Second)
	defer cancel()
	elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock: lock, LeaseDuration: 4 * period, RenewDeadline: 3 * period, RetryPeriod: period,
		Callbacks: leaderelection.LeaderCallbacks{OnStartedLeading: func(context.Context) {}, OnStoppedLeading: func() {}},
	})
	if err != nil {
		panic(err)
	}
	elector.Run(ctx)
	var sum time.Duration
	shortest := time.Hour
	for i := range len(lock.looks) - 1 {
		pause := lock.looks[i+1].Sub(lock.looks[i])
		sum, shortest = sum+pause, min(shortest, pause)
	}
	mean := float64(sum) / float64(period) / float64(len(lock.looks)-1)
	fmt.Println("never shorter than the period:", shortest >= period*9/10)
	fmt.Println("half as long again on average:", mean > 1.4)
	println(len(lock.looks), "looks, mean", int(mean*100), "% of the period")
}
END
GOFLAGS=-mod=mod go run . >output 2>log || { cat log >&2; exit 1; }
tail -1 log
diff - output <<'END' || { echo "changed: see above" >&2; exit 1; }
never shorter than the period: true
half as long again on average: true
END
echo "still so: the retry period is the shortest pause"
