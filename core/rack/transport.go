package rack

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"
)

// maxIdleConns keeps connections for about a hundred calls at once; Go's default keeps two per host, and every further
// call would open and close its own.
const maxIdleConns = 128

// NewHTTPClient returns the HTTP client for a rack. It has no timeout of its own: every call ends with its context.
func NewHTTPClient() *http.Client {
	return &http.Client{Transport: newTransport()}
}

func newTransport() *http.Transport {
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.MaxIdleConns = maxIdleConns
	transport.MaxIdleConnsPerHost = maxIdleConns
	// Answers are a few hundred bytes, of which compression saves the network little and costs both ends time.
	transport.DisableCompression = true
	// A rack that accepts a connection and then says nothing must not hold a call that has no deadline for ever; a
	// create may take minutes on a loaded rack (docs/rack.md §2).
	transport.ResponseHeaderTimeout = 5 * time.Minute
	return transport
}

// Token gives the credentials for the next request. It must be safe for concurrent use and cheap.
type Token func() (string, error)

// FixedToken is a token that never changes.
func FixedToken(token string) Token {
	return func() (string, error) { return token, nil }
}

// TokenFile reads the token from a file, and again whenever the file changes, so that a token can be replaced while the
// plugin runs. A file that has become unreadable or empty is an error of the calls made meanwhile.
func TokenFile(path string) Token {
	f := &tokenFile{path: path}
	return f.token
}

type tokenFile struct {
	path string

	mu     sync.Mutex
	info   fs.FileInfo
	cached string
}

func (f *tokenFile) token() (string, error) {
	info, err := os.Stat(f.path)
	if err != nil {
		return "", fmt.Errorf("token file: %w", err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.info != nil && os.SameFile(f.info, info) && f.info.ModTime().Equal(info.ModTime()) && f.info.Size() == info.Size() {
		return f.cached, nil
	}
	content, err := os.ReadFile(f.path)
	if err != nil {
		return "", fmt.Errorf("token file: %w", err)
	}
	token := strings.TrimSpace(string(content))
	if token == "" {
		return "", fmt.Errorf("token file %s is empty", f.path)
	}
	f.info, f.cached = info, token
	return token, nil
}

// credentials puts the current token on every request; the SDK itself keeps the token it was made with.
type credentials struct {
	token Token
	next  http.RoundTripper
}

func (c *credentials) RoundTrip(req *http.Request) (*http.Response, error) {
	token, err := c.token()
	if err != nil {
		if req.Body != nil {
			err = errors.Join(err, req.Body.Close())
		}
		return nil, err
	}
	req = req.Clone(req.Context())
	req.Header.Set("Authorization", "Bearer "+token)
	return c.next.RoundTrip(req)
}

var _ http.RoundTripper = (*credentials)(nil)

// withCredentials is client, sending whatever token gives, and to nobody but the host that was configured: a rack answers
// no call with a redirect, and following another program's would hand the token to whomever it names.
func withCredentials(client *http.Client, token Token) *http.Client {
	next := client.Transport
	if next == nil {
		next = http.DefaultTransport
	}
	copied := *client
	copied.Transport = &credentials{token: token, next: next}
	copied.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	return &copied
}

// sleep waits, or returns the context's error.
func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}
