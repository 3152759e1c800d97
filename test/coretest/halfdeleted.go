// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package coretest

import (
	"bytes"
	"cmp"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/oxidecomputer/oxide.go/oxide"
)

// HalfDeleted serves the rig's rack as if the rack had failed to delete a disk: the rack then keeps the disk as
// faulted, under another name (docs/reference/rack.md §3), until another request deletes it. The parameter is the disk
// before its deletion. HalfDeleted returns the host of this rack.
func (r *Rig) HalfDeleted(t *testing.T, disk *oxide.Disk) (host string) {
	t.Helper()
	half := *disk
	half.Name, half.State = oxide.Name("deleted-"+disk.Id), oxide.DiskState{Value: &oxide.DiskStateFaulted{}}
	view, err := json.Marshal(half)
	Must(t, err)
	rack, err := url.Parse(r.Sim.Host)
	Must(t, err)
	var deleted atomic.Bool
	proxy := httputil.NewSingleHostReverseProxy(rack)
	proxy.ModifyResponse = func(resp *http.Response) error {
		first := resp.Request.URL.Path == "/v1/disks" && resp.Request.URL.Query().Get("page_token") == ""
		if resp.Request.Method != http.MethodGet || resp.StatusCode != http.StatusOK || !first || deleted.Load() {
			return nil
		}
		return addDisk(resp, view)
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		req.Header.Del("Accept-Encoding") // then the proxy's transport unpacks what the rack sends
		switch {
		case req.URL.Path != "/v1/disks/"+disk.Id || deleted.Load():
			proxy.ServeHTTP(w, req)
		case req.Method == http.MethodDelete:
			deleted.Store(true)
			w.WriteHeader(http.StatusNoContent)
		default:
			w.Header().Set("Content-Type", "application/json")
			_, _ = w.Write(view)
		}
	}))
	t.Cleanup(server.Close)
	return server.URL
}

// addDisk adds a disk to a page of a list of disks, which is sorted by ID.
func addDisk(resp *http.Response, view json.RawMessage) error {
	var page struct {
		Items    []json.RawMessage `json:"items"`
		NextPage *string           `json:"next_page"`
	}
	if err := json.NewDecoder(resp.Body).Decode(&page); err != nil {
		return err
	}
	page.Items = append(page.Items, view)
	id := func(item json.RawMessage) string {
		var disk oxide.Disk
		_ = json.Unmarshal(item, &disk) // the rack wrote it
		return disk.Id
	}
	slices.SortFunc(page.Items, func(a, b json.RawMessage) int { return cmp.Compare(id(a), id(b)) })
	text, err := json.Marshal(page)
	resp.Body, resp.ContentLength = io.NopCloser(bytes.NewReader(text)), int64(len(text))
	resp.Header.Del("Content-Length")
	return err
}
