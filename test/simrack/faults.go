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
	faultStatus = "status" // refused with a status instead of being done
	faultLost   = "lost"   // done, then the connection is closed without an answer
	faultReset  = "reset"  // not done, the connection is reset
	faultDelay  = "delay"  // done after a while
)

// anyOperation makes a fault concern every operation.
const anyOperation = "*"

// fault is trouble that the control endpoint has ordered for calls of the API.
type fault struct {
	ID        string  `json:"id"`
	Operation string  `json:"operation"`
	Kind      string  `json:"kind"`
	Status    int     `json:"status,omitempty"`
	ErrorCode string  `json:"error_code,omitempty"`
	Message   string  `json:"message,omitempty"`
	DelayMS   float64 `json:"delay_ms"`
	// Skip is how many calls of the operation still go unharmed.
	Skip int `json:"skip"`
	// Count is how many calls the fault hits, 0 for as long as it exists.
	Count       int     `json:"count"`
	Probability float64 `json:"probability"`
	Hits        int     `json:"hits"`
}

// faultRequest is a fault as it is ordered; what is left out has a default.
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

// usual is the code and message that the rack itself gives with a status.
func usual(status int) (code, message string) {
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

// fault fills in the defaults: a status fault is a 503 as the rack gives it, once, for certain.
func (q faultRequest) fault() (*fault, error) {
	f := &fault{
		Operation: q.Operation, Kind: q.Kind, DelayMS: q.DelayMS, Skip: q.Skip,
		Count: valueOr(q.Count, 1), Probability: valueOr(q.Probability, 1),
	}
	known := func(op route) bool { return op.operation == f.Operation }
	switch {
	case f.Operation != anyOperation && !slices.ContainsFunc(routes, known):
		return nil, fmt.Errorf("operation %q is none of this rack's: name an operationId, or * for all", f.Operation)
	case f.Skip < 0, f.Count < 0, f.DelayMS < 0:
		return nil, fmt.Errorf("skip, count and delay_ms cannot be negative")
	case f.Probability < 0 || f.Probability > 1:
		return nil, fmt.Errorf("probability %v is not between 0 and 1", f.Probability)
	}
	switch f.Kind {
	case faultLost, faultReset, faultDelay:
	case faultStatus:
		f.Status = valueOr(q.Status, 503)
		if f.Status < 400 || f.Status > 599 {
			return nil, fmt.Errorf("status %d is no refusal: 400 to 599", f.Status)
		}
		code, message := usual(f.Status)
		f.ErrorCode, f.Message = valueOr(q.ErrorCode, code), valueOr(q.Message, message)
	default:
		return nil, fmt.Errorf("kind %q is not known: status, lost, reset or delay", f.Kind)
	}
	return f, nil
}

func (f *fault) delay() time.Duration { return milliseconds(f.DelayMS) }

func (f *fault) refusal() error {
	return &apiError{status: f.Status, code: f.ErrorCode, message: f.Message}
}

// faults are all that were ordered, in that order. One that has hit as often as it should stays, to be counted.
type faults struct {
	mu   sync.Mutex
	last int
	list []*fault
}

// add takes a fault up and returns its ID.
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

// trigger returns the fault that hits a call, or nil. A call is hit by one fault at most, the one ordered first.
func (s *faults) trigger(operation string) *fault {
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
