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

// apiVersions are the versions of a rack's API that this package can speak, newest first: those of releases 20, 19 and 18.
//
// What we send and read is the same in all of them. SDK v0.10.0 is generated from the first, v0.9.0 from the second and
// v0.8.0 from the third; their paths, parameters and types for disks, snapshots, instances, utilization, projects and
// anti-affinity groups differ in these places only:
//
//   - an instance has enable_jumbo_frames from 2026060500 on, which we do not read;
//   - an instance's cpu_platform may be amd_turin_v2 from 2026060800 on, which we do not read;
//   - a disk's block_size is typed as one of three numbers and no longer as any, which are the same numbers.
//
// The list of versions in omicron's nexus/types/versions/src/lib.rs has nothing else between the first and the last that
// concerns them. Before 2026013001 disks had no read_only, and before 2025120300 neither type nor backend.
var apiVersions = []string{"2026060800.0.0", "2026032500.0.0", "2026021301.0.0"}

// noVersion is later than any: versions are dates, in the year that they begin with. A rack that serves versions refuses
// it before anything else; one of release 17 or older does not look, and would take our requests for its own other ones.
const noVersion = "9999123100.0.0"

// refusedVersion begins what a rack says to a version that is newer than it is (docs/reference/rack.md §1).
const refusedVersion = "server does not support this API version"

// askTimeout bounds the question which version a rack serves: others wait for the answer.
const askTimeout = 10 * time.Second

var (
	errOldRelease = fmt.Errorf(
		"what answers serves no API version: a rack of release 17 or older, whose disks differ from what this plugin knows, or no rack at all: update the rack to release 18 or later, or correct --oxide-host",
	)
	errNoVersion = fmt.Errorf(
		"the rack serves none of the API versions %s: update the rack to release 18 or later",
		strings.Join(apiVersions, ", "),
	)
)

// versions puts every request in the newest API version that the rack serves. It asks the rack before the first request,
// and again when a version that was served no longer is, as when a rack goes back to an older release.
type versions struct {
	next http.RoundTripper
	// plain sends what needs no credentials: what turns out not to be a rack is not shown any.
	plain http.RoundTripper
	// agent names this program where the SDK does not.
	agent string
	log   *slog.Logger

	mu sync.Mutex
	// inUse is empty until the rack has been asked.
	inUse string
	// asking is there while somebody asks.
	asking *question
}

// question is asked by one for all who need its answer.
type question struct {
	// answered is closed when err is what came of it.
	answered chan struct{}
	err      error
}

// errLeaderless says that whoever asked for others was called away, and that they must ask by themselves.
var errLeaderless = errors.New("nobody asks any more")

var _ http.RoundTripper = (*versions)(nil)

func newVersions(next, plain http.RoundTripper, agent string, log *slog.Logger) *versions {
	return &versions{next: next, plain: plain, agent: agent, log: log}
}

func (v *versions) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, used, err := v.send(req)
	if err != nil || !refusesVersion(resp) {
		return resp, err
	}
	// It is refused before anything is done, so the request can be sent again whatever it asks for.
	v.forget(used)
	second, ok := again(req)
	if !ok {
		return resp, nil
	}
	discard(resp)
	resp, used, err = v.send(second)
	if err == nil && refusesVersion(resp) {
		v.forget(used)
		discard(resp)
		return nil, errNoVersion
	}
	return resp, err
}

// send sends req in the version that the rack serves, and returns that too.
func (v *versions) send(req *http.Request) (*http.Response, string, error) {
	version, err := v.settle(req.Context(), req.URL)
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

// settle returns the version in use, and finds it first where there is none. Anything below host does.
func (v *versions) settle(ctx context.Context, host *url.URL) (string, error) {
	for {
		version, asked, mine := v.current()
		switch {
		case version != "":
			return version, nil
		case mine:
			return v.ask(ctx, host, asked)
		}
		select {
		case <-asked.answered:
		case <-ctx.Done():
			return "", fmt.Errorf("wait for the API version of the rack: %w", ctx.Err())
		}
		if asked.err != nil && asked.err != errLeaderless {
			return "", asked.err
		}
	}
}

// current is the version in use or else the question to wait for, which is mine when the caller is to ask it.
func (v *versions) current() (version string, asked *question, mine bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.inUse == "" && v.asking == nil {
		v.asking, mine = &question{answered: make(chan struct{}), err: errLeaderless}, true
	}
	return v.inUse, v.asking, mine
}

// ask finds the version, for all who wait.
func (v *versions) ask(ctx context.Context, host *url.URL, mine *question) (string, error) {
	defer close(mine.answered)
	version, err := v.find(ctx, host)
	v.mu.Lock()
	v.inUse, v.asking = version, nil
	v.mu.Unlock()
	if ctx.Err() == nil {
		mine.err = err
	}
	if err == nil {
		v.log.Info("found the API version that the rack serves", "api_version", version, "newest_known", apiVersions[0])
	}
	return version, err
}

// forget drops a version that was refused, unless another one has been found meanwhile.
func (v *versions) forget(version string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.inUse == version {
		v.inUse = ""
	}
}

// find asks the rack which version it serves.
func (v *versions) find(ctx context.Context, host *url.URL) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	if served, err := v.serves(ctx, host, noVersion); err != nil {
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
	return "", errNoVersion
}

// serves asks for the one thing that every rack answers, whoever asks, in a version. Neither yes nor no is an error.
func (v *versions) serves(ctx context.Context, host *url.URL, version string) (bool, error) {
	ping := url.URL{Scheme: host.Scheme, Host: host.Host, Path: "/v1/ping"}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, ping.String(), nil)
	if err != nil {
		return false, fmt.Errorf("find the API version of the rack: %w", err)
	}
	req.Header.Set("Api-Version", version)
	req.Header.Set("User-Agent", v.agent)
	resp, err := v.plain.RoundTrip(req)
	if err != nil {
		return false, err
	}
	defer discard(resp)
	switch {
	case refusesVersion(resp):
		return false, nil
	case resp.StatusCode == http.StatusOK:
		return true, nil
	}
	return false, fmt.Errorf("/v1/ping, which every rack answers, gave HTTP %d", resp.StatusCode)
}

// maxRefusal is more than a rack ever says when it refuses a request, in bytes.
const maxRefusal = 64 << 10

// refusesVersion reads an answer and reports whether it refuses the version. The answer can be read again afterwards.
func refusesVersion(resp *http.Response) bool {
	if resp.StatusCode != http.StatusBadRequest {
		return false
	}
	body := resp.Body
	// What cannot be read is read again, and then shows the same error, by whoever wants the answer.
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
	return refusal.ErrorCode == "" && strings.HasPrefix(refusal.Message, refusedVersion)
}
