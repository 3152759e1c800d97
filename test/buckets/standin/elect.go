// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"context"
	"errors"
	"log/slog"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/dynamic"
)

// Times of COSI's leader election. Source: container-object-storage-interface v0.2.2, internal/runtime/controller.go,
// and client-go v0.32.3, tools/leaderelection/leaderelection.go.
const (
	leaseDuration = 150 * time.Second
	retryPeriod   = time.Minute
	// jitter makes each wait up to 1 + jitter times as long.
	jitter = 1.2
	// timeForm is the form of times in a Lease.
	timeForm = "2006-01-02T15:04:05.000000Z"
)

// election is a process that wants the lease. It counts how long the lease of another process is valid from when it has
// seen that lease first. A process with the same identity, that of its pod, does not wait.
type election struct {
	leases         dynamic.ResourceInterface
	name, identity string

	seen  string
	since time.Time
}

// elect runs lead while this process has the lease, until the context ends. Then it releases the lease.
func (e *election) elect(ctx context.Context, lead func(context.Context)) error {
	for {
		if took, err := e.take(ctx, e.identity); err != nil {
			slog.Error(err.Error()) // it is asked for again
		} else if took {
			break
		}
		if err := sleep(ctx, wait.Jitter(retryPeriod, jitter)); err != nil {
			return nil
		}
	}
	leading, stop := context.WithCancel(ctx)
	led := make(chan struct{})
	go func() {
		defer close(led)
		lead(leading)
	}()
	var lost error
	for lost == nil && sleep(ctx, retryPeriod) == nil {
		_, lost = e.take(ctx, e.identity)
	}
	stop()
	<-led
	releasing, cancel := context.WithTimeout(context.WithoutCancel(ctx), retryPeriod)
	defer cancel()
	_, err := e.take(releasing, "")
	return errors.Join(lost, err)
}

func sleep(ctx context.Context, long time.Duration) error {
	select {
	case <-time.After(long):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// take writes a holder into the lease, unless another process has the lease. It reports whether it did. An empty holder
// releases the lease.
func (e *election) take(ctx context.Context, holder string) (bool, error) {
	now := time.Now()
	spec := map[string]any{
		"holderIdentity": holder, "leaseDurationSeconds": int64(leaseDuration.Seconds()),
		"renewTime": now.UTC().Format(timeForm),
	}
	lease, err := e.leases.Get(ctx, e.name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		lease = &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": map[string]any{"name": e.name}, "spec": spec,
		}}
		_, err = e.leases.Create(ctx, lease, metav1.CreateOptions{})
		return err == nil, err
	}
	if err != nil {
		return false, err
	}
	held := (&object{*lease}).text("spec", "holderIdentity")
	if seen := held + (&object{*lease}).text("spec", "renewTime"); seen != e.seen {
		e.seen, e.since = seen, now
	}
	if held != "" && held != e.identity && now.Sub(e.since) < leaseDuration {
		return false, nil
	}
	lease.Object["spec"] = spec
	_, err = e.leases.Update(ctx, lease, metav1.UpdateOptions{})
	return err == nil, err
}
