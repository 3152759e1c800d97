// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main_test

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// No command passes on the escape sequences that a user has put into the names of a volume and a snapshot, which are
// in the descriptions of the disk and the snapshot on the rack. They are shown escaped.
func TestHostileNamesAreEscaped(t *testing.T) {
	t.Parallel()
	const hostile, shown = "a\x1b[2J\x1b]0;title\u009b31m\u202e", `a\u001b[2J\u001b]0;title\u009b31m\u202e`
	h := newHost(t, false)
	client, err := rack.New(rack.Config{
		Name: "default", Host: h.sim.Host, Project: h.sim.Project, Token: rack.FixedToken(h.sim.Token),
		Log: slog.New(slog.DiscardHandler),
	})
	must(t, err)
	disk, err := client.CreateDisk(t.Context(), rack.DiskSpec{
		Name: diskname.ForVolume(simtest.ClusterID, hostile), SizeBytes: 1 << 30, BlockSize: 4096,
		Description: rack.NewDescription(simtest.ClusterID, hostile, "n"+hostile+"/p"+hostile).Encode(),
	})
	must(t, err)
	made, err := client.CreateSnapshot(t.Context(), diskname.ForSnapshot(simtest.ClusterID, hostile),
		rack.NewSnapshotDescription(simtest.ClusterID, hostile, nil).Encode(), disk.ID)
	must(t, err)
	id, snapshot := disk.VolumeID, made.ID
	kubeconfig := serveCluster(t, simtest.NewCluster(canary, pvList, pvcList))
	operator := h.rackEnv(t)
	for _, test := range []struct {
		environ []string
		args    []string
		shows   bool // the name
	}{
		{h.environ, []string{"volume", "list"}, true},
		{h.environ, []string{"volume", "list", "--all"}, true},
		{h.environ, []string{"volume", "list", "--json"}, true},
		{h.environ, []string{"volume", "show", id}, true},
		{h.environ, []string{"volume", "show", id, "--json"}, true},
		{h.environ, []string{"volume", "attach", id}, false},
		{h.environ, []string{"volume", "detach", id}, false},
		{h.environ, []string{"volume", "expand", hostile, "--size=2GiB"}, false},
		{h.environ, []string{"volume", "adopt", "--from-cluster=" + simtest.ClusterID}, true},
		{h.environ, []string{"volume", "adopt", "--from-cluster=" + simtest.ClusterID, "--for=kubernetes", "--yes"}, false},
		{h.environ, []string{"volume", "adopt", "--from-cluster=" + simtest.ClusterID, "--for=nomad", "--yes"}, false},
		{h.environ, []string{"volume", "show", "none" + hostile}, false},
		{h.environ, []string{"volume", "create", hostile, "--size=3GiB"}, false},
		{h.environ, []string{"__complete", "volume", "show", ""}, true},
		{h.environ, []string{"__complete", "snapshot", "show", ""}, true},
		{h.environ, []string{"snapshot", "list"}, true},
		{h.environ, []string{"snapshot", "list", "--json"}, true},
		{h.environ, []string{"snapshot", "show", snapshot}, true},
		{operator, []string{"orphans", kubeconfig}, true},
		{operator, []string{"orphans", kubeconfig, "--json"}, true},
		{operator, []string{"orphans", kubeconfig, "--delete", "--yes", snapshot}, false},
		{operator, []string{"explain", id}, false},
		{operator, []string{"explain", hostile}, false},
		{operator, []string{"doctor"}, false},
		{h.environ, []string{"snapshot", "delete", "none" + hostile}, false},
		{h.environ, []string{"volume", "delete", "none" + hostile}, false},
		{h.environ, []string{"snapshot", "delete", hostile}, false},
		{h.environ, []string{"volume", "delete", hostile}, false},
	} {
		got := runPlugin(t, test.environ, test.args...)
		text := got.stdout + got.stderr
		if text == "" || rpc.Printable(text) != text {
			t.Errorf("%q printed %q", test.args, text)
		}
		if test.shows && !strings.Contains(text, shown) {
			t.Errorf("%q does not show the escaped name: %q", test.args, text)
		}
	}
}
