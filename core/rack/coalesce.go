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

// coalesceMaxWait is how long a read waits for an earlier read of the same URL. After that it is sent by itself: the
// connection of the earlier read may be dead.
const coalesceMaxWait = 2 * time.Second

// readCoalescer lets concurrent reads of one URL share an answer. Reads that begin while one is under way wait for its
// end, and then share a second read. So no caller gets an answer that is older than its question: the answer reflects
// every change that had ended when the caller asked, also those of other controllers.
//
// A read without company, by far the most frequent case, is passed on unchanged.
type readCoalescer struct {
	next    http.RoundTripper
	maxWait time.Duration

	mu sync.Mutex
	// underWay are the reads that have been sent, by URL.
	underWay map[string]*sharedRead
}

// sharedRead is one request for several callers. The first caller, its leader, sends it.
type sharedRead struct {
	// done is closed when the read has an answer or an error, or has lost its leader.
	done chan struct{}
	// next is the read for callers that came while this read was under way.
	next *sharedRead
	// followers is how many callers share this read beside its leader. It no longer changes when the read is sent.
	followers int

	// The following fields are written before done is closed, and read afterwards.

	answer *http.Response
	body   []byte
	err    error
}

var _ http.RoundTripper = (*readCoalescer)(nil)

func newReadCoalescer(next http.RoundTripper) *readCoalescer {
	return &readCoalescer{next: next, maxWait: coalesceMaxWait, underWay: map[string]*sharedRead{}}
}

func (r *readCoalescer) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.Method != http.MethodGet {
		return r.next.RoundTrip(req)
	}
	key := req.URL.String()
	var timeout <-chan time.Time
	for {
		mine, before, leads := r.join(key)
		if before == nil {
			return r.lead(key, mine, req)
		}
		if timeout == nil {
			timer := time.NewTimer(r.maxWait)
			defer timer.Stop()
			timeout = timer.C
		}
		// A leader waits for the read before its own. A follower waits for its leader's read.
		waitFor := mine
		if leads {
			waitFor = before
		}
		select {
		case <-waitFor.done:
		case <-timeout:
			r.leave(key, mine, before, leads)
			return r.next.RoundTrip(req)
		case <-req.Context().Done():
			r.leave(key, mine, before, leads)
			return nil, req.Context().Err()
		}
		switch {
		case leads:
			return r.lead(key, mine, req)
		case mine.err == errNoLeader:
		case mine.err != nil:
			return nil, mine.err
		default:
			return mine.copyFor(req), nil
		}
	}
}

// join returns the read to take part in, mine, and the read under way before it. If before is nil, mine can be sent at
// once.
func (r *readCoalescer) join(key string) (mine, before *sharedRead, leads bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	before = r.underWay[key]
	if before == nil {
		mine = &sharedRead{done: make(chan struct{})}
		r.underWay[key] = mine
		return mine, nil, true
	}
	if before.next == nil {
		before.next = &sharedRead{done: make(chan struct{})}
		return before.next, before, true
	}
	before.next.followers++
	return before.next, before, false
}

// lead sends the read and passes the result to its followers.
func (r *readCoalescer) lead(key string, mine *sharedRead, req *http.Request) (*http.Response, error) {
	mine.err = errNoLeader // in case of a panic
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

// leave is for a caller that stops waiting. If a leader leaves, its followers start again.
func (r *readCoalescer) leave(key string, mine, before *sharedRead, leads bool) {
	if !leads {
		return
	}
	r.mu.Lock()
	if before.next == mine {
		before.next = nil
	}
	r.mu.Unlock()
	mine.err = errNoLeader
	r.end(key, mine)
}

// end wakes the callers that wait for a read. The next read, if there is one, counts as under way from now on.
func (r *readCoalescer) end(key string, mine *sharedRead) {
	r.mu.Lock()
	if r.underWay[key] == mine {
		if mine.next != nil {
			r.underWay[key] = mine.next
		} else {
			delete(r.underWay, key)
		}
	}
	r.mu.Unlock()
	close(mine.done)
}

// copyFor returns the shared answer as an answer to req alone.
func (r *sharedRead) copyFor(req *http.Request) *http.Response {
	copied := *r.answer
	copied.Header = r.answer.Header.Clone()
	copied.Body = io.NopCloser(bytes.NewReader(r.body))
	copied.Request = req
	return &copied
}
