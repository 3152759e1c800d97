// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package verify_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
	"github.com/oxidecomputer/oxide-csi-plugin/test/verify"
)

// made is the description of all that verify makes.
const made = "made by oxide-sim verify, which deletes it"

// sameNames fills another project with objects that have the names and descriptions of those of verify.
func (w *world) sameNames() {
	w.t.Helper()
	w.call("POST", "/v0/instances", `{"name":"csi-verify-i","project":"other"}`, nil)
	for _, name := range []string{"a", "b", "d", "e", "fill-0", "fill-1"} {
		w.call("POST", "/v1/disks?project=other", diskBody("csi-verify-"+name, made), nil)
	}
	w.call("POST", "/v1/snapshots?project=other", snapshotBody("csi-verify-s", "csi-verify-d"), nil)
	for _, name := range []string{"g", "probe", "ran", "stood"} {
		w.call("POST", "/v1/anti-affinity-groups?project=other", groupBody("csi-verify-"+name), nil)
	}
}

func diskBody(name, description string) string {
	return fmt.Sprintf(`{"name":%q,"description":%q,"size":%d,"disk_backend":{"type":"distributed",`+
		`"disk_source":{"type":"blank","block_size":512}}}`, name, description, gib)
}

func snapshotBody(name, disk string) string {
	return fmt.Sprintf(`{"name":%q,"description":%q,"disk":%q}`, name, made, disk)
}

func groupBody(name string) string {
	return fmt.Sprintf(`{"name":%q,"description":%q,"policy":"allow","failure_domain":"sled"}`, name, made)
}

func unavailable() *http.Response {
	const body = `{"request_id":"x","error_code":"ServiceNotAvailable","message":"Service Unavailable"}`
	return &http.Response{StatusCode: 503, Body: io.NopCloser(strings.NewReader(body))}
}

// A rack that fails each tenth request, whether or not it does what was asked, only takes longer.
func TestEachTenthRequestFails(t *testing.T) {
	for name, fail := range map[string]func(serve func() *http.Response) (*http.Response, error){
		"503, not done":       func(func() *http.Response) (*http.Response, error) { return unavailable(), nil },
		"503, done":           func(serve func() *http.Response) (*http.Response, error) { serve(); return unavailable(), nil },
		"no answer, not done": func(func() *http.Response) (*http.Response, error) { return nil, errors.New("reset") },
		"no answer, done":     func(serve func() *http.Response) (*http.Response, error) { serve(); return nil, errors.New("lost") },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, simrack.Options{StateTime: 2 * time.Millisecond})
			w.sameNames()
			w.hook = func(n int, _ *http.Request, serve func() *http.Response) (*http.Response, error) {
				if n%10 == 0 {
					return fail(serve)
				}
				return serve(), nil
			}
			before := w.census()
			wantAsAssumed(t, w.run())
			w.unchanged(before)
		})
	}
}

// A token that loses its role, or its validity, ends the run. What is left is said, and the next run removes it. A
// token that may only look must not make verify believe that its objects are gone.
func TestTheRoleIsLost(t *testing.T) {
	for role, says := range map[string]string{
		"none": "the token does not see the project any more", "viewer": "the token may not change the project any more",
		"invalid": "the rack does not accept the token",
	} {
		t.Run(role, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, simrack.Options{})
			w.sameNames()
			before := w.census()
			later := "oxide-token-unknown"
			if role != "invalid" {
				later = w.newToken(role)
			}
			for _, at := range []int{60, 200, 410} {
				w.sent = 0
				w.hook = func(n int, req *http.Request, serve func() *http.Response) (*http.Response, error) {
					if n > at {
						req.Header.Set("Authorization", "Bearer "+later)
					}
					return serve(), nil
				}
				r := w.run()
				if r.ExitCode() != 2 || !strings.Contains(r.Problem, says) {
					t.Errorf("after %d requests: exit code %d, %s", at, r.ExitCode(), r.Problem)
				}
				if left := len(w.census()) - len(before); left == 0 || len(r.Left) < left {
					t.Errorf("after %d requests: %d objects are left, and the report has %q", at, left, r.Left)
				}
				w.hook = nil
				wantAsAssumed(t, w.run(cleanUpOnly))
				w.unchanged(before)
			}
		})
	}
}

// killed is what a test panics with in the place of a kill: nothing of verify is executed after it.
type killed struct{}

// runUntilKilled runs verify, and kills it after its request n that changes something. It reports whether the run had
// so many.
func (w *world) runUntilKilled(n int, change ...func(*verify.Options)) (was bool) {
	w.hook = func(_ int, req *http.Request, serve func() *http.Response) (*http.Response, error) {
		answer := serve()
		if req.Method != http.MethodGet {
			if n--; n == 0 {
				panic(killed{})
			}
		}
		return answer, nil
	}
	defer func() {
		w.hook = nil
		if p := recover(); p != nil && p != (killed{}) {
			panic(p)
		} else if p != nil {
			was = true
		}
	}()
	w.run(append(change, func(o *verify.Options) { o.Progress = nil })...)
	return false
}

