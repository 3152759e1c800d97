// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// behind starts another controller of the rig's rack, which sees the rack through a proxy. The proxy does what change
// makes of it.
func (r *rig) behind(t *testing.T, change func(next http.Handler) http.Handler) *rig {
	t.Helper()
	target, err := url.Parse(r.Sim.Host)
	coretest.Must(t, err)
	server := httptest.NewServer(change(httputil.NewSingleHostReverseProxy(target)))
	t.Cleanup(server.Close)
	other, sim := *r.Rig, *r.Sim
	sim.Host = server.URL
	other.Sim = &sim
	return &rig{other.Again(t)}
}

// A rack can accept a detach and not carry it out. Then no unpublish succeeds.
func TestDetachThatIsNotCarriedOut(t *testing.T) {
	for name, newRig := range map[string]func(*testing.T, ...func(*coretest.Options)) *rig{
		"at once": newRig, "planned": newRestartRig,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			id, node := r.Create(t, "v"), r.Node(t, "node-a")
			coretest.Must(t, r.Sim.SetRunState(t.Context(), node, "stopped")) // a disk of one that runs is detached later
			coretest.Must(t, r.Publish(t, id, node))
			r.Crash() // it would detach the disk itself
			lying := r.behind(t, func(next http.Handler) http.Handler {
				return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
					if !strings.HasSuffix(req.URL.Path, "/disks/detach") {
						next.ServeHTTP(w, req)
						return
					}
					view := req.Clone(req.Context()) // the disk as it is, attached
					view.Method, view.URL.Path, view.Body, view.ContentLength = http.MethodGet, "/v1/disks/"+id, http.NoBody, 0
					answer := httptest.NewRecorder()
					next.ServeHTTP(answer, view)
					w.Header().Set("Content-Type", "application/json")
					w.WriteHeader(http.StatusAccepted)
					_, _ = w.Write(answer.Body.Bytes())
				})
			})
			coretest.WantCode(t, lying.Unpublish(t, id, node), codes.Unavailable, "still attached")
			if got := r.Disk(t, id).State.State(); got != "attached" {
				t.Errorf("the disk is %s", got)
			}
		})
	}
}

// A repeated create finds the volume that an earlier call made, also if its snapshot is broken by now.
func TestRestoreAgainAfterTheSnapshotBroke(t *testing.T) {
	r := newRig(t)
	snapshot := r.snapshot(t, "s", r.Create(t, "v"))
	restore := from("copy", fromSnapshot(snapshot))
	made := r.create(t, restore)
	coretest.Must(t, r.Sim.Show(t.Context(), snapshot, map[string]any{"state": "faulted"}))
	again, err := r.CreateVolume(t.Context(), restore)
	coretest.Must(t, err)
	coretest.WantSame(t, again.GetVolume(), made)
	_, err = r.CreateVolume(t.Context(), from("another", fromSnapshot(snapshot)))
	coretest.WantCode(t, err, codes.FailedPrecondition, "faulted")
}

// A repeated create with a limit finds the volume although it has grown beyond the limit.
func TestCreateAgainAfterAnExpansionBeyondItsLimit(t *testing.T) {
	r := newRig(t)
	req := coretest.CreateRequest("v")
	req.CapacityRange = &csi.CapacityRange{RequiredBytes: coretest.GiB, LimitBytes: coretest.GiB}
	id := r.create(t, req).GetVolumeId()
	_, err := r.expand(t, id, 2*coretest.GiB)
	coretest.Must(t, err)
	again, err := r.CreateVolume(t.Context(), req)
	coretest.Must(t, err)
	if got := again.GetVolume(); got.GetVolumeId() != id || got.GetCapacityBytes() != 2*coretest.GiB {
		t.Errorf("the volume is %s with %d bytes, want %s with 2 GiB", got.GetVolumeId(), got.GetCapacityBytes(), id)
	}
}

// An expansion replaces no disk by a snapshot that is not of this disk with its whole size.
func TestExpansionRefusesAnotherSnapshot(t *testing.T) {
	for name, change := range map[string]func(*oxide.Snapshot){
		"of another disk": func(s *oxide.Snapshot) { s.DiskId = "7c1f6c3e-53a2-4ba9-9b0a-0f6a8a2e8d11" },
		"of another size": func(s *oxide.Snapshot) { s.Size = oxide.ByteCount(2 * coretest.GiB) },
		"faulted":         func(s *oxide.Snapshot) { s.State = oxide.SnapshotStateFaulted },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			id := r.Create(t, "v")
			before := r.Disk(t, id)
			lying := r.behind(t, func(next http.Handler) http.Handler {
				return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
					req.Header.Del("Accept-Encoding")
					answer := httptest.NewRecorder()
					next.ServeHTTP(answer, req)
					body := answer.Body.Bytes()
					if strings.HasPrefix(req.URL.Path, "/v1/snapshots") && answer.Code < 300 && req.Method != http.MethodDelete {
						var snapshot oxide.Snapshot
						err := json.Unmarshal(body, &snapshot)
						change(&snapshot)
						changed, marshalErr := json.Marshal(snapshot)
						if err := errors.Join(err, marshalErr); err != nil {
							t.Error(err)
						}
						body = changed
					}
					w.Header().Set("Content-Type", "application/json")
					w.WriteHeader(answer.Code)
					_, _ = w.Write(body)
				})
			})
			_, err := lying.expand(t, id, 3*coretest.GiB)
			coretest.WantCode(t, err, codes.Internal, "snapshot")
			coretest.WantSame(t, r.Disk(t, id), before)
		})
	}
}

