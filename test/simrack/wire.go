// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack

import (
	"fmt"
	"time"
)

// The error codes of the API (docs/reference/rack.md §1). Parse and routing errors have no code.
const (
	codeNotFound         = "ObjectNotFound"
	codeExists           = "ObjectAlreadyExists"
	codeInvalidRequest   = "InvalidRequest"
	codeInvalidValue     = "InvalidValue"
	codeUnauthorized     = "Unauthorized"
	codeForbidden        = "Forbidden"
	codeConflict         = "Conflict"
	codeInternal         = "Internal"
	codeUnavailable      = "ServiceNotAvailable"
	codeCapacity         = "InsufficientCapacity"
	codeNone             = ""
	messageInternal      = "Internal Server Error"
	messageUnavailable   = "Service Unavailable"
	messageStorageQuota  = "Insufficient capacity: Storage Limit Exceeded: Not enough storage to complete request. Either remove unneeded disks and snapshots to free up resources or contact the rack operator to request a capacity increase."
	messageCPUQuota      = "Insufficient capacity: vCPU Limit Exceeded: Not enough vCPUs to complete request. Either stop unused instances to free up resources or contact the rack operator to request a capacity increase."
	messageNoSpace       = "Insufficient capacity: Not enough storage"
	messageNoPlaceToBoot = "Insufficient capacity: Failed to place instance: Could not find any valid sled on which this instance can be placed"
)

// apiError is an error answer of the rack.
type apiError struct {
	status  int
	code    string
	message string
	// allow holds the methods for the Allow header of a 405.
	allow string
}

func (e *apiError) Error() string { return e.message }

func fail(status int, code, format string, args ...any) error {
	return &apiError{status: status, code: code, message: fmt.Sprintf(format, args...)}
}

// badRequest is a parse error: 400 without a code.
func badRequest(format string, args ...any) error {
	return fail(400, codeNone, format, args...)
}

func invalidRequest(format string, args ...any) error {
	return fail(400, codeInvalidRequest, format, args...)
}

func invalidValue(field, why string) error {
	return fail(400, codeInvalidValue, `unsupported value for "%s": %s`, field, why)
}

func alreadyExists(kind, name string) error {
	return fail(400, codeExists, `already exists: %s "%s"`, kind, name)
}

// errorBody is the body of every error answer. A missing code is left out, not null.
type errorBody struct {
	RequestID string `json:"request_id"`
	ErrorCode string `json:"error_code,omitempty"`
	Message   string `json:"message"`
}

type pingView struct {
	Status string `json:"status"`
}

type userView struct {
	ID           string    `json:"id"`
	DisplayName  string    `json:"display_name"`
	SiloID       string    `json:"silo_id"`
	SiloName     string    `json:"silo_name"`
	SiloAdmin    bool      `json:"silo_admin"`
	FleetViewer  bool      `json:"fleet_viewer"`
	TimeCreated  time.Time `json:"time_created"`
	TimeModified time.Time `json:"time_modified"`
}

type userGroupView struct {
	ID           string    `json:"id"`
	DisplayName  string    `json:"display_name"`
	SiloID       string    `json:"silo_id"`
	TimeCreated  time.Time `json:"time_created"`
	TimeModified time.Time `json:"time_modified"`
}

type policyView struct {
	RoleAssignments []assignmentView `json:"role_assignments"`
}

type assignmentView struct {
	IdentityID   string `json:"identity_id"`
	IdentityType string `json:"identity_type"`
	RoleName     string `json:"role_name"`
}

type rackView struct {
	ID           string    `json:"id"`
	TimeCreated  time.Time `json:"time_created"`
	TimeModified time.Time `json:"time_modified"`
}

type projectView struct {
	ID           string    `json:"id"`
	Name         string    `json:"name"`
	Description  string    `json:"description"`
	TimeCreated  time.Time `json:"time_created"`
	TimeModified time.Time `json:"time_modified"`
}

type diskStateView struct {
	State    string `json:"state"`
	Instance string `json:"instance,omitempty"`
}

type diskView struct {
	ID           string        `json:"id"`
	Name         string        `json:"name"`
	Description  string        `json:"description"`
	ProjectID    string        `json:"project_id"`
	Size         int64         `json:"size"`
	BlockSize    int           `json:"block_size"`
	DiskType     string        `json:"disk_type"`
	State        diskStateView `json:"state"`
	ReadOnly     bool          `json:"read_only"`
	SnapshotID   *string       `json:"snapshot_id"`
	ImageID      *string       `json:"image_id"`
	DevicePath   string        `json:"device_path"`
	TimeCreated  time.Time     `json:"time_created"`
	TimeModified time.Time     `json:"time_modified"`
}

