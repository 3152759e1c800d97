// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"
)

// apiVersions are the API versions that this package supports, newest first: those of releases 20, 19 and 18.
//
// What this package sends and reads is the same in all of them. SDK v0.10.0 is generated from the first, v0.9.0 from
// the second and v0.8.0 from the third. Their paths, parameters and types for disks, snapshots, instances,
// utilization, projects and anti-affinity groups differ only as follows:
//
//   - Since 2026060500 an instance has enable_jumbo_frames, which this package does not read.
//   - Since 2026060800 an instance's cpu_platform may be amd_turin_v2, which this package does not read.
//   - A disk's block_size has become an enumeration of three numbers, with the same values as before.
//
// The list of versions in omicron's nexus/types/versions/src/lib.rs has no other change to these types between the
// first and the last. Before 2026013001 disks had no read_only, and before 2025120300 neither type nor backend.
var apiVersions = []string{"2026060800.0.0", "2026032500.0.0", "2026021301.0.0"}

// futureVersion is later than any version: versions begin with their date. A rack that checks versions refuses it
// first of all. A rack of release 17 or older ignores the header, and would misread our requests as those of its own
// API.
const futureVersion = "9999123100.0.0"

// versionRefusedPrefix begins a rack's message about a version that is newer than the rack (docs/reference/rack.md
// §1).
const versionRefusedPrefix = "server does not support this API version"

// negotiationTimeout limits the negotiation, because other calls wait for its result.
const negotiationTimeout = 10 * time.Second

var (
	errOldRelease = fmt.Errorf(
		"the server does not check API versions: it is a rack of release 17 or older, or no rack at all: update the rack to release 18 or later, or correct --oxide-host",
	)
	errNoCommonVersion = fmt.Errorf(
		"the rack serves none of the API versions %s: update the rack to release 18 or later",
		strings.Join(apiVersions, ", "),
	)
)

// versionNegotiator sends every request in the newest API version that both sides support. It asks the rack before the
// first request, and again when the rack no longer serves the version in use, for instance after a downgrade.
type versionNegotiator struct {
	next http.RoundTripper
	// unauthenticated sends requests without credentials: a server that turns out not to be a rack must not see any.
	unauthenticated http.RoundTripper
	// userAgent names this program. The SDK sets it only on its own requests.
	userAgent string
	log       *slog.Logger

	mu sync.Mutex
	// inUse is empty until the rack has been pending.
	inUse string
	// pending is the negotiation under way, or nil.
	pending *negotiation
}

// negotiation is done by one caller for all callers that need its result.
type negotiation struct {
	// done is closed when err is set.
	done chan struct{}
	err  error
}

// errNoLeader means that the caller that acted for others has left. The others must act by themselves.
var errNoLeader = errors.New("the caller that acted for others has left")

var _ http.RoundTripper = (*versionNegotiator)(nil)

func newVersionNegotiator(
	next, unauthenticated http.RoundTripper,
	userAgent string,
	log *slog.Logger,
) *versionNegotiator {
	return &versionNegotiator{next: next, unauthenticated: unauthenticated, userAgent: userAgent, log: log}
}

func (v *versionNegotiator) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, used, err := v.send(req)
	if err != nil || !refusesVersion(resp) {
		return resp, err
	}
	// A rack refuses the version before it does anything, so every request is safe to repeat.
	v.forget(used)
	second, ok := cloneForRetry(req)
	if !ok {
		return resp, nil
	}
	drain(resp)
	resp, used, err = v.send(second)
	if err == nil && refusesVersion(resp) {
		v.forget(used)
		drain(resp)
		return nil, errNoCommonVersion
	}
	return resp, err
}

// send sends req in the version in use, and returns that version.
func (v *versionNegotiator) send(req *http.Request) (*http.Response, string, error) {
	version, err := v.version(req.Context(), req.URL)
	if err != nil {
		if req.Body != nil {
			err = errors.Join(err, req.Body.Close())
		}
		return nil, "", err
	}
	req = req.Clone(req.Context())
	req.Header.Set("Api-Version", version)
	resp, err := v.next.RoundTrip(req)
	return resp, version, err
}