// A rack can answer 503 to an attach or a detach, and carry it out. The call, or its repetition, sees that it is done.
func TestAttachAndDetachCarriedOutDespiteA503(t *testing.T) {
	for name, newRig := range map[string]func(*testing.T, ...func(*coretest.Options)) *rig{
		"at once": newRig, "planned": newRestartRig,
	} {
		for _, count := range []int{1, 20} { // 20 is more than one call sends
			t.Run(fmt.Sprint(name, " ", count), func(t *testing.T) {
				t.Parallel()
				r := newRig(t)
				id, node := r.Create(t, "v"), r.Node(t, "node-a")
				coretest.Must(t, r.Sim.SetRunState(t.Context(), node, "stopped"))
				for _, operation := range []string{"instance_disk_attach", "instance_disk_detach"} {
					_, err := r.Sim.Inject(
						t.Context(), simtest.Fault{Operation: operation, Kind: simtest.FaultDone, Count: &count})
					coretest.Must(t, err)
				}
				if err := r.Publish(t, id, node); err != nil {
					coretest.WantCode(t, err, codes.Unavailable)
					coretest.Must(t, r.Publish(t, id, node))
				}
				if holder := r.Holder(t, id); holder != node {
					t.Errorf("published, and the disk is on %q", holder)
				}
				if err := r.Unpublish(t, id, node); err != nil {
					coretest.WantCode(t, err, codes.Unavailable)
					coretest.Must(t, r.Unpublish(t, id, node))
				}
				if holder := r.Holder(t, id); holder != "" {
					t.Errorf("unpublished, and the disk is on %q", holder)
				}
			})
		}
	}
}

// A disk shows creating for a while. No call reports its volume before the rack has made it, and a repeated create
// makes no second disk.
func TestCreateOfADiskThatShowsCreating(t *testing.T) {
	r := newRig(t, func(o *coretest.Options) { o.Rack.CreatingMS = 1500 })
	type made struct {
		id  string
		err error
	}
	results := make(chan made, 3)
	for range cap(results) {
		go func() {
			created, err := r.CreateVolume(t.Context(), coretest.CreateRequest("v"))
			results <- made{created.GetVolume().GetVolumeId(), err}
		}()
	}
	id := ""
	for range cap(results) {
		got := <-results
		if got.err != nil {
			coretest.WantCode(t, got.err, codes.Aborted)
			continue
		}
		if state := r.Disk(t, got.id).State.State(); state != "detached" || id != "" && got.id != id {
			t.Errorf("volume %s, after %q, whose disk is %s", got.id, id, state)
		}
		id = got.id
	}
	coretest.Must(t, r.Publish(t, id, r.Node(t, "node-a")))
	if got := r.Volumes(t); len(got) != 1 {
		t.Errorf("volumes: %v", got)
	}
}

// A token can have another role in each project. One that has lost the plugin's project, and can still use another one,
// makes no volume look deleted. An instance of a project that the token cannot see does not exist for it.
func TestRolesPerProject(t *testing.T) {
	r := newRig(t)
	stranger, err := r.Sim.AddInstance(t.Context(), "stranger", "elsewhere", "running")
	coretest.Must(t, err)
	id, node := r.Create(t, "v"), r.Node(t, "node-a")
	use := func(here, there string) {
		t.Helper()
		token, err := r.Sim.NewTokenIn(t.Context(), map[string]string{coretest.Project: here, "elsewhere": there})
		coretest.Must(t, err)
		r.Token.Store(token)
	}
	use("none", "limited-collaborator")
	coretest.WantCode(t, r.Delete(t, id), codes.Unavailable, "token", coretest.Project)
	coretest.WantCode(t, r.Unpublish(t, id, node), codes.Unavailable, "token", coretest.Project)
	coretest.WantCode(t, r.Publish(t, id, stranger.ID), codes.Unavailable, "token", coretest.Project)
	use("viewer", "limited-collaborator")
	coretest.WantCode(t, r.Publish(t, id, node), codes.PermissionDenied, "[RoleTooLow]")
	use("limited-collaborator", "none")
	coretest.WantCode(t, r.Publish(t, id, stranger.ID), codes.NotFound, "no such instance")
	use("limited-collaborator", "viewer")
	coretest.WantCode(t, r.Publish(t, id, stranger.ID), codes.FailedPrecondition, "different projects")
	coretest.Must(t, r.Publish(t, id, node))
	coretest.Must(t, r.Unpublish(t, id, node))
	coretest.Must(t, r.Delete(t, id))
}
