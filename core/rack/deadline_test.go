// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// silent is a rack that accepts requests and never answers.
type silent struct{}

func (silent) RoundTrip(req *http.Request) (*http.Response, error) {
	<-req.Context().Done()
	return nil, req.Context().Err()
}

// A change is waited for longer than its caller waits, but not for ever. A read ends with its caller.
func TestChangesOutliveTheirCaller(t *testing.T) {
	for _, test := range []struct {
		method string
		want   time.Duration
	}{
		{http.MethodGet, time.Second},
		{http.MethodPost, time.Second + changeGrace},
		{http.MethodDelete, time.Second + changeGrace},
	} {
		t.Run(test.method, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				req, err := http.NewRequestWithContext(ctx, test.method, "http://rack/v1/disks", strings.NewReader("{}"))
				if err != nil {
					t.Fatal(err)
				}
				start := time.Now()
				_, err = (&changeWaiter{next: silent{}}).RoundTrip(req)
				if took := time.Since(start); !errors.Is(err, context.DeadlineExceeded) || took != test.want {
					t.Errorf("%v after %s, want the end of the wait after %s", err, took, test.want)
				}
			})
		})
	}
}
