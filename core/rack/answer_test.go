// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

// An answer that is not about what was asked is an unknown outcome of every call.
func TestAnswersAboutSomethingElse(t *testing.T) {
	const id, other = "10000000-0000-4000-8000-000000000000", "20000000-0000-4000-8000-000000000000"
	blank := DiskSpec{Name: "d", SizeBytes: gib, BlockSize: 4096}
	calls := map[string]func(*rig) error{
		"create disk":       func(r *rig) error { _, err := r.CreateDisk(t.Context(), blank); return err },
		"disk":              func(r *rig) error { _, err := r.Disk(t.Context(), id); return err },
		"disk by name":      func(r *rig) error { _, err := r.DiskByName(t.Context(), "d"); return err },
		"attach":            func(r *rig) error { _, err := r.Attach(t.Context(), id, other); return err },
		"detach":            func(r *rig) error { _, err := r.Detach(t.Context(), id, other); return err },
		"instance":          func(r *rig) error { _, err := r.Instance(t.Context(), id); return err },
		"disks of instance": func(r *rig) error { _, err := r.InstanceDisks(t.Context(), id); return err },
		"stop":              func(r *rig) error { return r.StopInstance(t.Context(), id) },
		"start":             func(r *rig) error { _, err := r.StartInstance(t.Context(), id); return err },
		"create snapshot":   func(r *rig) error { _, err := r.CreateSnapshot(t.Context(), "d", "", id); return err },
		"snapshot":          func(r *rig) error { _, err := r.Snapshot(t.Context(), id); return err },
		"snapshot by name":  func(r *rig) error { _, err := r.SnapshotByName(t.Context(), "d"); return err },
		"create record":     func(r *rig) error { _, err := r.CreateRecord(t.Context(), "d", "text"); return err },
		"update record":     func(r *rig) error { _, err := r.UpdateRecord(t.Context(), id, "text"); return err },
		"records":           func(r *rig) error { _, err := r.Records(t.Context()); return err },
		"project":           func(r *rig) error { return r.ConfirmProject(t.Context()) },
		"list of disks":     func(r *rig) error { return listError(r.Disks(t.Context(), Cursor{}, 0)) },
		"list of snapshots": func(r *rig) error { return listError(r.Snapshots(t.Context(), Cursor{}, 0)) },
	}
	r := newRig(t, simrack.Options{})
	project, err := r.ProjectID(t.Context())
	must(t, err)
	view := func(id, name, project string) string {
		return fmt.Sprintf(`{"id":%q,"name":%q,"project_id":%q,"disk_id":%q,"size":1,"state":{"state":"detached"}}`,
			id, name, project, "10000000-0000-4000-8000-000000000000")
	}
	answers := map[string]string{
		"an empty object": `{}`,
		"null":            `null`,
		"another object":  view("30000000-0000-4000-8000-000000000000", "x", project),
	}
	for answer, body := range answers {
		r.intercept(answerWith(http.StatusOK, body))
		for name, call := range calls {
			t.Run(name+" "+answer, func(t *testing.T) {
				err := call(r)
				if err == nil || !OutcomeUnknown(err) {
					t.Errorf("error %v, want an unknown outcome", err)
				}
			})
		}
	}
	for name, body := range map[string]string{
		"another name":    view(id, "x", project),
		"another project": view(id, "d", other),
	} {
		r.intercept(answerWith(http.StatusOK, body))
		for _, call := range []string{"create disk", "disk by name"} {
			t.Run(call+" "+name, func(t *testing.T) {
				if err := calls[call](r); !OutcomeUnknown(err) {
					t.Errorf("error %v, want an unknown outcome", err)
				}
			})
		}
	}
	r.intercept(answerWith(http.StatusOK, view(id, "d", project)))
	must(t, calls["create disk"](r))
	must(t, calls["disk by name"](r))
	must(t, calls["disk"](r))
}

