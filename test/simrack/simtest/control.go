// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simtest

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"time"
)

// Settings are settings of a simulated rack. In a patch, nil fields stay unchanged. Zero means no limit.
type Settings struct {
	// Hotplug is true, false or "attach-first".
	Hotplug       any   `json:"hotplug,omitempty"`
	HotplugAsync  *bool `json:"hotplug_async,omitempty"`
	MaxDisks      *int  `json:"max_disks,omitempty"`
	LatencyMillis *int  `json:"latency_ms,omitempty"`
	// LatencyMaxMillis makes the latency of each call random, from LatencyMillis on.
	LatencyMaxMillis *int    `json:"latency_max_ms,omitempty"`
	StateMillis      *int    `json:"state_ms,omitempty"`
	QuotaBytes       *int64  `json:"quota_bytes,omitempty"`
	CPUQuota         *int    `json:"cpu_quota,omitempty"`
	SpaceBytes       *int64  `json:"space_bytes,omitempty"`
	APIVersionMax    *string `json:"api_version_max,omitempty"`
	Messages         *string `json:"messages,omitempty"`
	// The other settings of [simrack.World].
	PlugDelayMillis    *int    `json:"plug_delay_ms,omitempty"`
	PlugFails          *int    `json:"plug_fails,omitempty"`
	Unplug             *bool   `json:"unplug,omitempty"`
	SnapshotMillis     *int    `json:"snapshot_ms,omitempty"`
	CreatingMillis     *int    `json:"creating_ms,omitempty"`
	Pantry             *bool   `json:"pantry,omitempty"`
	SpaceReturnsMillis *int    `json:"space_returns_ms,omitempty"`
	StartRefusal       *string `json:"start_refusal,omitempty"`
}

// SimInstance is an instance in the control endpoint's JSON.
type SimInstance struct {
	ID       string `json:"id"`
	Name     string `json:"name"`
	Project  string `json:"project"`
	RunState string `json:"run_state"`
	// RunStateUpdated is the time of the run state.
	RunStateUpdated time.Time `json:"run_state_updated"`
	Guest           string    `json:"guest"`
	Disks           []SimDisk `json:"disks"`
}

// SimDisk is a disk of an instance in the control endpoint's JSON.
type SimDisk struct {
	ID     string `json:"id"`
	Name   string `json:"name"`
	Slot   int    `json:"slot"`
	Device string `json:"device"`
}

// Fault is a failure that the rack simulates. Operation is an operation ID of the rack's API, or "*".
type Fault struct {
	ID          string  `json:"id,omitempty"`
	Operation   string  `json:"operation"`
	Kind        string  `json:"kind"`
	Status      int     `json:"status,omitempty"`
	ErrorCode   string  `json:"error_code,omitempty"`
	Message     string  `json:"message,omitempty"`
	DelayMillis int     `json:"delay_ms,omitempty"`
	Skip        int     `json:"skip,omitempty"`
	Count       *int    `json:"count,omitempty"`
	Probability float64 `json:"probability,omitempty"`
	Hits        int     `json:"hits,omitempty"`
}

// The kinds of faults.
const (
	FaultStatus = "status"
	FaultDone   = "done"
	FaultLost   = "lost"
	FaultReset  = "reset"
	FaultDelay  = "delay"
	FaultSilent = "silent"
)

// Calls are the API calls that the rack has received.
type Calls struct {
	Counts map[string]int `json:"counts"`
	Log    []Call         `json:"log"`
}

// Call is one API call. Status 0 means that no answer was sent.
type Call struct {
	Seq       int    `json:"seq"`
	Operation string `json:"operation"`
	Method    string `json:"method"`
	Path      string `json:"path"`
	Status    int    `json:"status"`
	Fault     string `json:"fault"`
}

// Rate is how many API calls arrived in each second.
type Rate struct {
	// Began is the begin of the first second: the time of the first call since the last [Sim.ClearCalls].
	Began   time.Time `json:"began"`
	Seconds []int     `json:"seconds"`
}

// Leftovers counts what a simulated rack still holds, without boot disks.
type Leftovers struct {
	Disks     int `json:"disks"`
	Snapshots int `json:"snapshots"`
	Loops     int `json:"loops"`
	Mounts    int `json:"mounts"`
	Files     int `json:"files"`
	// GuestErrors are failures of the simulator itself.
	GuestErrors []string `json:"guest_errors"`
}

// Set changes settings, effective from the next call.
func (s *Sim) Set(ctx context.Context, patch Settings) error {
	return s.control(ctx, http.MethodPatch, "/v0/settings", patch, nil)
}

// ListInstances returns all instances.
func (s *Sim) ListInstances(ctx context.Context) ([]SimInstance, error) {
	var list []SimInstance
	return list, s.control(ctx, http.MethodGet, "/v0/instances", nil, &list)
}

// AddInstance creates an instance, "running" or "stopped". An empty project means the rack's default project.
func (s *Sim) AddInstance(ctx context.Context, name, project, runState string) (SimInstance, error) {
	var instance SimInstance
	body := map[string]string{"name": name, "run_state": runState}
	if project != "" {
		body["project"] = project
	}
	return instance, s.control(ctx, http.MethodPost, "/v0/instances", body, &instance)
}

// SetRunState puts an instance into a run state at once, without checks.
func (s *Sim) SetRunState(ctx context.Context, instance, runState string) error {
	return s.control(ctx, http.MethodPatch, "/v0/instances/"+instance, map[string]string{"run_state": runState}, nil)
}