// version returns the version in use, and negotiates it if it is unknown. Only the scheme and host of the URL are used.
func (v *versionNegotiator) version(ctx context.Context, host *url.URL) (string, error) {
	for {
		version, pending, mine := v.current()
		switch {
		case version != "":
			return version, nil
		case mine:
			return v.negotiate(ctx, host, pending)
		}
		select {
		case <-pending.done:
		case <-ctx.Done():
			return "", fmt.Errorf("wait for the API version of the rack: %w", ctx.Err())
		}
		if pending.err != nil && pending.err != errNoLeader {
			return "", pending.err
		}
	}
}

// current returns the version in use, or else the negotiation to wait for. mine means that the caller must do it.
func (v *versionNegotiator) current() (version string, pending *negotiation, mine bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.inUse == "" && v.pending == nil {
		v.pending, mine = &negotiation{done: make(chan struct{}), err: errNoLeader}, true
	}
	return v.inUse, v.pending, mine
}

// negotiate finds the version for all waiting callers. After a panic another caller takes over.
func (v *versionNegotiator) negotiate(
	ctx context.Context, host *url.URL, mine *negotiation,
) (version string, err error) {
	defer func() {
		v.mu.Lock()
		defer v.mu.Unlock()
		v.inUse, v.pending = version, nil
		close(mine.done)
	}()
	version, err = v.newestServed(ctx, host)
	if ctx.Err() == nil {
		mine.err = err
	}
	if err == nil {
		v.log.Info("negotiated the API version", "api_version", version, "newest_known", apiVersions[0])
	}
	return version, err
}

// forget drops a version that was refused, unless another version has been negotiated meanwhile.
func (v *versionNegotiator) forget(version string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.inUse == version {
		v.inUse = ""
	}
}

// newestServed asks the rack which version it serves.
func (v *versionNegotiator) newestServed(ctx context.Context, host *url.URL) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, negotiationTimeout)
	defer cancel()
	if served, err := v.serves(ctx, host, futureVersion); err != nil {
		return "", err
	} else if served {
		return "", errOldRelease
	}
	for _, version := range apiVersions {
		if served, err := v.serves(ctx, host, version); err != nil {
			return "", err
		} else if served {
			return version, nil
		}
	}
	return "", errNoCommonVersion
}

// serves sends a ping in a version. Every rack answers it, without credentials. An answer that neither serves nor
// refuses the version is an error.
func (v *versionNegotiator) serves(ctx context.Context, host *url.URL, version string) (bool, error) {
	ping := url.URL{Scheme: host.Scheme, Host: host.Host, Path: "/v1/ping"}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, ping.String(), nil)
	if err != nil {
		return false, fmt.Errorf("find the API version of the rack: %w", err)
	}
	req.Header.Set("Api-Version", version)
	req.Header.Set("User-Agent", v.userAgent)
	resp, err := v.unauthenticated.RoundTrip(req)
	if err != nil {
		return false, err
	}
	defer drain(resp)
	switch {
	case refusesVersion(resp):
		return false, nil
	case resp.StatusCode == http.StatusOK:
		return true, nil
	case resp.Header.Get(requestIDHeader) == "":
		status := http.StatusText(resp.StatusCode)
		return false, fmt.Errorf("%w: %s (HTTP %d) to /v1/ping", ErrProxy, status, resp.StatusCode)
	}
	return false, fmt.Errorf("/v1/ping returned HTTP %d, and every rack returns 200", resp.StatusCode)
}

// maxRefusal is more than any refusal of a rack, in bytes.
const maxRefusal = 64 << 10

// refusesVersion reads an answer and reports whether it refuses the version. The answer can be read again afterwards.
func refusesVersion(resp *http.Response) bool {
	if resp.StatusCode != http.StatusBadRequest {
		return false
	}
	body := resp.Body
	// A read error shows again when the caller reads the answer.
	start, _ := io.ReadAll(io.LimitReader(body, maxRefusal))
	resp.Body = struct {
		io.Reader
		io.Closer
	}{io.MultiReader(bytes.NewReader(start), body), body}
	var refusal struct {
		ErrorCode string `json:"error_code"`
		Message   string `json:"message"`
	}
	if json.Unmarshal(start, &refusal) != nil {
		return false
	}
	return refusal.ErrorCode == "" && strings.HasPrefix(refusal.Message, versionRefusedPrefix)
}

// APIVersion returns the API version that was negotiated with the rack. It is empty before [Client.Check].
func (c *Client) APIVersion() string {
	c.versions.mu.Lock()
	defer c.versions.mu.Unlock()
	return c.versions.inUse
}
