// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package kubernetes

import (
	"sync"
	"time"
)

// keep is the client with a line to the API server.
func (c client) keep() client {
	c.line = &line{}
	return c
}

// line is a connection to the API server that is kept: a node asks every few seconds, and to connect anew each time would cost
// both sides more than the question. One that is not used is closed after a while.
type line struct {
	mu sync.Mutex
	a  access
	// until is when the credentials are read anew, which are short-lived.
	until time.Time
}

// lineTime is for how long a line is kept.
const lineTime = 5 * time.Minute

// open is the line as it is, or a new one.
func (l *line) open(c client) (access, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.a.kept != nil && time.Now().Before(l.until) {
		return l.a, nil
	}
	l.close()
	a, err := c.access()
	if err != nil {
		return access{}, err
	}
	if a.kept, err = a.http(true); err != nil {
		return access{}, a.unusable(err)
	}
	l.a, l.until = a, time.Now().Add(lineTime)
	return a, nil
}

// drop gives the line up, so that the next question opens a new one.
func (l *line) drop() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.close()
}

func (l *line) close() {
	if l.a.kept != nil {
		l.a.kept.CloseIdleConnections()
		l.a = access{}
	}
}
