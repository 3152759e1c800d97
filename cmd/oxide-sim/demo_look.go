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
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"
)

// view is the location of a volume: in the rack's API, in the sysfs of a guest, and in the mounts in the demo's folder.
// Without nodes guest and mounts are empty.
type view struct {
	rack, guest, mounts string
}

func (v view) String() string {
	if v.guest == "" {
		return "rack: " + v.rack
	}
	return fmt.Sprintf("rack: %s, guest: %s, mounts: %s", v.rack, v.guest, v.mounts)
}

// The expected views after a step.
var (
	deleted  = view{rack: noDisk, guest: noDisk, mounts: "none"}
	detached = view{rack: "detached", guest: noDisk, mounts: "none"}
)

func attached(m *machine) view {
	// The boot disk is nvme0n1, and the kernel takes the lowest free number.
	return view{rack: "attached to " + m.instance.Name, guest: "nvme1n1 on " + m.instance.Name, mounts: "none"}
}

func mounted(m *machine) view {
	v := attached(m)
	v.mounts = fmt.Sprintf("ext4 at %s/%s, %s/%s", m.instance.Name, stagingFolder, m.instance.Name, targetFolder)
	return v
}

// seen removes the parts of a view that do not exist without nodes.
func (d *demo) seen(v view) view {
	if d.nodesOff != "" {
		return view{rack: v.rack}
	}
	return v
}

// look reads the location of a volume.
func (d *demo) look(ctx context.Context, v *volume) (seen view, err error) {
	if seen.rack, err = d.onRack(ctx, v); err != nil || d.nodesOff != "" {
		return seen, err
	}
	if seen.guest, err = d.inGuests(v); err != nil {
		return seen, err
	}
	seen.mounts, err = d.mounts(v)
	return seen, err
}

// errNotFound means that the rack has no such object.
var errNotFound = errors.New("not found")

const noDisk = "no such disk"

// disk is a disk in the rack's API.
type disk struct {
	ID, Name string
	Size     int64
	State    struct{ State, Instance string }
}

func (d *demo) disk(ctx context.Context, id string) (answer disk, err error) {
	return answer, d.get(ctx, d.processes.sim.Host+"/v1/disks/"+id, &answer)
}

func (d *demo) onRack(ctx context.Context, v *volume) (string, error) {
	disk, err := d.disk(ctx, v.id)
	if errors.Is(err, errNotFound) {
		return noDisk, nil
	}
	if err != nil || disk.State.Instance == "" {
		return disk.State.State, err
	}
	for _, m := range d.processes.nodes {
		if m.instance.ID == disk.State.Instance {
			return disk.State.State + " to " + m.instance.Name, nil
		}
	}
	return disk.State.State + " to " + disk.State.Instance, nil
}

// rackDisks lists the names of all disks in the project.
func (d *demo) rackDisks(ctx context.Context) ([]string, error) {
	var answer struct{ Items []disk }
	if err := d.get(ctx, d.processes.sim.Host+"/v1/disks?project="+d.processes.sim.Project, &answer); err != nil {
		return nil, err
	}
	names := make([]string, len(answer.Items))
	for i, disk := range answer.Items {
		names[i] = disk.Name
	}
	slices.Sort(names)
	return names, nil
}

func (d *demo) runState(ctx context.Context, instanceID string) (string, error) {
	var answer struct {
		RunState string `json:"run_state"`
	}
	return answer.RunState, d.get(ctx, d.processes.sim.Host+"/v1/instances/"+instanceID, &answer)
}

// hotplug reads the setting from the control endpoint, because a rack's API does not show it.
func (d *demo) hotplug(ctx context.Context) (string, error) {
	var answer struct{ Hotplug bool }
	if err := d.get(ctx, d.processes.sim.Control+"/v0/settings", &answer); err != nil || !answer.Hotplug {
		return "off", err
	}
	return "on", nil
}

// get makes a GET request of the rack's API or its control endpoint.
func (d *demo) get(ctx context.Context, url string, answer any) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+d.processes.sim.Token)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	text, err := io.ReadAll(resp.Body)
	if err := errors.Join(err, resp.Body.Close()); err != nil {
		return fmt.Errorf("GET %s: %w", url, err)
	}
	switch resp.StatusCode {
	case http.StatusOK:
	case http.StatusNotFound:
		return fmt.Errorf("GET %s: %w", url, errNotFound)
	default:
		return fmt.Errorf("GET %s: %s: %s", url, resp.Status, text)
	}
	if err := json.Unmarshal(text, answer); err != nil {
		return fmt.Errorf("GET %s: %w: %s", url, err, text)
	}
	return nil
}

// inGuests searches the sysfs of every guest for the disk's serial, as the plugin does.
func (d *demo) inGuests(v *volume) (string, error) {
	var found []string
	for _, m := range d.processes.nodes {
		serials, err := filepath.Glob(filepath.Join(m.instance.Guest, "sys/block/nvme*/device/serial"))
		if err != nil {
			return "", err
		}
		for _, path := range serials {
			serial, err := os.ReadFile(path)
			if err != nil {
				return "", err
			}
			if strings.TrimSpace(string(serial)) == v.diskName {
				device := filepath.Base(filepath.Dir(filepath.Dir(path)))
				found = append(found, device+" on "+m.instance.Name)
			}
		}
	}
	if len(found) == 0 {
		return noDisk, nil
	}
	return strings.Join(found, ", "), nil
}

// mountsBelow lists the mounts in a folder, in the order of mounting.
func mountsBelow(dir string) ([]*mountinfo.Info, error) {
	return mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) { return !below(m.Mountpoint, dir), false })
}

// mounts lists the mounts of a volume. It leaves out the volume's ID at the end of the path in the staging folder.
func (d *demo) mounts(v *volume) (string, error) {
	mounts, err := mountsBelow(d.dir)
	if err != nil || len(mounts) == 0 {
		return "none", err
	}
	var text []string
	fsType := ""
	for _, m := range mounts {
		place := strings.TrimSuffix(strings.TrimPrefix(m.Mountpoint, d.dir+"/"), "/"+v.id)
		if m.FSType != fsType {
			place, fsType = m.FSType+" at "+place, m.FSType
		}
		text = append(text, place)
	}
	return strings.Join(text, ", "), nil
}

// below reports whether path is dir or is in it.
func below(path, dir string) bool {
	return path == dir || strings.HasPrefix(path, strings.TrimSuffix(dir, "/")+"/")
}
