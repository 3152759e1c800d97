// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import "testing"

// The texts of Go's errors lose what differs from one connection to the next, and nothing else.
func TestWithoutVarying(t *testing.T) {
	for text, want := range map[string]string{
		"read tcp 10.0.0.5:40010->10.0.0.1:443: read: connection reset by peer":  "read tcp 10.0.0.1:443: read: connection reset by peer",
		"write tcp [fd00::5]:40010->[fd00::1]:443: write: broken pipe":           "write tcp [fd00::1]:443: write: broken pipe",
		"dial tcp 10.0.0.1:443: connect: connection refused":                     "dial tcp 10.0.0.1:443: connect: connection refused",
		"lookup rack on 10.0.0.53:53: read udp 10.0.0.5:4711->10.0.0.53:53: i/o": "lookup rack on 10.0.0.53:53: read udp 10.0.0.53:53: i/o",
		"http2: server sent GOAWAY and closed the connection; LastStreamID=57, ErrCode=NO_ERROR, debug=\"\"": "http2: server sent GOAWAY " +
			"and closed the connection; ErrCode=NO_ERROR, debug=\"\"",
		"stream error: stream ID 57; INTERNAL_ERROR": "stream error: INTERNAL_ERROR",
		"x509: certificate has expired or is not yet valid: current time 2026-11-28T11:20:00Z is after 2026-11-01T00:00:00Z": "x509: " +
			"certificate has expired or is not yet valid: the current time is after 2026-11-01T00:00:00Z",
	} {
		if got := withoutVarying(text); got != want {
			t.Errorf("%q becomes %q, want %q", text, got, want)
		}
	}
}
