// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main_test

import (
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// The lists in every output and order.
func TestListOutputs(t *testing.T) {
	t.Parallel()
	h := newHost(t, true)
	large := h.ok(t, "volume", "create", "large", "--size=3GiB")
	h.ok(t, "volume", "create", "tiny", "--size=1GiB")
	h.ok(t, "volume", "create", "middle", "--size=2GiB")
	h.ok(t, "volume", "attach", "middle")
	h.ok(t, "snapshot", "create", "second", "--volume=tiny")
	h.ok(t, "snapshot", "create", "first", "--volume=large")
	for by, want := range map[string]string{
		"": "large\nmiddle\ntiny", "name": "large\nmiddle\ntiny", "size": "tiny\nmiddle\nlarge", "age": "middle\ntiny\nlarge", "node": "middle",
	} {
		args := []string{"volume", "list", "-o", "name", "--sort-by=" + by}
		if by == "" {
			args = args[:4]
		}
		got := h.ok(t, args...)
		if by == "node" { // the other two have none
			got = got[strings.LastIndex(got, "\n")+1:]
		}
		if got != want {
			t.Errorf("sorted by %s:\n%s", by, got)
		}
	}
	for by, want := range map[string]string{
		"name": "first\nsecond", "size": "second\nfirst", "age": "first\nsecond", "volume": "first\nsecond",
	} {
		if got := h.ok(t, "snapshot", "list", "-o", "name", "--sort-by="+by); got != want {
			t.Errorf("snapshots sorted by %s:\n%s", by, got)
		}
	}
	if diff := cmp.Diff(h.ok(t, "volume", "list", "--json"), h.ok(t, "volume", "list", "--output=json")); diff != "" {
		t.Errorf("--json and --output=json:\n%s", diff)
	}
	if got := h.ok(t, "volume", "list", "--output=wide"); !strings.Contains(got, large) {
		t.Errorf("the wide list has no ID:\n%s", got)
	}
	if got := h.ok(t, "volume", "list"); strings.Contains(got, large) {
		t.Errorf("the list has IDs:\n%s", got)
	}
	for _, args := range [][]string{{"volume", "list"}, {"volume", "show", "large"}, {"volume", "delete", "large", "--dry-run"}} {
		if got := h.ok(t, append(args, "--output=yaml")...); !strings.Contains(got, "volumeID: "+large) {
			t.Errorf("%v:\n%s", args, got)
		}
	}
	h.fails(t, 2, "volume", "list", "--output=table")
	h.fails(t, 2, "volume", "list", "--sort-by=colour")
	h.fails(t, 2, "volume", "show", "large", "--output=name")
}

// A list asks a controller's socket for no node: that would be an error in the log and in the metrics, each time.
func TestListAtAControllerAlone(t *testing.T) {
	t.Parallel()
	h := newHost(t, false)
	h.ok(t, "volume", "create", "one", "--size=1GiB")
	h.ok(t, "volume", "attach", "one", "--node="+h.sim.Instances[0].Name)
	for _, args := range [][]string{{"volume", "list"}, {"volume", "show", "one"}} {
		if got := h.run(t, append(args, "--node-endpoint="+h.controller.Socket)...); got.code != 0 {
			t.Errorf("%+v", got)
		}
	}
	if log := h.controller.Process.Stderr().String(); strings.Contains(log, "NodeGetInfo") {
		t.Errorf("the controller was asked for a node: %s", log)
	}
}

// A watched list comes again when it has changed, and only then.
//
// This test takes real time: the command looks every two seconds.
func TestWatchedList(t *testing.T) {
	t.Parallel()
	h := newHost(t, true)
	h.ok(t, "volume", "create", "one", "--size=1GiB")
	out := &simtest.Output{}
	cmd := exec.CommandContext(
		within(t, 2*time.Minute),
		programs.Plugin,
		"volume",
		"list",
		"-w",
		"-o=name",
		"--sort-by=name",
	)
	cmd.Env, cmd.Stdout = append(baseEnv(), h.environ...), out
	must(t, cmd.Start())
	await.Eventually(t, "the first list", func() bool { return out.String() == "one\n" })
	time.Sleep(5 * time.Second)
	h.ok(t, "volume", "create", "two", "--size=1GiB")
	await.Eventually(t, "the second list", func() bool { return strings.Contains(out.String(), "two") })
	must(t, cmd.Process.Signal(os.Interrupt)) // Ctrl-C is the way to end it
	if err := cmd.Wait(); err != nil || out.String() != "one\n\none\ntwo\n" {
		t.Errorf("%v: %q", err, out.String())
	}
	if got := h.run(
		t,
		"volume",
		"list",
		"--watch",
		"--timeout=1s",
	); got.code != 0 ||
		!strings.Contains(got.stdout, "two") {
		t.Errorf("with an end: %+v", got)
	}
	if got := h.run(
		t,
		"volume",
		"list",
		"--watch",
		"--endpoint="+h.dir+"/none",
		"--controller-endpoint="+h.dir+"/none",
	); got.code != 8 {
		t.Errorf("without a plugin: %+v", got)
	}
}
