// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"path"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// slowRack serves 20 calls per second, one after the other. It counts the calls.
type slowRack struct {
	turn chan struct{}

	mu                sync.Mutex
	underWay, highest int
	served            []string
}

const servedPerSecond = 20

func (s *slowRack) RoundTrip(req *http.Request) (*http.Response, error) {
	body := `{"error_code":"","message":"server does not support this API version: x"}`
	if strings.HasSuffix(req.URL.Path, "/ping") {
		if req.Header.Get("Api-Version") == futureVersion {
			return response(req, http.StatusBadRequest, body), nil
		}
		return response(req, http.StatusOK, `{"status":"ok"}`), nil
	}
	s.mu.Lock()
	s.underWay++
	s.highest = max(s.highest, s.underWay)
	s.mu.Unlock()
	s.turn <- struct{}{}
	time.Sleep(time.Second / servedPerSecond)
	<-s.turn
	s.mu.Lock()
	defer s.mu.Unlock()
	s.underWay--
	id := path.Base(req.URL.Path)
	s.served = append(s.served, id)
	return response(req, http.StatusOK, fmt.Sprintf(`{"id":%q,"state":{"state":"detached"}}`, id)), nil
}

func response(req *http.Request, status int, body string) *http.Response {
	return &http.Response{
		StatusCode: status, Header: http.Header{}, Request: req, Body: io.NopCloser(strings.NewReader(body)),
	}
}

func newSlowClient(t *testing.T) (*Client, *slowRack) {
	t.Helper()
	rack := &slowRack{turn: make(chan struct{}, 1)}
	client, err := New(Config{
		Name: "east", Host: "http://rack", Project: testProject, Token: FixedToken(testToken),
		HTTPClient: &http.Client{Transport: rack},
	})
	must(t, err)
	_, err = client.Disk(t.Context(), slowDisk(999)) // negotiates the API version
	must(t, err)
	rack.served = nil
	return client, rack
}

func slowDisk(n int) string { return fmt.Sprintf("00000000-0000-4000-8000-%012d", n) }

// Five hundred calls at once all end, in the order in which they came, with a bounded number under way.
func TestOverloadEndsInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const calls = 500
		client, rack := newSlowClient(t)
		results := make(chan error, calls)
		var want []string
		for n := range calls {
			want = append(want, slowDisk(n))
			go func() {
				_, err := client.Disk(t.Context(), slowDisk(n))
				results <- err
			}()
			synctest.Wait()
		}
		places := leastCalls - urgentCalls
		if underWay, waiting := client.Calls(); underWay != places || waiting != calls-places {
			t.Errorf("%d calls are under way and %d wait, want %d and %d", underWay, waiting, places, calls-places)
		}
		for range calls {
			must(t, <-results)
		}
		if underWay, waiting := client.Calls(); underWay != 0 || waiting != 0 {
			t.Errorf("at the end %d calls are under way and %d wait", underWay, waiting)
		}
		if rack.highest > leastCalls {
			t.Errorf("%d calls were under way, want at most %d", rack.highest, leastCalls)
		}
		if !slices.Equal(rack.served, want) {
			t.Errorf("the calls were served in another order than they came: %v", rack.served)
		}
	})
}

// A call that waits longer than its caller is not sent, and its place goes to the next call.
func TestOverloadKeepsDeadlines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const calls, deadline = 500, 10 * time.Second
		client, rack := newSlowClient(t)
		start := time.Now()
		results := make(chan error, calls)
		for n := range calls {
			go func() {
				ctx, cancel := context.WithTimeout(t.Context(), deadline)
				defer cancel()
				_, err := client.Disk(ctx, slowDisk(n))
				results <- err
			}()
		}
		failed := 0
		for range calls {
			if err := <-results; err != nil {
				failed++
			}
		}
		if took := time.Since(start); took > deadline+leastCalls*time.Second/servedPerSecond {
			t.Errorf("the last call ended after %s", took)
		}
		// This rack also serves the calls whose caller left while they were under way.
		if most := int(
			deadline.Seconds(),
		)*servedPerSecond + leastCalls; len(rack.served) > most ||
			failed > calls-most+leastCalls {
			t.Errorf("the rack served %d calls, want at most %d; %d calls failed", len(rack.served), most, failed)
		}
		_, err := client.Disk(t.Context(), slowDisk(calls))
		must(t, err)
	})
}

