// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// listed is a disk, a snapshot or a record in the rack's own listing.
type listed struct {
	Name, Description string
	Size              int64
	State             json.RawMessage // an object for a disk, a string for a snapshot
}

// label is the name of the volume or snapshot that the plugin wrote into the description, or else the rack's name.
func (l listed) label() string {
	var description struct{ Name string }
	if json.Unmarshal([]byte(l.Description), &description) == nil && description.Name != "" {
		return description.Name
	}
	return l.Name
}

// list lists the project's disks, snapshots or anti-affinity-groups by their names.
func (d *demo) list(ctx context.Context, kind string) ([]listed, error) {
	var answer struct{ Items []listed }
	err := d.get(ctx, "/v1/"+kind+"?project="+d.sim.Project, &answer)
	slices.SortFunc(answer.Items, func(a, b listed) int { return strings.Compare(a.label(), b.label()) })
	return answer.Items, err
}

// disks lists the names of the project's disks.
func (d *demo) disks(ctx context.Context) (names []string, err error) {
	disks, err := d.list(ctx, "disks")
	for _, disk := range disks {
		names = append(names, disk.Name)
	}
	return names, err
}

// lists compares the rack's own listing of volumes and snapshots with what is wanted.
func (d *demo) lists(want string) action {
	return func(ctx context.Context) (string, error) {
		disks, err := d.list(ctx, "disks")
		if err != nil {
			return "", err
		}
		snapshots, err := d.list(ctx, "snapshots")
		if err != nil {
			return "", err
		}
		var all []string
		for _, disk := range disks {
			if slices.Contains(d.disksBefore, disk.Name) {
				continue
			}
			place, err := d.place(disk)
			if err != nil {
				return "", err
			}
			all = append(all, fmt.Sprintf("%s %d GiB %s", disk.label(), disk.Size>>30, place))
		}
		if len(disks) == len(d.disksBefore) {
			all = append(all, "no volumes")
		}
		for _, snapshot := range snapshots {
			all = append(all, "snapshot "+snapshot.label())
		}
		return expect("rack: ", strings.Join(all, ", "), want)
	}
}

// place says where a disk is.
func (d *demo) place(disk listed) (string, error) {
	var state struct{ State, Instance string }
	if err := json.Unmarshal(disk.State, &state); err != nil {
		return "", fmt.Errorf("the state of disk %s: %w", disk.Name, err)
	}
	i := slices.IndexFunc(d.nodes, func(m *machine) bool { return m.id == state.Instance })
	switch {
	case state.State == "detached":
		return "free", nil
	case state.State == "attached" && i >= 0:
		return "on " + d.nodes[i].name, nil
	}
	return state.State, nil
}

// expect is a line about what was seen. It is an error if something else was wanted.
func expect(where, seen, want string) (string, error) {
	if seen != want {
		return where + seen, fmt.Errorf("this was expected instead: %s", want)
	}
	return where + seen, nil
}

func (d *demo) runState(ctx context.Context, m *machine) (string, error) {
	var answer struct {
		RunState string `json:"run_state"`
	}
	return answer.RunState, d.get(ctx, "/v1/instances/"+m.id, &answer)
}

// awaitRunState waits for a run state of an instance.
func (d *demo) awaitRunState(ctx context.Context, m *machine, want string) error {
	for {
		state, err := d.runState(ctx, m)
		if err != nil || state == want {
			return err
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("%s is %s and not yet %s: %w", m.name, state, want, ctx.Err())
		}
	}
}

// restarted compares how an instance was restarted since the start of the demo with what is wanted, by the rack's
// record of the calls and the guest's console.
func (d *demo) restarted(m *machine) action {
	const none, ordered, cut = "not restarted", "shut down in order and started again, once", "stopped and started again, once"
	want := ordered
	switch {
	case d.hotplug:
		want = none
	case d.nodesOff != "":
		want = cut
	}
	return func(ctx context.Context) (string, error) {
		if err := errors.Join(d.awaitRunState(ctx, m, "running"), d.awaitPlugin(m)); err != nil {
			return "", err
		}
		calls, err := d.sim.Calls(ctx)
		if err != nil {
			return "", err
		}
		var console []byte
		if d.nodesOff == "" {
			if console, err = os.ReadFile(filepath.Join(m.guest, "console")); err != nil {
				return "", err
			}
		}
		type counts struct{ starts, stops, shutdowns, killed int }
		counted := counts{
			calls.Counts["instance_start"], calls.Counts["instance_stop"],
			strings.Count(string(console), "msg=down"), strings.Count(string(console), "processes are killed"),
		}
		seen := fmt.Sprintf("%+v", counted)
		switch counted {
		case counts{}:
			seen = none
		case counts{starts: 1, shutdowns: 1}:
			seen = ordered
		case counts{starts: 1, stops: 1}:
			seen = cut
		}
		return expect(m.name+": ", seen, want)
	}
}

// get makes a GET request of the rack's API.
func (d *demo) get(ctx context.Context, path string, answer any) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, d.sim.Host+path, nil)
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+d.sim.Token)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }() // it was only read
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("GET %s: %s", path, resp.Status)
	}
	if err := json.NewDecoder(resp.Body).Decode(answer); err != nil {
		return fmt.Errorf("GET %s: %w", path, err)
	}
	return nil
}
