// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main_test

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cosi "sigs.k8s.io/container-object-storage-interface/proto"

	"github.com/oxidecomputer/oxide-csi-plugin/core/buckets"
	"github.com/oxidecomputer/oxide-csi-plugin/test/buckets/buckettest"
)

// TestFailAtEachStep breaks the store at the first, second, third ... request of each RPC, before the request has its
// effect or after it. The RPC must not succeed before its effect is there, and its repetition must complete it: one
// bucket, one user, working keys, and nothing left in the end.
func TestFailAtEachStep(t *testing.T) {
	r := newRig(t, true)
	for _, fault := range []buckettest.Fault{buckettest.Refuse, buckettest.Lose} {
		for step := 0; ; step++ {
			broken := r.lifeWithFault(t, fault, step)
			if !broken {
				if step < 5 {
					t.Errorf("fault %d: only %d requests were broken", fault, step)
				}
				break
			}
		}
	}
	if names := r.bucketNames(t); len(names) > 0 {
		t.Errorf("buckets are left: %v", names)
	}
	if users := r.users(t); strings.Contains(users, "OX") {
		t.Errorf("users are left: %s", users)
	}
}

// lifeWithFault takes a bucket and an access through their lives. In each RPC all requests from a step on fail. It
// reports whether any request failed.
func (r *rig) lifeWithFault(t *testing.T, fault buckettest.Fault, step int) (broken bool) {
	t.Helper()
	ctx := t.Context()
	bucket := fmt.Sprintf("class-%d-%d", fault, step)
	// twice calls an RPC with the fault, and once more without it.
	twice := func(name string, call func() error) {
		t.Helper()
		requests := 0
		r.proxy.SetFault(func(*http.Request) buckettest.Fault {
			requests++
			if requests > step {
				return fault
			}
			return buckettest.Pass
		})
		err := call()
		r.proxy.SetFault(nil)
		if requests > step {
			broken = true
			wantCode(t, err, codes.Unavailable, `"main"`)
		} else if err != nil {
			t.Fatalf("%s without a fault: %v", name, err)
		}
		if err := call(); err != nil {
			t.Fatalf("%s after fault %d at step %d: %v", name, fault, step, err)
		}
	}
	var id string
	twice("create", func() (err error) {
		id, err = r.create(t, bucket, map[string]string{"versioning": "true"})
		return err
	})
	if names := r.bucketNames(t); !slices.Equal(names, []string{bucket}) {
		t.Errorf("the buckets are %v", names)
	}
	var g grant
	twice("grant", func() (err error) {
		g, err = r.grant(t, id, "access", buckets.ReadWrite)
		return err
	})
	if count := strings.Count(r.users(t), `"access":"OX`); count != 1 {
		t.Errorf("there are %d users: %s", count, r.users(t))
	}
	if _, err := get(ctx, g.client, bucket, "absent"); err == nil || !strings.Contains(err.Error(), "NoSuchKey") {
		t.Errorf("the keys do not work: %v", err)
	}
	twice("revoke", func() error { return r.revoke(t, id, g.account) })
	_, err := get(ctx, g.client, bucket, "absent")
	wantRefused(t, "revoked keys", err)
	twice("delete", func() error { return r.remove(t, id) })
	return broken
}

// TestOneLostAnswer checks that the driver itself repeats a request with no answer.
func TestOneLostAnswer(t *testing.T) {
	r := newRig(t, false)
	for _, fault := range []buckettest.Fault{buckettest.Refuse, buckettest.Lose} {
		bucket := fmt.Sprintf("class-%d", fault)
		seen := map[string]bool{}
		r.proxy.SetFault(func(req *http.Request) buckettest.Fault {
			if key := req.Method + req.URL.String(); !seen[key] {
				seen[key] = true
				return fault
			}
			return buckettest.Pass
		})
		id := r.mustCreate(t, bucket, nil)
		g := r.mustGrant(t, id, "access", buckets.ReadWrite)
		must(t, put(t.Context(), g.client, bucket, "x", "text"))
		must(t, r.revoke(t, id, g.account))
		wantCode(t, r.remove(t, id), codes.FailedPrecondition, "not empty")
	}
}

// TestDeadline checks that an RPC ends with its caller's deadline while the store hangs, and that other buckets go on.
func TestDeadline(t *testing.T) {
	r := newRig(t, false)
	hangs := make(chan struct{})
	var once sync.Once
	r.proxy.SetFault(func(req *http.Request) buckettest.Fault {
		if strings.Contains(req.URL.Path, "slow") {
			once.Do(func() { close(hangs) })
			return buckettest.Hang
		}
		return buckettest.Pass
	})
	defer r.proxy.SetFault(nil) // the driver ends when its work has ended
	// Real time: the driver is another process. Before it ends, the request must reach the store, also on a busy machine.
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	slow := make(chan error, 1)
	go func() {
		_, err := r.DriverCreateBucket(ctx, &cosi.DriverCreateBucketRequest{Name: "slow"})
		slow <- err
	}()
	select {
	case <-hangs:
	case err := <-slow:
		t.Fatalf("the bucket's request has not reached the store: %v", err)
	}
	r.mustCreate(t, "class-1", nil)
	if err := <-slow; status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("%v, want DEADLINE_EXCEEDED", err)
	}
}