type snapshotView struct {
	ID           string    `json:"id"`
	Name         string    `json:"name"`
	Description  string    `json:"description"`
	ProjectID    string    `json:"project_id"`
	DiskID       string    `json:"disk_id"`
	Size         int64     `json:"size"`
	State        string    `json:"state"`
	TimeCreated  time.Time `json:"time_created"`
	TimeModified time.Time `json:"time_modified"`
}

type groupView struct {
	ID            string    `json:"id"`
	Name          string    `json:"name"`
	Description   string    `json:"description"`
	ProjectID     string    `json:"project_id"`
	Policy        string    `json:"policy"`
	FailureDomain string    `json:"failure_domain"`
	TimeCreated   time.Time `json:"time_created"`
	TimeModified  time.Time `json:"time_modified"`
}

type instanceView struct {
	ID                  string    `json:"id"`
	Name                string    `json:"name"`
	Description         string    `json:"description"`
	ProjectID           string    `json:"project_id"`
	Hostname            string    `json:"hostname"`
	RunState            string    `json:"run_state"`
	NCPUs               int       `json:"ncpus"`
	Memory              int64     `json:"memory"`
	BootDiskID          *string   `json:"boot_disk_id"`
	AutoRestartEnabled  bool      `json:"auto_restart_enabled"`
	AutoRestartPolicy   *string   `json:"auto_restart_policy"`
	CPUPlatform         *string   `json:"cpu_platform"`
	EnableJumboFrames   bool      `json:"enable_jumbo_frames"`
	TimeCreated         time.Time `json:"time_created"`
	TimeModified        time.Time `json:"time_modified"`
	TimeRunStateUpdated time.Time `json:"time_run_state_updated"`
}

type resourcesView struct {
	CPUs    int64 `json:"cpus"`
	Memory  int64 `json:"memory"`
	Storage int64 `json:"storage"`
}

type utilizationView struct {
	Provisioned resourcesView `json:"provisioned"`
	Capacity    resourcesView `json:"capacity"`
}

func (p *project) view() projectView {
	return projectView{ID: p.ID, Name: p.Name, Description: p.Description, TimeCreated: p.Created, TimeModified: p.Created}
}

// view is the disk's JSON. Its device path is the one that racks always show; it names no device in any guest.
func (d *disk) view() diskView {
	v := diskView{
		ID: d.ID, Name: d.Name, Description: d.Description, ProjectID: d.ProjectID,
		Size: d.SizeBytes, BlockSize: d.BlockSize, DiskType: d.Type, ReadOnly: d.ReadOnly,
		State: diskStateView{State: d.State}, DevicePath: "/mnt/" + d.Name,
		TimeCreated: d.Created, TimeModified: d.Created,
	}
	v.SnapshotID = nullIfEmpty(d.SnapshotID)
	switch d.State {
	case diskAttached, diskAttaching, diskDetaching:
		v.State.Instance = d.InstanceID
	}
	return v
}

func (s *snapshot) view() snapshotView {
	return snapshotView{
		ID: s.ID, Name: s.Name, Description: s.Description, ProjectID: s.ProjectID, DiskID: s.DiskID,
		Size: s.SizeBytes, State: s.State, TimeCreated: s.Created, TimeModified: s.Created,
	}
}

func (g *group) view() groupView {
	return groupView{
		ID: g.ID, Name: g.Name, Description: g.Description, ProjectID: g.ProjectID, Policy: g.Policy,
		FailureDomain: g.FailureDomain, TimeCreated: g.Created, TimeModified: g.Modified,
	}
}

func (i *instance) view() instanceView {
	v := instanceView{
		ID: i.ID, Name: i.Name, Description: i.Description, ProjectID: i.ProjectID, Hostname: i.Hostname,
		RunState: i.RunState, NCPUs: i.NCPUs, Memory: i.MemoryBytes,
		AutoRestartEnabled: i.AutoRestart != restartNever,
		TimeCreated:        i.Created, TimeModified: i.Modified, TimeRunStateUpdated: i.StateUpdated,
	}
	v.BootDiskID, v.AutoRestartPolicy = nullIfEmpty(i.BootDiskID), nullIfEmpty(i.AutoRestart)
	return v
}

// nullIfEmpty is a text that a view shows as null when it is empty. It points to a copy, because views are encoded
// after mu is released.
func nullIfEmpty(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}
