// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"crypto/x509"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"sync"
	"time"
)

// timestampGrain is more than the coarsest timestamp of a file system in use. A file that was read sooner after its
// last change may change again without a new timestamp.
const timestampGrain = 2 * time.Second

// fileState tells whether a file has changed since it was read. The zero value is that of a file that was not read.
type fileState struct{ info fs.FileInfo }

// look returns the state of the file now, and whether it may differ from s.
func (s fileState) look(path string) (now fileState, changed bool, err error) {
	info, err := os.Stat(path)
	if err != nil {
		return fileState{}, false, err
	}
	if s.info != nil && os.SameFile(s.info, info) && s.info.ModTime().Equal(info.ModTime()) &&
		s.info.Size() == info.Size() {
		return s, false, nil
	}
	if time.Since(info.ModTime()) > timestampGrain {
		now.info = info
	}
	return now, true, nil
}

// NewHTTPClientWithCAs is [NewHTTPClient] with the CAs in a file, which read reads and parses. It reads the file again
// when the file changes, so that a CA can be replaced while the plugin runs. If that fails, the last CAs stay in use,
// and the log says so once.
func NewHTTPClientWithCAs(
	path string,
	read func(path string) (*x509.CertPool, error),
	log *slog.Logger,
) (*http.Client, error) {
	f := &caFile{path: path, read: read, log: log}
	if err := f.refresh(); err != nil {
		return nil, err
	}
	return &http.Client{Transport: f}, nil
}

// caFile sends requests with a transport that trusts the CAs in a file.
type caFile struct {
	path string
	read func(string) (*x509.CertPool, error)
	log  *slog.Logger

	mu      sync.Mutex
	state   fileState
	roots   *x509.CertPool
	current *http.Transport
	// failed says whether the last attempt to read the file failed.
	failed bool
}

var _ http.RoundTripper = (*caFile)(nil)

func (f *caFile) RoundTrip(req *http.Request) (*http.Response, error) {
	return f.transport().RoundTrip(req)
}

// CloseIdleConnections is called by [net/http.Client.CloseIdleConnections].
func (f *caFile) CloseIdleConnections() { f.transport().CloseIdleConnections() }

func (f *caFile) transport() *http.Transport {
	f.mu.Lock()
	defer f.mu.Unlock()
	err := f.refresh()
	if err != nil && !f.failed {
		f.log.Warn("keeping the last CA certificates, because the CA file cannot be used", "error", err)
	}
	f.failed = err != nil
	return f.current
}

// refresh reads the file if it may have changed. Other CAs need new connections.
func (f *caFile) refresh() error {
	now, changed, err := f.state.look(f.path)
	if err != nil || !changed {
		return err
	}
	roots, err := f.read(f.path)
	if err != nil {
		return err
	}
	f.state = now
	if f.current != nil && roots.Equal(f.roots) {
		return nil
	}
	if f.current != nil {
		f.current.CloseIdleConnections()
		f.log.Info("the CA certificates have changed", "file", f.path)
	}
	f.roots, f.current = roots, newHTTPTransport(roots)
	return nil
}
