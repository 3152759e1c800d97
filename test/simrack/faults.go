// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"
)

// The kinds of faults.
const (
	faultStatus = "status" // answered with a status, not executed
	faultDone   = "done"   // executed, then answered with a status
	faultLost   = "lost"   // executed, then the connection is closed without an answer
	faultReset  = "reset"  // not executed, the connection is reset
	faultDelay  = "delay"  // executed after a delay
	faultSilent = "silent" // executed, and from now on nothing passes through the connection
)

// anyOperation makes a fault apply to every operation.
const anyOperation = "*"

// fault is a failure of API calls that the control endpoint has ordered.
type fault struct {
	ID        string  `json:"id"`
	Operation string  `json:"operation"`
	Kind      string  `json:"kind"`
	Status    int     `json:"status,omitempty"`
	ErrorCode string  `json:"error_code,omitempty"`
	Message   string  `json:"message,omitempty"`
	DelayMS   float64 `json:"delay_ms"`
	// Skip is the number of calls of the operation that the fault still lets pass.
	Skip int `json:"skip"`
	// Count is the number of calls that the fault hits; 0 means all calls until it is deleted.
	Count       int     `json:"count"`
	Probability float64 `json:"probability"`
	Hits        int     `json:"hits"`
}

// faultRequest is the JSON that orders a fault. Missing fields get defaults.
type faultRequest struct {
	Operation   string   `json:"operation"`
	Kind        string   `json:"kind"`
	Status      *int     `json:"status"`
	ErrorCode   *string  `json:"error_code"`
	Message     *string  `json:"message"`
	DelayMS     float64  `json:"delay_ms"`
	Skip        int      `json:"skip"`
	Count       *int     `json:"count"`
	Probability *float64 `json:"probability"`
}

func valueOr[T any](p *T, fallback T) T {
	if p == nil {
		return fallback
	}
	return *p
}

// defaultError is the code and message of the rack's own errors with a status.
func defaultError(status int) (code, message string) {
	switch status {
	case 401:
		return codeUnauthorized, "credentials missing or invalid"
	case 403:
		return codeForbidden, "Forbidden"
	case 500, 502, 504:
		return codeInternal, messageInternal
	case 503:
		return codeUnavailable, messageUnavailable
	}
	return codeNone, http.StatusText(status)
}

// fault fills in the defaults: a status fault is the rack's 503, once, with probability 1.
func (q faultRequest) fault() (*fault, error) {
	f := &fault{
		Operation: q.Operation, Kind: q.Kind, DelayMS: q.DelayMS, Skip: q.Skip,
		Count: valueOr(q.Count, 1), Probability: valueOr(q.Probability, 1),
	}
	known := func(op route) bool { return op.operation == f.Operation }
	switch {
	case f.Operation != anyOperation && !slices.ContainsFunc(routes, known):
		return nil, fmt.Errorf("operation %q is unknown: give an operation ID, or * for all", f.Operation)
	case f.Skip < 0, f.Count < 0, f.DelayMS < 0:
		return nil, fmt.Errorf("skip, count and delay_ms cannot be negative")
	case f.Probability < 0 || f.Probability > 1:
		return nil, fmt.Errorf("probability %v is not between 0 and 1", f.Probability)
	}
	switch f.Kind {
	case faultLost, faultReset, faultDelay, faultSilent:
	case faultStatus, faultDone:
		f.Status = valueOr(q.Status, 503)
		if f.Status < 400 || f.Status > 599 {
			return nil, fmt.Errorf("status %d is not an error: 400 to 599", f.Status)
		}
		code, message := defaultError(f.Status)
		f.ErrorCode, f.Message = valueOr(q.ErrorCode, code), valueOr(q.Message, message)
	default:
		return nil, fmt.Errorf("kind %q is unknown: status, done, lost, reset, delay or silent", f.Kind)
	}
	return f, nil
}

func (f *fault) delay() time.Duration { return milliseconds(f.DelayMS) }

func (f *fault) apiError() error {
	return &apiError{status: f.Status, code: f.ErrorCode, message: f.Message}
}

// faults are the ordered faults in the order of their creation. An exhausted fault stays, so that its hits can be read.
type faults struct {
	mu   sync.Mutex
	last int
	list []*fault
}

// add adds a fault and returns its ID.
func (s *faults) add(f *fault) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last++
	f.ID = "f" + strconv.Itoa(s.last)
	s.list = append(s.list, f)
	return f.ID
}

func (s *faults) view() []fault {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := make([]fault, 0, len(s.list))
	for _, f := range s.list {
		list = append(list, *f)
	}
	return list
}

func (s *faults) clear() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.list = nil
}

func (s *faults) remove(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := len(s.list)
	s.list = slices.DeleteFunc(s.list, func(f *fault) bool { return f.ID == id })
	return len(s.list) < before
}

// match returns the fault that hits a call, or nil. At most one fault hits a call, the oldest.
func (s *faults) match(operation string) *fault {
	s.mu.Lock()
	defer s.mu.Unlock()
	if operation == "" {
		return nil
	}
	for _, f := range s.list {
		switch {
		case f.Operation != operation && f.Operation != anyOperation:
		case f.Count > 0 && f.Hits >= f.Count:
		case f.Skip > 0:
			f.Skip--
		case f.Probability < 1 && rand.Float64() >= f.Probability:
		default:
			f.Hits++
			hit := *f
			return &hit
		}
	}
	return nil
}
