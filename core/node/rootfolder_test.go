// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package node_test

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
)

// The root folder of a filesystem that a workload has used, or that a user has made, keeps its owner.
func TestNodeRootFolderInUse(t *testing.T) {
	t.Parallel()
	r := newNodeRig(t)
	v := r.newVolume(diskA)
	coretest.Must(t, r.stage(v, filesystemVolume("ext4", writer)))
	coretest.Must(t, os.WriteFile(filepath.Join(v.staging, "file"), nil, 0o600))
	v.volume[rpc.KeyRootUID] = "999"
	coretest.Must(t, r.stage(v, filesystemVolume("ext4", writer)))
	made := r.newVolume(diskB)
	r.run("mkfs.ext4", "-q", r.node(made))
	made.volume[rpc.KeyRootUID] = "999"
	coretest.Must(t, r.stage(made, filesystemVolume("ext4", writer)))
	for _, staging := range []string{v.staging, made.staging} {
		var stat unix.Stat_t
		coretest.Must(t, unix.Stat(staging, &stat))
		if stat.Uid != 0 {
			t.Errorf("the owner of %s is %d, want 0", staging, stat.Uid)
		}
	}
}
