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
	"net/http"
	"slices"

	"github.com/oxidecomputer/oxide.go/oxide"
)

// sdkClient is the SDK's client. It decodes disks itself: the SDK (v0.10.0) rejects a whole page if one disk is in a
// state that it does not know, and a later release of the rack may have one. The states of snapshots and instances are
// plain strings to the SDK.
type sdkClient struct{ *oxide.Client }

// sdkDisk is [oxide.Disk] in any state.
type sdkDisk struct {
	oxide.Disk
	State sdkDiskState `json:"state"`
}

// sdkDiskState is [oxide.DiskState] in any state.
type sdkDiskState struct {
	State    State  `json:"state"`
	Instance string `json:"instance"`
}

// UnmarshalJSON also takes what has another form: its text is the state then.
func (s *sdkDiskState) UnmarshalJSON(text []byte) error {
	type fields sdkDiskState
	if json.Unmarshal(text, (*fields)(s)) != nil {
		s.State = State(text)
	}
	return nil
}

// unknown is [Disk.Unknown] of a disk.
func (d *sdkDisk) unknown() string {
	state := d.State.State
	switch {
	case state != "" && !slices.Contains(oxide.DiskStateStateCollection, oxide.DiskStateState(state)):
		return fmt.Sprintf("state %.40q", state)
	case d.DiskType != "" && !slices.Contains(oxide.DiskTypeCollection, d.DiskType):
		return fmt.Sprintf("type %.40q", d.DiskType)
	}
	return ""
}

type sdkDiskPage struct {
	Items    []sdkDisk `json:"items"`
	NextPage string    `json:"next_page"`
}

func (c sdkClient) DiskCreate(ctx context.Context, p oxide.DiskCreateParams) (*sdkDisk, error) {
	return send[sdkDisk](ctx, c, p.Body, oxide.Request{
		Method: http.MethodPost, Path: "/v1/disks", Query: map[string]string{"project": string(p.Project)},
	})
}

func (c sdkClient) DiskView(ctx context.Context, p oxide.DiskViewParams) (*sdkDisk, error) {
	return send[sdkDisk](ctx, c, nil, oxide.Request{
		Method: http.MethodGet, Path: "/v1/disks/{{.disk}}",
		Params: map[string]string{"disk": string(p.Disk)}, Query: map[string]string{"project": string(p.Project)},
	})
}

func (c sdkClient) DiskList(ctx context.Context, p oxide.DiskListParams) (*sdkDiskPage, error) {
	return send[sdkDiskPage](
		ctx,
		c,
		nil,
		oxide.Request{Method: http.MethodGet, Path: "/v1/disks", Query: map[string]string{
			"limit": oxide.PointerIntToStr(p.Limit), "page_token": p.PageToken,
			"project": string(p.Project), "sort_by": string(p.SortBy),
		}},
	)
}

func (c sdkClient) InstanceDiskList(ctx context.Context, p oxide.InstanceDiskListParams) (*sdkDiskPage, error) {
	return send[sdkDiskPage](ctx, c, nil, oxide.Request{
		Method: http.MethodGet, Path: "/v1/instances/{{.instance}}/disks",
		Params: map[string]string{"instance": string(p.Instance)},
		Query:  map[string]string{"limit": oxide.PointerIntToStr(p.Limit)},
	})
}

func (c sdkClient) InstanceDiskAttach(ctx context.Context, p oxide.InstanceDiskAttachParams) (*sdkDisk, error) {
	return send[sdkDisk](ctx, c, p.Body, oxide.Request{
		Method: http.MethodPost, Path: "/v1/instances/{{.instance}}/disks/attach",
		Params: map[string]string{"instance": string(p.Instance)},
	})
}

func (c sdkClient) InstanceDiskDetach(ctx context.Context, p oxide.InstanceDiskDetachParams) (*sdkDisk, error) {
	return send[sdkDisk](ctx, c, p.Body, oxide.Request{
		Method: http.MethodPost, Path: "/v1/instances/{{.instance}}/disks/detach",
		Params: map[string]string{"instance": string(p.Instance)},
	})
}

// send sends a request and decodes its answer, as the SDK's methods do.
func send[Answer any](ctx context.Context, c sdkClient, body any, req oxide.Request) (answer *Answer, err error) {
	if body != nil {
		text, err := json.Marshal(body)
		if err != nil {
			return nil, fmt.Errorf("encoding the request: %w", err)
		}
		req.Body = bytes.NewReader(text)
	}
	resp, err := c.MakeRequest(ctx, req)
	if err != nil {
		return nil, fmt.Errorf("error sending request: %w", err)
	}
	defer func() { err = errors.Join(err, resp.Body.Close()) }()
	if err := oxide.NewHTTPError(resp); err != nil {
		return nil, err
	}
	answer = new(Answer)
	if err := json.NewDecoder(resp.Body).Decode(answer); err != nil {
		return nil, fmt.Errorf("error decoding response body: %w", err)
	}
	return answer, nil
}