// TestKilledAtEachStep kills verify after each of its requests that change something. The next run removes what is
// left, and nothing else.
func TestKilledAtEachStep(t *testing.T) {
	t.Parallel()
	w := newWorld(t, simrack.Options{})
	w.sameNames()
	before := w.census()
	steps := 1
	for ; w.runUntilKilled(steps); steps++ {
		r := w.run(cleanUpOnly)
		if r.ExitCode() != 0 {
			t.Fatalf("after step %d: exit code %d: %s %q", steps, r.ExitCode(), r.Problem, r.Left)
		}
		if after := w.census(); !slices.Equal(before, after) {
			t.Fatalf("after step %d:\n%s", steps, strings.Join(after, "\n"))
		}
	}
	if steps < 150 {
		t.Errorf("only %d steps: the test kills too few", steps)
	}
	t.Logf("killed at %d steps", steps-1)
}

// TestTheUsersInstance stops and starts the instance of --instance, and kills verify at each of its steps with it. The
// instance runs at the end, with its own disks alone.
func TestTheUsersInstance(t *testing.T) {
	t.Parallel()
	w := newWorld(t, simrack.Options{Instances: []string{"node"}})
	w.sameNames()
	before := w.census()
	named := func(o *verify.Options) {
		o.Instance, o.StartInstances, o.Only = "node", false, []string{"Y1", "Y2", "§9b", "§9d", "A1"}
	}
	steps := 1
	for ; w.runUntilKilled(steps, named); steps++ {
		r := w.run(named, cleanUpOnly)
		if r.ExitCode() != 0 {
			t.Fatalf("after step %d: exit code %d: %s %q", steps, r.ExitCode(), r.Problem, r.Left)
		}
		if after := w.census(); !slices.Equal(before, after) {
			t.Fatalf("after step %d:\n%s", steps, strings.Join(after, "\n"))
		}
	}
	if steps < 15 {
		t.Errorf("only %d steps: the test kills too few", steps)
	}
	r := w.run(named)
	wantAsAssumed(t, r)
	if got := results(r, verify.AsAssumed); len(got) != 5 || r.Rack.Hotplug != "no" || r.Rack.HotUnplug != "no" {
		t.Errorf("as assumed: %q, hot-plug %q and %q", got, r.Rack.Hotplug, r.Rack.HotUnplug)
	}
	w.unchanged(before)
}

// An instance that was stopped before the run is stopped after it.
func TestTheUsersInstanceStaysStopped(t *testing.T) {
	t.Parallel()
	w := newWorld(t, simrack.Options{})
	w.call("POST", "/v0/instances", `{"name":"node","run_state":"stopped"}`, nil)
	before := w.census()
	r := w.run(func(o *verify.Options) { o.Instance, o.Only = "node", []string{"§9b"} })
	wantAsAssumed(t, r)
	w.unchanged(before)
}

// A signal ends the run in order, whichever request is under way.
func TestStoppedByASignal(t *testing.T) {
	t.Parallel()
	w := newWorld(t, simrack.Options{})
	w.sameNames()
	before := w.census()
	for _, at := range []int{1, 12, 40, 150, 300, 450} {
		ctx, cancel := context.WithCancel(t.Context())
		w.sent = 0
		w.hook = func(n int, req *http.Request, serve func() *http.Response) (*http.Response, error) {
			if n == at {
				cancel()
			}
			if err := req.Context().Err(); err != nil {
				t.Errorf("request %d was not finished: %v", n, err)
			}
			return serve(), nil
		}
		r := verify.Run(ctx, w.options())
		cancel()
		if r.ExitCode() != 2 || !strings.Contains(r.Problem, "stopped by a signal") || len(r.Left) > 0 {
			t.Errorf("stopped at request %d: exit code %d: %s %q", at, r.ExitCode(), r.Problem, r.Left)
		}
		w.unchanged(before)
	}
}

// Somebody who makes objects during the run, even with names that verify is about to use, keeps them as they are.
func TestObjectsThatAppearMeanwhile(t *testing.T) {
	for _, name := range []string{"csi-verify-child", "csi-verify-fill-3"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, simrack.Options{})
			var foreign []string
			w.hook = func(n int, _ *http.Request, serve func() *http.Response) (*http.Response, error) {
				if n == 100 {
					before := w.census()
					w.call("POST", "/v1/disks?project=csi-test", diskBody("data", made), nil)
					w.call("POST", "/v1/disks?project=csi-test", diskBody(name, "a database"), nil)
					foreign = slices.DeleteFunc(w.census(), func(one string) bool { return slices.Contains(before, one) })
				}
				return serve(), nil
			}
			r := w.run()
			if r.ExitCode() != 2 || !strings.Contains(r.Problem, "was not made by this program: it is not touched") {
				t.Errorf("exit code %d: %s", r.ExitCode(), r.Problem)
			}
			w.unchanged(foreign)
			w.hook = nil
			r = w.run()
			if r.ExitCode() != 2 || !strings.Contains(r.Problem, "the project is not empty: it has disk "+name+", disk text-") {
				t.Errorf("then exit code %d: %s", r.ExitCode(), r.Problem)
			}
			w.unchanged(foreign)
		})
	}
}