// TestHungStore checks that a store that hangs does not stop a bucket in another one.
func TestHungStore(t *testing.T) {
	r := newRig(t, false)
	hung := buckettest.Store{
		Name: "hung", Endpoint: r.proxy.Endpoint, AccessKey: r.gateway.AccessKey, SecretKey: r.gateway.SecretKey,
	}
	both := *r
	both.Driver = r.driver(t, "east", r.direct(), hung)
	r.proxy.SetFault(func(*http.Request) buckettest.Fault { return buckettest.Hang })
	defer r.proxy.SetFault(nil)
	// The driver asks the other store for 5 s. A single request to it may take 20 s.
	ctx, cancel := context.WithTimeout(t.Context(), 15*time.Second)
	defer cancel()
	answer, err := both.DriverCreateBucket(ctx, &cosi.DriverCreateBucketRequest{
		Name: "class-1", Parameters: map[string]string{"store": store},
	})
	must(t, err)
	if answer.GetBucketId() != store+"/class-1" {
		t.Errorf("the bucket is %q", answer.GetBucketId())
	}
}

// TestLateWrite checks that a call which its caller gave up does not undo a later one. The store carries out the first
// call's new policy late. If the second call had read the policy before, the late one would lack the second access.
func TestLateWrite(t *testing.T) {
	r := newRig(t, false)
	id := r.mustCreate(t, "class-1", nil)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	r.proxy.SetFault(func(req *http.Request) buckettest.Fault {
		if ctx.Err() == nil && req.Method == http.MethodPut && req.URL.Query().Has("policy") {
			cancel()
			return buckettest.Late
		}
		return buckettest.Pass
	})
	_, err := r.DriverGrantBucketAccess(ctx, &cosi.DriverGrantBucketAccessRequest{
		BucketId: id, Name: "first", AuthenticationType: cosi.AuthenticationType_Key,
	})
	wantCode(t, err, codes.Canceled)
	second := r.mustGrant(t, id, "second", buckets.ReadWrite)
	first := r.mustGrant(t, id, "first", buckets.ReadWrite)
	r.awaitForwarded(t)
	for name, g := range map[string]grant{"first": first, "second": second} {
		if err := put(t.Context(), g.client, "class-1", name, "text"); err != nil {
			t.Errorf("the %s access: %v", name, err)
		}
	}
}

// awaitForwarded waits until the proxy has forwarded its late request.
func (r *rig) awaitForwarded(t *testing.T) {
	t.Helper()
	select {
	case <-r.proxy.Forwarded:
	case <-time.After(30 * time.Second):
		t.Fatal("the proxy has not forwarded the late request")
	}
}

// TestLateWriteOfKilledDriver checks that the last request of a killed driver, which the store carries out late, does
// not undo a call of the next driver.
func TestLateWriteOfKilledDriver(t *testing.T) {
	r := newRig(t, false)
	id := r.mustCreate(t, "class-1", nil)
	late := make(chan struct{})
	var once sync.Once
	r.proxy.SetFault(func(req *http.Request) (fault buckettest.Fault) {
		if req.Method == http.MethodPut && req.URL.Query().Has("policy") {
			once.Do(func() {
				close(late)
				fault = buckettest.Late
			})
		}
		return fault
	})
	first := make(chan error)
	go func() {
		_, err := r.DriverGrantBucketAccess(t.Context(), &cosi.DriverGrantBucketAccessRequest{
			BucketId: id, Name: "first", AuthenticationType: cosi.AuthenticationType_Key,
		})
		first <- err
	}()
	<-late
	must(t, r.Driver.Kill())
	wantCode(t, <-first, codes.Unavailable)
	must(t, r.Driver.Start(t.Context()))
	second := r.mustGrant(t, id, "second", buckets.ReadWrite)
	r.awaitForwarded(t)
	must(t, put(t.Context(), second.client, "class-1", "x", "text"))
}

// TestGatewayKilled checks that a driver goes on with a gateway that was killed and started again, also after the
// driver itself was killed.
func TestGatewayKilled(t *testing.T) {
	r := newRig(t, false)
	id := r.mustCreate(t, "class-1", nil)
	g := r.mustGrant(t, id, "access", buckets.ReadWrite)
	must(t, put(t.Context(), g.client, "class-1", "x", "text"))
	must(t, r.gateway.Kill())
	wantCode(t, r.remove(t, id), codes.Unavailable, `"main"`)
	must(t, r.gateway.Start(t.Context()))
	must(t, r.Driver.Kill())
	must(t, r.Driver.Start(t.Context()))
	if again := r.mustGrant(t, id, "access", buckets.ReadWrite); again.secretKey != g.secretKey {
		t.Error("the keys changed")
	}
	if text, err := get(t.Context(), g.client, "class-1", "x"); err != nil || text != "text" {
		t.Errorf("read %q, %v", text, err)
	}
}

// TestWrongRootKeys checks that the message names the store and the keys to check.
func TestWrongRootKeys(t *testing.T) {
	r := newRig(t, false)
	wrong := r.direct()
	wrong.SecretKey = "another-secret-key"
	r.Driver = r.driver(t, "east", wrong)
	_, err := r.create(t, "class-1", nil)
	wantCode(t, err, codes.FailedPrecondition, `"main"`, "root keys")
}
