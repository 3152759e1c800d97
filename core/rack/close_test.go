// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"testing"
	"time"
)

// TestClosedConnectionSendsNothingMore writes more to a rack than the rack reads, and closes the connection. What the
// kernel still held then must not arrive later.
func TestClosedConnectionSendsNothingMore(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	t.Cleanup(func() { must(t, listener.Close()) })
	dial := NewHTTPClient(nil).Transport.(*http.Transport).DialContext
	conn, err := dial(t.Context(), "tcp", listener.Addr().String())
	must(t, err)
	server, err := listener.Accept()
	must(t, err)
	t.Cleanup(func() { must(t, server.Close()) })

	written := 0
	for written == 0 { // on a busy machine the time may be over before the first byte
		must(t, conn.SetWriteDeadline(time.Now().Add(100*time.Millisecond)))
		written, err = conn.Write(make([]byte, 64<<20))
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("the kernel took all %d bytes, so the test proves nothing: %v", written, err)
		}
	}
	must(t, conn.Close())
	read, err := io.Copy(io.Discard, server)
	if err == nil || read >= int64(written) {
		t.Errorf("of %d bytes %d arrived after the connection was closed (%v), want fewer and a reset", written, read, err)
	}
}
