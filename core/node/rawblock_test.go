// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package node_test

import (
	"bytes"
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/core/node"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
)

// Data that a workload wrote through a raw block volume, at a place where no filesystem has a signature, is not
// formatted over.
func TestNodeRawBlockThenFilesystem(t *testing.T) {
	t.Parallel()
	r := newNodeRig(t)
	for name, context := range map[string]func(v *volume) map[string]string{
		"volume context":  func(v *volume) map[string]string { return v.volume },
		"publish context": func(v *volume) map[string]string { return v.publish },
	} {
		t.Run(name, func(t *testing.T) {
			v := r.newVolume(diskA)
			context(v)[rpc.KeyRawBlock] = "true"
			coretest.Must(t, r.stage(v, rawBlock(writer)))
			coretest.Must(t, r.publish(v, "target", rawBlock(writer), false))
			target, err := os.OpenFile(r.path("target"), os.O_WRONLY|unix.O_SYNC, 0)
			coretest.Must(t, err)
			_, err = target.WriteAt(bytes.Repeat([]byte("data"), 30<<20/4), 90<<20)
			coretest.Must(t, errors.Join(err, target.Close()))
			coretest.Must(t, r.unpublish(v, "target"))
			coretest.Must(t, r.unstage(v))
			before := r.digest(v)
			coretest.Must(t, os.Mkdir(v.staging+"-filesystem", 0o755))
			v.staging += "-filesystem"
			coretest.WantCode(t, r.stage(v, filesystemVolume("ext4", writer)), codes.FailedPrecondition, "byte 94371840")
			if r.digest(v) != before {
				t.Error("the disk was written to")
			}
			r.wantMounts()
			r.unplug(v)
			coretest.Must(t, errors.Join(os.Remove(v.staging), os.RemoveAll(r.path("staging-"+diskA))))
		})
	}
}

// A volume that was created for raw block, and never written to, can be used with a filesystem if its disk can be read
// as a whole.
func TestNodeRawBlockUnused(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		scanLimit int64
		code      codes.Code
		mentions  string
	}{
		"within the scan limit": {volumeBytes, codes.OK, ""},
		"over the scan limit":   {volumeBytes - 1, codes.FailedPrecondition, "--blank-scan-limit"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newNodeRig(t, func(opts *node.Options) { opts.BlankScanLimit = test.scanLimit })
			v := r.newVolume(diskA)
			v.volume[rpc.KeyRawBlock] = "true"
			err := r.stage(v, filesystemVolume("ext4", writer))
			if test.code == codes.OK {
				coretest.Must(t, err)
				return
			}
			coretest.WantCode(t, err, test.code, test.mentions)
		})
	}
}
