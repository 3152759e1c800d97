// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package kubernetes_test

import (
	"encoding/base64"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	client "github.com/oxidecomputer/oxide-csi-plugin/metadata/kubernetes"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator/kubernetes"
)

// event makes or changes an event, as the API server does. "patched" counts the changes.
func (c *cluster) event(r *http.Request, namespace, name string, body []byte) (int, any) {
	var e object
	c.decode(body, &e)
	for _, old := range c.events {
		meta := old["metadata"].(object)
		switch {
		case r.Method == http.MethodPost && meta["name"] == e["metadata"].(object)["name"]:
			return http.StatusConflict, nil
		case r.Method == http.MethodPatch && meta["name"] == name && meta["namespace"] == namespace:
			if len(e) != 1 || e["lastTimestamp"] == nil {
				c.t.Errorf("an event is changed by %s", body)
			}
			patched, _ := old["patched"].(int)
			old["patched"], old["lastTimestamp"] = patched+1, e["lastTimestamp"]
			return http.StatusOK, old
		}
	}
	if r.Method != http.MethodPost {
		return http.StatusNotFound, nil
	}
	if e["metadata"].(object)["namespace"] != namespace {
		c.t.Errorf("an event in namespace %s: %s", namespace, body)
	}
	c.events = append(c.events, e)
	return http.StatusCreated, e
}

// wantEvents compares the events: type, reason, message, object, and how often they were repeated.
func (c *cluster) wantEvents(t *testing.T, want ...string) {
	t.Helper()
	var got []string
	for _, e := range c.events {
		patched, _ := e["patched"].(int)
		of := e["involvedObject"].(object)
		got = append(got, fmt.Sprintf("%s %s %q of %s %s/%s %s %v +%d", e["type"], e["reason"], e["message"],
			of["apiVersion"], e["metadata"].(object)["namespace"], of["kind"], of["name"], of["uid"], patched))
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
}

// A repetition is the same event, with another time.
func TestReport(t *testing.T) {
	c := newCluster(t)
	r := kubernetes.NewRestarts(c.options(""))
	for _, report := range []orchestrator.Report{
		{Event: orchestrator.EventRestartPlanned, Message: "2 volumes"},
		{Event: orchestrator.EventRestartPlanned, Message: "2 volumes"},
		{Event: orchestrator.EventRestartPlanned, Message: "3 volumes"},
		{Event: orchestrator.EventRestartRefused, Message: "why"},
	} {
		if err := r.Report(t.Context(), idA, report); err != nil {
			t.Error(err)
		}
	}
	c.wantEvents(t,
		`Normal RestartPlanned "2 volumes" of v1 default/Node `+nodeName+" uid-of-"+nodeName+" +1",
		`Normal RestartPlanned "3 volumes" of v1 default/Node `+nodeName+" uid-of-"+nodeName+" +0",
		`Warning RestartRefused "why" of v1 default/Node `+nodeName+" uid-of-"+nodeName+" +0",
	)
}

// The events of a claim are in its namespace. kubectl describe finds them by the claim's UID.
func TestReportClaim(t *testing.T) {
	c := newCluster(t)
	r := kubernetes.NewRestarts(c.options(""))
	report := orchestrator.Report{Event: orchestrator.EventWaitsForRestart, Message: "why"}
	for _, volume := range []string{"pvc-6f3a1c9e-2b7d-4e58-9a41-0d5c8e7f1a23", "other"} {
		if err := r.ReportClaim(t.Context(), volume, "shop/"+volume, report); err != nil {
			t.Error(err)
		}
	}
	if err := r.ReportClaim(t.Context(), "pvc-1", "data", report); err == nil {
		t.Error("a claim without a namespace was reported")
	}
	c.wantEvents(t,
		`Normal WaitsForRestart "why" of v1 shop/PersistentVolumeClaim pvc-6f3a1c9e-2b7d-4e58-9a41-0d5c8e7f1a23 `+
			"6f3a1c9e-2b7d-4e58-9a41-0d5c8e7f1a23 +0",
		`Normal WaitsForRestart "why" of v1 shop/PersistentVolumeClaim other <nil> +0`,
	)
}

// projected returns a token with these claims, as Kubernetes projects it into a pod.
func projected(claims string) string {
	return "e30." + base64.RawURLEncoding.EncodeToString([]byte(claims)) + ".c2ln"
}

// The plugin finds its pod in the token that Kubernetes projects into it.
func TestReportSelf(t *testing.T) {
	const bound = `{"kubernetes.io":{"namespace":"oxide-csi","pod":{"name":"controller-x","uid":"u-1"}}}`
	expires := orchestrator.Report{Event: orchestrator.EventTokenExpires, Message: "soon"}
	t.Run("twice", func(t *testing.T) {
		c := newCluster(t)
		c.token = projected(bound)
		write(t, c.credentials.Dir, c.token+"\n")
		self := kubernetes.NewSelf(c.options(""))
		for range 2 {
			if err := self.ReportSelf(t.Context(), expires); err != nil {
				t.Error(err)
			}
		}
		c.wantEvents(t, `Warning TokenExpires "soon" of v1 oxide-csi/Pod controller-x u-1 +1`)
	})
	t.Run("no right", func(t *testing.T) {
		c := newCluster(t)
		c.token, c.status = projected(bound), http.StatusForbidden
		write(t, c.credentials.Dir, c.token)
		err := kubernetes.NewSelf(c.options("")).ReportSelf(t.Context(), expires)
		if err == nil || !strings.Contains(err.Error(), `verb "create" on "events"`) {
			t.Errorf("error %v", err)
		}
	})
	for _, bad := range []string{
		"secret", "", projected("secret"), projected("{}"), "e30.???.c2ln",
		projected(`{"kubernetes.io":{"namespace":"oxide-csi","secret":{"name":"t","uid":"u"}}}`),
	} {
		c := newCluster(t)
		write(t, c.credentials.Dir, bad)
		err := kubernetes.NewSelf(c.options("")).ReportSelf(t.Context(), expires)
		if err == nil || bad != "" && strings.Contains(err.Error(), bad) || len(c.calls) > 0 {
			t.Errorf("token %q: error %v, requests %q", bad, err, c.calls)
		}
	}
	t.Run("no credentials, or those of a user outside the cluster", func(t *testing.T) {
		c := newCluster(t)
		outside := c.options("")
		outside.Kubeconfig = "/none"
		write(t, c.credentials.Dir, projected(bound))
		without := c.options("")
		without.ServiceAccount = t.TempDir()
		for _, options := range []client.Options{outside, without} {
			if err := kubernetes.NewSelf(options).ReportSelf(t.Context(), expires); err != nil || len(c.calls) > 0 {
				t.Errorf("error %v, requests %q", err, c.calls)
			}
		}
	})
}

// Write replaces the service account's token.
func write(t *testing.T, dir, token string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, "token"), []byte(token), 0o600); err != nil {
		t.Fatal(err)
	}
}
