// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"sync"
	"time"
)

// readPatience is how long a read waits for an earlier one of the same thing. One that has waited so long goes by itself:
// the connection of the earlier one may be dead.
const readPatience = 2 * time.Second

// reads lets those who ask for the same thing at the same time share one answer. While a read is under way, all that come
// meanwhile wait for it to end, and then share a second one. So nobody gets an answer to a question that was asked before
// their own: what they knew then, a write that ended or another controller's, has gone into what they are told.
//
// A read that is alone, as nearly all are, is passed on as it is.
type reads struct {
	next     http.RoundTripper
	patience time.Duration

	mu sync.Mutex
	// underWay are the reads that have been sent, by URL.
	underWay map[string]*read
}

// read is one request for several callers, of whom the first, its leader, sends it.
type read struct {
	// ended is closed when the read has an answer, an error, or no leader any more.
	ended chan struct{}
	// then is the read that those wait for who came while this one was under way.
	then *read
	// followers is how many wait for this one beside its leader. It is settled when the read is sent.
	followers int

	// What follows is written before ended is closed, and read after it.

	answer *http.Response
	body   []byte
	err    error
}

var _ http.RoundTripper = (*reads)(nil)

func newReads(next http.RoundTripper) *reads {
	return &reads{next: next, patience: readPatience, underWay: map[string]*read{}}
}

func (r *reads) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.Method != http.MethodGet {
		return r.next.RoundTrip(req)
	}
	key := req.URL.String()
	var patience <-chan time.Time
	for {
		mine, before, leads := r.join(key)
		if before == nil {
			return r.lead(key, mine, req)
		}
		if patience == nil {
			timer := time.NewTimer(r.patience)
			defer timer.Stop()
			patience = timer.C
		}
		// A leader waits for the read before its own, everybody else for that of their leader.
		waitFor := mine
		if leads {
			waitFor = before
		}
		select {
		case <-waitFor.ended:
		case <-patience:
			r.leave(key, mine, before, leads)
			return r.next.RoundTrip(req)
		case <-req.Context().Done():
			r.leave(key, mine, before, leads)
			return nil, req.Context().Err()
		}
		switch {
		case leads:
			return r.lead(key, mine, req)
		case mine.err == errLeaderless:
		case mine.err != nil:
			return nil, mine.err
		default:
			return mine.copyFor(req), nil
		}
	}
}

// join finds the read to wait for: mine, and the one before it that is under way. Without one, mine can be sent at once.
func (r *reads) join(key string) (mine, before *read, leads bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	before = r.underWay[key]
	if before == nil {
		mine = &read{ended: make(chan struct{})}
		r.underWay[key] = mine
		return mine, nil, true
	}
	if before.then == nil {
		before.then = &read{ended: make(chan struct{})}
		return before.then, before, true
	}
	before.then.followers++
	return before.then, before, false
}

// lead sends the read, which is under way then, and tells its followers what came of it.
func (r *reads) lead(key string, mine *read, req *http.Request) (*http.Response, error) {
	mine.err = errLeaderless // for a panic
	defer r.end(key, mine)
	resp, err := r.next.RoundTrip(req)
	if mine.followers == 0 {
		return resp, err
	}
	if err == nil {
		mine.answer = resp
		mine.body, err = io.ReadAll(resp.Body)
		err = errors.Join(err, resp.Body.Close())
	}
	if err != nil {
		if req.Context().Err() == nil {
			mine.err = err
		}
		return nil, err
	}
	mine.err = nil
	return mine.copyFor(req), nil
}

// leave is for a caller who waits no longer. A leader leaves its followers without one.
func (r *reads) leave(key string, mine, before *read, leads bool) {
	if !leads {
		return
	}
	r.mu.Lock()
	if before.then == mine {
		before.then = nil
	}
	r.mu.Unlock()
	mine.err = errLeaderless
	r.end(key, mine)
}

// end wakes those who wait for a read. The next one, if somebody waits for it, is under way from then on.
func (r *reads) end(key string, mine *read) {
	r.mu.Lock()
	if r.underWay[key] == mine {
		if mine.then != nil {
			r.underWay[key] = mine.then
		} else {
			delete(r.underWay, key)
		}
	}
	r.mu.Unlock()
	close(mine.ended)
}

// copyFor is the answer as if it had been given to req alone.
func (r *read) copyFor(req *http.Request) *http.Response {
	copied := *r.answer
	copied.Header = r.answer.Header.Clone()
	copied.Body = io.NopCloser(bytes.NewReader(r.body))
	copied.Request = req
	return &copied
}
