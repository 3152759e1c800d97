// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"sync"
)

// Token returns the credentials for the next request. It must be safe for concurrent use and fast.
type Token func() (string, error)

// FixedToken is a token that never changes.
func FixedToken(token string) Token {
	return func() (string, error) { return token, nil }
}

// TokenFile reads the token from a file, and reads it again when the file changes, so that a token can be replaced
// while the plugin runs. If the file becomes unreadable or empty, the last token stays in use, and the log says so
// once: a file that is replaced in place is empty for a moment, and no call should fail then.
func TokenFile(path string, log *slog.Logger) Token {
	f := &tokenFile{path: path, log: log}
	return f.token
}

type tokenFile struct {
	path string
	log  *slog.Logger

	mu     sync.Mutex
	state  fileState
	cached string
	// failed says whether the last attempt to read the file failed.
	failed bool
}

func (f *tokenFile) token() (string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	err := f.refresh()
	if err != nil && f.cached == "" {
		return "", err
	}
	if err != nil && !f.failed {
		f.log.Warn("keeping the last token, because the token file cannot be read", "error", err)
	}
	f.failed = err != nil
	return f.cached, nil
}

// refresh reads the file if it may have changed.
func (f *tokenFile) refresh() error {
	now, changed, err := f.state.look(f.path)
	if err != nil {
		return fmt.Errorf("token file: %w", err)
	}
	if !changed {
		return nil
	}
	content, err := os.ReadFile(f.path)
	if err != nil {
		return fmt.Errorf("token file: %w", err)
	}
	token := strings.TrimSpace(string(content))
	if token == "" {
		return fmt.Errorf("token file %s is empty", f.path)
	}
	f.state, f.cached = now, token
	return nil
}

// credentials sets the current token on every request. The SDK itself would keep the token that it was created with.
type credentials struct {
	token Token
	next  http.RoundTripper
}

var _ http.RoundTripper = (*credentials)(nil)

func (c *credentials) RoundTrip(req *http.Request) (*http.Response, error) {
	token, err := c.token()
	if err != nil {
		if req.Body != nil {
			err = errors.Join(err, req.Body.Close())
		}
		return nil, err
	}
	for {
		resp, err := c.send(req, token)
		if err != nil || resp.StatusCode != http.StatusUnauthorized {
			return resp, err
		}
		// The token may have been replaced and the old token revoked during the request. A request that was refused
		// with 401 changed nothing, so it is safe to repeat.
		newer, err := c.token()
		if err != nil || newer == token {
			return resp, nil
		}
		next, ok := cloneForRetry(req)
		if !ok {
			return resp, nil
		}
		drain(resp)
		req, token = next, newer
	}
}

func (c *credentials) send(req *http.Request, token string) (*http.Response, error) {
	req = req.Clone(req.Context())
	req.Header.Set("Authorization", "Bearer "+token)
	return c.next.RoundTrip(req)
}