// A call whose turn comes at the moment in which its caller leaves gives its place to the next call.
func TestOverloadLosesNoPlace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hold := time.Second
		held := newLimiter(roundTripper(func(req *http.Request) (*http.Response, error) {
			time.Sleep(hold)
			return response(req, http.StatusOK, ""), nil
		}))
		for range 100 {
			var calls sync.WaitGroup
			for range 2 * (leastCalls - urgentCalls) { // a half of them waits until its deadline
				calls.Go(func() {
					ctx, cancel := context.WithTimeout(t.Context(), hold)
					defer cancel()
					if resp, err := held.RoundTrip(newRequest(t, ctx)); err == nil {
						must(t, resp.Body.Close())
					}
				})
			}
			calls.Wait()
		}
		if held.underWay != 0 || len(held.waiting) != 0 {
			t.Errorf("%d calls are under way and %d wait, want none", held.underWay, len(held.waiting))
		}
	})
}

// A rack that answers 503 to everything gets a tenth more calls, not three times as many.
func TestRepetitionsHaveABudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const calls = 2000
		rack := &unavailable{}
		repeats := &retrier{next: rack}
		for range calls {
			resp, err := repeats.RoundTrip(newRequest(t, t.Context()))
			must(t, err)
			must(t, resp.Body.Close())
		}
		if most := calls + calls/10 + repetitionBurst; rack.requests > most || rack.requests < calls+calls/10 {
			t.Errorf("%d requests for %d calls, want at most %d", rack.requests, calls, most)
		}
	})
}

// A rack that answers quickly gets more calls at once, up to a limit.
func TestQuickRackGetsMoreCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		underWay, highest := 0, 0
		add := func(n int) {
			mu.Lock()
			defer mu.Unlock()
			underWay += n
			highest = max(highest, underWay)
		}
		quick := newLimiter(roundTripper(func(req *http.Request) (*http.Response, error) {
			add(1)
			defer add(-1)
			time.Sleep(slowAnswer / 10)
			return response(req, http.StatusOK, "{}"), nil
		}))
		var callers sync.WaitGroup
		for range 4 * maxCalls {
			callers.Go(func() {
				resp, err := quick.RoundTrip(newRequest(t, t.Context()))
				must(t, err)
				must(t, resp.Body.Close())
			})
		}
		callers.Wait()
		if highest != maxCalls-urgentCalls {
			t.Errorf("%d calls were under way, want %d", highest, maxCalls-urgentCalls)
		}
	})
}

// Callers that repeat their calls for ever keep the queue full. The calls that bring an instance back still get
// through: a tick of the restart engine has 15 s for a few calls.
func TestOverloadDoesNotKeepAnInstanceDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client, _ := newSlowClient(t)
		overload, stop := context.WithTimeout(t.Context(), 5*time.Minute)
		defer stop()
		var callers sync.WaitGroup
		for n := range 600 {
			callers.Go(func() {
				for overload.Err() == nil {
					ctx, cancel := context.WithTimeout(overload, rpcDeadline)
					_, _ = client.Disk(ctx, slowDisk(n)) // many fail, as intended
					cancel()
				}
			})
		}
		time.Sleep(time.Minute)
		done := 0
		for tick := range 10 {
			ctx, cancel := context.WithTimeout(Urgent(t.Context()), 15*time.Second)
			failed := false
			for call := range 3 {
				if _, err := client.Disk(ctx, slowDisk(1000+10*tick+call)); err != nil {
					failed = true
					break
				}
			}
			cancel()
			if !failed {
				done++
			}
		}
		stop()
		callers.Wait()
		if done != 10 {
			t.Errorf("%d of 10 ticks ended in time", done)
		}
	})
}