// verify begins nothing in a project that is not empty, or whose name was not repeated. It then only reads.
func TestTheProjectMustBeEmpty(t *testing.T) {
	for name, test := range map[string]struct {
		prepare func(*world)
		change  func(*verify.Options)
		says    string // to the user
	}{
		"a disk": {prepare: func(w *world) { w.call("POST", "/v1/disks?project=csi-test", diskBody("data", ""), nil) }, says: "it has disk data"},
		"a snapshot": {prepare: func(w *world) {
			w.call("POST", "/v1/disks?project=csi-test", diskBody("csi-verify-d", made), nil)
			w.call("POST", "/v1/snapshots?project=csi-test", snapshotBody("monday", "csi-verify-d"), nil)
		}, says: "it has snapshot monday"},
		"an instance": {prepare: func(w *world) { w.call("POST", "/v0/instances", `{"name":"node"}`, nil) },
			says: "it has instance node, disk node-boot"},
		"another instance": {prepare: func(w *world) { w.call("POST", "/v0/instances", `{"name":"node"}`, nil) },
			change: func(o *verify.Options) { o.Instance = "other" }, says: "it has instance node, disk node-boot"},
		"no instance": {change: func(o *verify.Options) { o.Instance = "node" }, says: `the project has no instance "node"`},
		"a group": {prepare: func(w *world) {
			w.call("POST", "/v1/anti-affinity-groups?project=csi-test", groupBody("mine"), nil)
		}, says: "it has anti affinity group mine"},
		"a disk with a name of verify": {prepare: func(w *world) {
			w.call("POST", "/v1/disks?project=csi-test", diskBody("csi-verify-d", "a database"), nil)
		}, says: "it has disk csi-verify-d"},
		"another name":     {change: func(o *verify.Options) { o.EmptyProject = "csi-tset" }, says: `--empty-project=csi-tset is not the project's name, which is "csi-test"`},
		"no such project":  {change: func(o *verify.Options) { o.Project, o.EmptyProject = "none", "none" }, says: `there is no project "none"`},
		"no role":          {change: func(o *verify.Options) { o.Token = "NONE" }, says: `there is no project "csi-test", or the token has no role in it`},
		"an unknown token": {change: func(o *verify.Options) { o.Token = "oxide-token-x" }, says: "the rack does not accept the token"},
		"an old release": {prepare: func(w *world) {
			w.call("PATCH", "/v0/settings", `{"api_version_max":"2025112000.0.0"}`, nil)
		}, says: "the rack serves none of the API versions of releases 18 to 22"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, simrack.Options{})
			if test.prepare != nil {
				test.prepare(w)
			}
			none := w.newToken("none")
			w.hook = func(_ int, req *http.Request, serve func() *http.Response) (*http.Response, error) {
				if req.Method != http.MethodGet {
					t.Errorf("%s %s was sent", req.Method, req.URL)
				}
				return serve(), nil
			}
			var said strings.Builder
			r := w.run(func(o *verify.Options) {
				o.Progress = &said
				if test.change != nil {
					test.change(o)
				}
				if o.Token == "NONE" {
					o.Token = none
				}
			})
			if r.ExitCode() != 2 || !strings.Contains(said.String(), test.says) {
				t.Errorf("exit code %d, said %s", r.ExitCode(), said.String())
			}
			if len(r.Results) > 0 {
				t.Errorf("%d cases were played", len(r.Results))
			}
		})
	}
}

// A server that serves any version is no rack that verify knows. It must not see the token.
func TestAServerThatIsNoRack(t *testing.T) {
	t.Parallel()
	w := newWorld(t, simrack.Options{})
	w.wire = http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
		if req.Header.Get("Authorization") != "" {
			t.Error("the server got the token")
		}
	})
	if r := w.run(); r.ExitCode() != 2 || !strings.Contains(r.Problem, "does not check API versions") {
		t.Errorf("exit code %d: %s", r.ExitCode(), r.Problem)
	}
}

// The run never has more disks and snapshots than its budget, also while the rack fails requests.
func TestBudget(t *testing.T) {
	t.Parallel()
	const budget = 4 * gib
	w := newWorld(t, simrack.Options{QuotaBytes: 100 * gib})
	before := w.census()
	most := int64(0)
	w.hook = func(n int, _ *http.Request, serve func() *http.Response) (*http.Response, error) {
		answer := serve()
		var used struct{ Provisioned struct{ Storage int64 } }
		w.call("GET", "/v1/utilization", "", &used)
		most = max(most, used.Provisioned.Storage)
		if n%10 == 0 {
			return unavailable(), nil
		}
		return answer, nil
	}
	r := w.run(func(o *verify.Options) { o.Budget = budget })
	wantAsAssumed(t, r)
	w.unchanged(before)
	if most != budget {
		t.Errorf("the run had up to %d GiB at the same time, want %d GiB", most/gib, budget/gib)
	}
	if got := result(t, r, "A5"); got.Outcome != verify.NotTried || !strings.Contains(got.Why, "this run may use 4 GiB") {
		t.Errorf("A5: %+v", got)
	}
}
