// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptrace"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// silent is a rack that never answers. It accepts connections unless unreachable is set.
type silent struct{ unreachable bool }

func (s silent) RoundTrip(req *http.Request) (*http.Response, error) {
	if trace := httptrace.ContextClientTrace(req.Context()); trace != nil && !s.unreachable {
		trace.GotConn(httptrace.GotConnInfo{})
	}
	<-req.Context().Done()
	return nil, req.Context().Err()
}

// A change is waited for longer than its caller waits, but not for ever. A read ends with its caller, and so does a
// change that was never sent. After a lost answer a change waits in addition, unless it is a deletion.
func TestChangesOutliveTheirCaller(t *testing.T) {
	const disks, instance = "http://rack/v1/disks", "http://rack/v1/instances/i"
	for _, test := range []struct {
		name, method, url string
		unreachable       bool
		want              time.Duration
	}{
		{"a read", http.MethodGet, disks, false, time.Second},
		{"a create", http.MethodPost, disks, false, time.Second + changeGrace + lostAnswerWait},
		{"a delete", http.MethodDelete, disks + "/d", false, time.Second + changeGrace},
		{"an attach", http.MethodPost, instance + "/disks/attach", false, time.Second + changeGrace + lostAnswerWait},
		{"a detach", http.MethodPost, instance + "/disks/detach", false, time.Second + changeGrace + lostAnswerWait},
		{"an update", http.MethodPut, "http://rack/v1/anti-affinity-groups/g", false, time.Second + changeGrace + lostAnswerWait},
		{"a create that is not sent", http.MethodPost, disks, true, time.Second},
		{"an attach that is not sent", http.MethodPost, instance + "/disks/attach", true, time.Second},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				req, err := http.NewRequestWithContext(ctx, test.method, test.url, strings.NewReader("{}"))
				if err != nil {
					t.Fatal(err)
				}
				start := time.Now()
				_, err = (&changeWaiter{next: silent{test.unreachable}, lostAnswerWait: lostAnswerWait}).RoundTrip(req)
				ended := errors.Is(err, context.DeadlineExceeded) || test.unreachable && errors.Is(err, context.Canceled)
				if took := time.Since(start); !ended || took != test.want {
					t.Errorf("%v after %s, want the end of the wait after %s", err, took, test.want)
				}
			})
		})
	}
}
