// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
)

// leaseOf is an API server with one lease, or none.
type leaseOf struct {
	dynamic.ResourceInterface

	mu    sync.Mutex
	lease *unstructured.Unstructured
}

// set keeps a copy of a lease.
func (l *leaseOf) set(lease *unstructured.Unstructured) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lease = lease.DeepCopy()
}

func (l *leaseOf) Get(
	_ context.Context, name string, _ metav1.GetOptions, _ ...string,
) (*unstructured.Unstructured, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.lease == nil {
		return nil, apierrors.NewNotFound(schema.GroupResource{Resource: "leases"}, name)
	}
	return l.lease.DeepCopy(), nil
}

func (l *leaseOf) Create(
	_ context.Context, lease *unstructured.Unstructured, _ metav1.CreateOptions, _ ...string,
) (*unstructured.Unstructured, error) {
	l.set(lease)
	return lease, nil
}

func (l *leaseOf) Update(
	_ context.Context, lease *unstructured.Unstructured, _ metav1.UpdateOptions, _ ...string,
) (*unstructured.Unstructured, error) {
	l.set(lease)
	return lease, nil
}

// What a new driver waits after the loss of another one is on the page. A process that ends in order releases its
// lease, and one in the same pod does not wait.
func TestNextLeader(t *testing.T) {
	longest := leaseDuration + retryPeriod + time.Duration(jitter*float64(retryPeriod))
	page, err := os.ReadFile("../../../docs/explanation/buckets.md")
	if err != nil {
		t.Fatal(err)
	}
	if figure := fmt.Sprintf("%.0f to %.0f s", leaseDuration.Seconds(), longest.Seconds()); !strings.Contains(
		string(page), figure) {
		t.Errorf("the page does not say %s", figure)
	}
	for name, test := range map[string]struct {
		inOrder     bool
		next        string
		least, most time.Duration
	}{
		"killed":                 {false, "pod-2", leaseDuration, longest},
		"killed in the same pod": {false, "pod-1", 0, 0},
		"ended in order":         {true, "pod-2", 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				api := &leaseOf{}
				// run leads for two renewals.
				run := func(identity string) (leads time.Time, held *unstructured.Unstructured) {
					ctx, cancel := context.WithCancel(t.Context())
					defer cancel()
					e := &election{leases: api, name: "cosi", identity: identity}
					if err := e.elect(ctx, func(context.Context) {
						leads = time.Now()
						time.Sleep(2*retryPeriod + time.Second)
						held, _ = api.Get(ctx, "cosi", metav1.GetOptions{})
						cancel()
					}); err != nil {
						t.Error(err)
					}
					return leads, held
				}
				if _, held := run("pod-1"); !test.inOrder {
					api.set(held) // a process that is killed releases nothing
				}
				began := time.Now()
				leads, _ := run(test.next)
				if took := leads.Sub(began); took < test.least || took > test.most {
					t.Errorf("the next one leads after %s, want %s to %s", took, test.least, test.most)
				}
			})
		})
	}
}