// Starter makes somebody start the instance whenever it is stopped, until this is called with 0.
func (s *Sim) Starter(ctx context.Context, instance string, every time.Duration) error {
	body := map[string]any{"instance": instance, "every_ms": every.Milliseconds()}
	return s.control(ctx, http.MethodPost, "/v0/starter", body, nil)
}

// Halt has a guest power itself off in order.
func (s *Sim) Halt(ctx context.Context, instance string) error {
	return s.control(ctx, http.MethodPost, "/v0/halt", map[string]string{"instance": instance}, nil)
}

// PowerCut stops a guest at once, without a flush.
func (s *Sim) PowerCut(ctx context.Context, instance string) error {
	return s.control(ctx, http.MethodPost, "/v0/power-cut", map[string]string{"instance": instance}, nil)
}

// SetDiskState puts a disk into a state.
func (s *Sim) SetDiskState(ctx context.Context, diskID, state string) error {
	return s.control(ctx, http.MethodPatch, "/v0/disks/"+diskID, map[string]string{"state": state}, nil)
}

// Show makes answers show these fields of an object instead of the real ones. No fields show the real ones again.
func (s *Sim) Show(ctx context.Context, id string, fields map[string]any) error {
	return s.control(ctx, http.MethodPatch, "/v0/shown/"+id, fields, nil)
}

// NewToken creates a token with a role.
func (s *Sim) NewToken(ctx context.Context, role string) (string, error) {
	var answer struct {
		Token string `json:"token"`
	}
	return answer.Token, s.control(ctx, http.MethodPost, "/v0/tokens", map[string]string{"role": role}, &answer)
}

// NewTokenIn creates a token with a role in each of these projects, and none in the others.
func (s *Sim) NewTokenIn(ctx context.Context, roles map[string]string) (string, error) {
	var answer struct {
		Token string `json:"token"`
	}
	return answer.Token, s.control(ctx, http.MethodPost, "/v0/tokens", map[string]any{"roles": roles}, &answer)
}

// NewTokenVia creates a token whose user has the role through a "group" or on the "silo".
func (s *Sim) NewTokenVia(ctx context.Context, role, via string) (string, error) {
	var answer struct {
		Token string `json:"token"`
	}
	body := map[string]string{"role": role, "via": via}
	return answer.Token, s.control(ctx, http.MethodPost, "/v0/tokens", body, &answer)
}

// NewExpiringToken gives the user of a token one more, which expires.
func (s *Sim) NewExpiringToken(ctx context.Context, sameUserAs string, after time.Duration) error {
	body := map[string]any{"same_user_as": sameUserAs, "expires_in_s": int64(after.Seconds())}
	return s.control(ctx, http.MethodPost, "/v0/tokens", body, nil)
}

// RevokeToken makes a token invalid.
func (s *Sim) RevokeToken(ctx context.Context, token string) error {
	return s.control(ctx, http.MethodDelete, "/v0/tokens/"+token, nil, nil)
}

// Inject adds a fault and returns it with its ID.
func (s *Sim) Inject(ctx context.Context, fault Fault) (Fault, error) {
	var added Fault
	return added, s.control(ctx, http.MethodPost, "/v0/faults", fault, &added)
}

// Faults returns all faults with their hits.
func (s *Sim) Faults(ctx context.Context) ([]Fault, error) {
	var list []Fault
	return list, s.control(ctx, http.MethodGet, "/v0/faults", nil, &list)
}

// ClearFaults removes all faults.
func (s *Sim) ClearFaults(ctx context.Context) error {
	return s.control(ctx, http.MethodDelete, "/v0/faults", nil, nil)
}

// Calls returns the API calls since the last [Sim.ClearCalls].
func (s *Sim) Calls(ctx context.Context) (Calls, error) {
	var calls Calls
	return calls, s.control(ctx, http.MethodGet, "/v0/calls", nil, &calls)
}

// Rate returns the API calls per second since the last [Sim.ClearCalls].
func (s *Sim) Rate(ctx context.Context) (Rate, error) {
	var rate Rate
	return rate, s.control(ctx, http.MethodGet, "/v0/rate", nil, &rate)
}

// ClearCalls empties the log of API calls and the counts.
func (s *Sim) ClearCalls(ctx context.Context) error {
	return s.control(ctx, http.MethodDelete, "/v0/calls", nil, nil)
}

// Leftovers returns what the rack still holds.
func (s *Sim) Leftovers(ctx context.Context) (Leftovers, error) {
	var left Leftovers
	return left, s.control(ctx, http.MethodGet, "/v0/leftovers", nil, &left)
}

// control makes one call to the control endpoint.
func (s *Sim) control(ctx context.Context, method, path string, body, answer any) error {
	doing := method + " " + path
	var content io.Reader
	if body != nil {
		encoded, err := json.Marshal(body)
		if err != nil {
			return fmt.Errorf("%s: %w", doing, err)
		}
		content = bytes.NewReader(encoded)
	}
	req, err := http.NewRequestWithContext(ctx, method, s.Control+path, content)
	if err != nil {
		return fmt.Errorf("%s: %w", doing, err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return fmt.Errorf("%s: %w", doing, err)
	}
	text, err := io.ReadAll(resp.Body)
	if closeErr := resp.Body.Close(); err == nil {
		err = closeErr
	}
	switch {
	case err != nil:
		return fmt.Errorf("%s: %w", doing, err)
	case resp.StatusCode > 299:
		return fmt.Errorf("%s: %s: %s", doing, resp.Status, bytes.TrimSpace(text))
	case answer == nil:
		return nil
	}
	if err := json.Unmarshal(text, answer); err != nil {
		return fmt.Errorf("%s: %w: %s", doing, err, text)
	}
	return nil
}
