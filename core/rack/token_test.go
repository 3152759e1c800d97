// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

// fromFile makes the client read its token from a file, and returns the file's name.
func fromFile(t *testing.T, log *logBuffer) (string, func(*Config)) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "token")
	must(t, os.WriteFile(path, []byte(testToken+"\n"), 0o600))
	return path, func(cfg *Config) { cfg.Token = TokenFile(path, slog.New(slog.NewTextHandler(log, nil))) }
}

// No call fails while the token is replaced, in place or by a rename, and the old token is revoked at once.
func TestTokenRotation(t *testing.T) {
	for _, test := range []struct {
		name    string
		replace func(path, token string) error
	}{
		{"in place", func(path, token string) error { return os.WriteFile(path, []byte(token+"\n"), 0o600) }},
		{"by a rename", func(path, token string) error {
			if err := os.WriteFile(path+".new", []byte(token), 0o600); err != nil {
				return err
			}
			return os.Rename(path+".new", path)
		}},
		{"emptied, removed, written", func(path, token string) error {
			if err := os.Truncate(path, 0); err != nil {
				return err
			}
			if err := os.Remove(path); err != nil {
				return err
			}
			return os.WriteFile(path, []byte(token), 0o600)
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			path, read := fromFile(t, &logBuffer{})
			r := newRig(t, simrack.Options{}, read)
			disk := r.create(t, "v")
			var made, calls atomic.Int64
			stop := make(chan struct{})
			var workers sync.WaitGroup
			for worker := range 8 {
				workers.Go(func() {
					for n := 0; ; n++ {
						select {
						case <-stop:
							return
						default:
						}
						if _, err := r.Disk(t.Context(), disk.VolumeID); err != nil {
							t.Errorf("look up: %v", err)
							return
						}
						if n%16 == 0 { // a request with a body, which must be repeated completely
							if _, err := r.CreateDisk(
								t.Context(),
								DiskSpec{Name: fmt.Sprintf("v-%d-%d", worker, n), SizeBytes: gib, BlockSize: 4096},
							); err != nil {
								t.Errorf("create: %v", err)
								return
							}
							made.Add(1)
						}
						calls.Add(1)
					}
				})
			}
			old := testToken
			for range 20 {
				next, err := r.sim.NewToken(t.Context(), "limited-collaborator")
				must(t, err)
				must(t, test.replace(path, next))
				must(t, r.sim.RevokeToken(t.Context(), old))
				want := calls.Load() + 20
				await.Eventually(t, "calls go on", func() bool { return calls.Load() >= want || t.Failed() })
				old = next
			}
			close(stop)
			workers.Wait()
			if made.Load() < 8 {
				t.Errorf("only %d disks were made", made.Load())
			}
		})
	}
}

// A file that changes again within the grain of its timestamps, without a new size, is read again.
func TestTokenFileChangesWithinTimestampGrain(t *testing.T) {
	path := filepath.Join(t.TempDir(), "token")
	now := time.Now()
	read := TokenFile(path, slog.New(slog.DiscardHandler))
	for _, token := range []string{"oxide-token-a", "oxide-token-b", "oxide-token-c"} {
		must(t, os.WriteFile(path, []byte(token), 0o600))
		must(t, os.Chtimes(path, now, now))
		if got, err := read(); err != nil || got != token {
			t.Errorf("%q, %v; want %q", got, err, token)
		}
	}
}

// A file with an old timestamp is read once.
func TestTokenFileIsReadOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "token")
	must(t, os.WriteFile(path, []byte("oxide-token-a"), 0o600))
	long := time.Now().Add(-time.Hour)
	must(t, os.Chtimes(path, long, long))
	f := &tokenFile{path: path, log: slog.New(slog.DiscardHandler)}
	_, err := f.token()
	must(t, err)
	const remembered = "oxide-token-from-memory"
	f.cached = remembered
	if got, err := f.token(); err != nil || got != remembered {
		t.Errorf("%q, %v: the file was read again", got, err)
	}
}

// If the file disappears or becomes empty, the token stays in use, and the log says so once each time.
func TestTokenFileDisappears(t *testing.T) {
	log := &logBuffer{}
	path := filepath.Join(t.TempDir(), "token")
	read := TokenFile(path, slog.New(slog.NewTextHandler(log, nil)))
	if _, err := read(); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("without a file that ever was: %v", err)
	}
	check := func(want string, lines int) {
		t.Helper()
		for range 3 {
			if got, err := read(); err != nil || got != want {
				t.Errorf("%q, %v; want %q", got, err, want)
			}
		}
		if text := log.String(); strings.Count(text, "\n") != lines || strings.Count(text, path) != lines ||
			strings.Contains(text, want) {
			t.Errorf("%d lines expected: %s", lines, text)
		}
	}
	must(t, os.WriteFile(path, []byte("oxide-token-a"), 0o600))
	check("oxide-token-a", 0)
	must(t, os.Truncate(path, 0))
	check("oxide-token-a", 1)
	must(t, os.WriteFile(path, []byte("oxide-token-b"), 0o600))
	check("oxide-token-b", 1)
	must(t, os.Remove(path))
	check("oxide-token-b", 2)
}

// A refused token is not sent again if there is no newer one.
func TestRefusedTokenIsSentOnce(t *testing.T) {
	r := newRig(t, simrack.Options{}, func(cfg *Config) { cfg.Token = FixedToken("oxide-token-wrong") })
	_, err := r.CreateDisk(t.Context(), DiskSpec{Name: "v", SizeBytes: gib, BlockSize: 4096})
	wantSentence(t, err, ErrUnauthenticated, "credentials missing or invalid")
	if n := r.requests()["POST /v1/disks"]; n != 1 {
		t.Errorf("%d requests, want 1", n)
	}
}

// The token is sent only to a server that answers the ping as a rack does.
func TestTokenIsSentOnlyToRacks(t *testing.T) {
	for _, status := range []int{200, 204, 302, 400, 401, 404, 500, 503} {
		r := newRig(t, simrack.Options{})
		r.intercept(func(w http.ResponseWriter, req *http.Request) bool {
			if header := req.Header.Get("Authorization"); header != "" {
				t.Errorf("what answers %d was sent %q", status, header)
			}
			w.Header().Set("Location", "/v1/elsewhere")
			w.WriteHeader(status)
			return true
		})
		if _, err := r.Disk(t.Context(), r.node(t)); err == nil {
			t.Errorf("what answers %d is taken for a rack", status)
		}
	}
}

// Every request carries the token and the program's name. A redirect is not followed.
func TestHeadersAndRedirects(t *testing.T) {
	r := newRig(t, simrack.Options{})
	disk := r.create(t, "v")
	var mu sync.Mutex
	seen := 0
	r.intercept(func(w http.ResponseWriter, req *http.Request) bool {
		mu.Lock()
		defer mu.Unlock()
		seen++
		if req.Header.Get("Authorization") != "Bearer "+testToken || req.Header.Get("User-Agent") != "test/1" {
			t.Errorf("headers %v", req.Header)
		}
		http.Redirect(w, req, "/elsewhere", http.StatusTemporaryRedirect)
		return true
	})
	_, err := r.Disk(t.Context(), disk.VolumeID)
	wantSentence(t, err, ErrUnavailable, "HTTP 307")
	if seen != 1 {
		t.Errorf("%d requests, want 1", seen)
	}
}
