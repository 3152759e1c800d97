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

// view is where a volume is: what the rack's API says, which guest's sysfs shows the disk, what the kernel has mounted in the
// demo's folder. Guest and mounts are empty when the nodes are left out.
type view struct {
	rack, guest, mounts string
}

func (v view) String() string {
	if v.guest == "" {
		return "rack: " + v.rack
	}
	return fmt.Sprintf("rack: %s, guest: %s, mounts: %s", v.rack, v.guest, v.mounts)
}

// The places where a volume should be after a step.
var (
	deleted  = view{rack: noDisk, guest: noDisk, mounts: "none"}
	detached = view{rack: "detached", guest: noDisk, mounts: "none"}
)

func attached(m *machine) view {
	// The boot disk is nvme0n1, and of the free numbers the kernel takes the lowest.
	return view{rack: "attached to " + m.instance.Name, guest: "nvme1n1 on " + m.instance.Name, mounts: "none"}
}

func mounted(m *machine) view {
	v := attached(m)
	v.mounts = fmt.Sprintf("ext4 at %s/%s, %s/%s", m.instance.Name, stagingFolder, m.instance.Name, targetFolder)
	return v
}

// seen leaves away what cannot be seen when the nodes are left out.
func (d *demo) seen(v view) view {
	if d.nodesOff != "" {
		return view{rack: v.rack}
	}
	return v
}

// look asks where a volume is.
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

// errNotFound says that the rack has no such thing.
var errNotFound = errors.New("not found")

const noDisk = "no such disk"

// disk is a disk as the rack's API shows it.
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

// hotplug asks the control endpoint of the simulation; a rack's API does not tell.
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

// inGuests looks for the disk in the sysfs of every guest, by its serial, as the plugin does.
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

// mountsBelow lists what the kernel has mounted in a folder, in the order in which it was mounted.
func mountsBelow(dir string) ([]*mountinfo.Info, error) {
	return mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) { return !below(m.Mountpoint, dir), false })
}

// mounts says where a volume is mounted; its ID, with which its path in the staging folder ends, is left out.
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

// below reports whether a path is a folder or in it.
func below(path, dir string) bool {
	return path == dir || strings.HasPrefix(path, strings.TrimSuffix(dir, "/")+"/")
}