// A disk without a state, or attached to no instance, would count as detached.
func TestDiskWithoutAStateIsAnUnknownOutcome(t *testing.T) {
	const id = "10000000-0000-4000-8000-000000000000"
	r := newRig(t, simrack.Options{})
	for _, state := range []string{``, `,"state":null`, `,"state":{"state":"attached"}`} {
		disk := fmt.Sprintf(`{"id":%q,"name":"d"%s}`, id, state)
		r.intercept(answerWith(http.StatusOK, disk))
		_, viewed := r.Disk(t.Context(), id)
		r.intercept(answerWith(http.StatusOK, `{"items":[`+disk+`]}`))
		_, ofInstance := r.InstanceDisks(t.Context(), id)
		for call, err := range map[string]error{
			"disk": viewed, "disks of instance": ofInstance, "list of disks": listError(r.Disks(t.Context(), Cursor{}, 0)),
		} {
			if !OutcomeUnknown(err) {
				t.Errorf("%s %s: error %v, want an unknown outcome", call, disk, err)
			}
		}
	}
}

// A rack answers a deletion with 204. Another success comes from a server that is not a rack.
func TestDeletionByAnotherServerIsAnUnknownOutcome(t *testing.T) {
	const id = "10000000-0000-4000-8000-000000000000"
	r := newRig(t, simrack.Options{})
	r.intercept(answerWith(http.StatusOK, `<html>Welcome</html>`))
	for call, err := range map[string]error{
		"disk": r.DeleteDisk(t.Context(), id), "snapshot": r.DeleteSnapshot(t.Context(), id),
		"record": r.DeleteRecord(t.Context(), id),
	} {
		if !OutcomeUnknown(err) {
			t.Errorf("%s: error %v, want an unknown outcome", call, err)
		}
	}
}

// A list whose pages lead in a circle ends with an error.
func TestListThatLeadsToItself(t *testing.T) {
	r := newRig(t, simrack.Options{})
	r.intercept(answerWith(http.StatusOK, `{"items":[],"next_page":"again"}`))
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	_, records := r.Records(ctx)
	for call, err := range map[string]error{"records": records, "list of disks": listError(r.Disks(ctx, Cursor{}, 0))} {
		if !OutcomeUnknown(err) || ctx.Err() != nil {
			t.Errorf("%s: error %v after %v, want an unknown outcome at once", call, err, ctx.Err())
		}
	}
}

// listError reads a list and returns its error.
func listError[T any](list func(func(ListItem[T], error) bool)) (failed error) {
	list(func(_ ListItem[T], err error) bool { failed = err; return err == nil })
	return failed
}

// answerWith answers every request but pings.
func answerWith(status int, body string) func(http.ResponseWriter, *http.Request) bool {
	return func(w http.ResponseWriter, req *http.Request) bool {
		if strings.HasSuffix(req.URL.Path, "/ping") {
			return false
		}
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		_, _ = w.Write([]byte(body)) // an error means that the client has gone
		return true
	}
}

// A refusal whose body is cut off proves nothing: the disk may exist.
func TestCutRefusalIsAnUnknownOutcome(t *testing.T) {
	r := newRig(t, simrack.Options{})
	for _, status := range []int{400, 409, 507} {
		for _, body := range []string{"", "{", `{"request_id":"1","error_code":"ObjectAlr`, `{}`, "<html>"} {
			r.intercept(answerWith(status, body))
			_, err := r.CreateDisk(t.Context(), DiskSpec{Name: "d", SizeBytes: gib, BlockSize: 4096})
			if !OutcomeUnknown(err) {
				t.Errorf("HTTP %d %q: error %v, want an unknown outcome", status, body, err)
			}
		}
	}
}

// An answer that does not end is read up to maxAnswer.
func TestEndlessAnswer(t *testing.T) {
	r := newRig(t, simrack.Options{})
	r.intercept(func(w http.ResponseWriter, req *http.Request) bool {
		if strings.HasSuffix(req.URL.Path, "/ping") {
			return false
		}
		chunk := bytes.Repeat([]byte(" "), 1<<20)
		for written := 0; written < 4*maxAnswer; written += len(chunk) {
			if _, err := w.Write(chunk); err != nil {
				break
			}
		}
		return true
	})
	_, err := r.CreateDisk(t.Context(), DiskSpec{Name: "d", SizeBytes: gib, BlockSize: 4096})
	if !OutcomeUnknown(err) || !strings.Contains(err.Error(), "too large") {
		t.Errorf("error %v, want an unknown outcome because of the size", err)
	}
}
