// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rpc_test

import (
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/test/pages"
)

// Since 0.1.0. Orchestrators keep the contexts of a volume as long as the volume, and its topology, too.
func TestKeysArePermanent(t *testing.T) {
	for got, want := range map[string]string{
		rpc.PluginName:          "csi.oxide.computer",
		rpc.TopologySegmentRack: "topology.csi.oxide.computer/rack",
		rpc.KeyDiskName:         "diskName",
		rpc.KeyDiskID:           "diskID",
		rpc.KeySizeBytes:        "sizeBytes",
		rpc.KeyFirstBytes:       "firstBytes",
		rpc.KeyBlockSize:        "blockSize",
		rpc.KeyOrigin:           "origin",
		rpc.KeyReadOnly:         "readOnly",
		rpc.KeyFSLineage:        "fsLineage",
		rpc.KeyRawBlock:         "rawBlock",
		rpc.KeyEncryption:       "encryption",
		rpc.KeyVerifyFilesystem: "verifyFilesystem",
		rpc.KeyMkfsOptions:      "mkfsOptions",
		rpc.KeyRootUID:          "rootUid",
		rpc.KeyRootGID:          "rootGid",
		rpc.KeyRootMode:         "rootMode",
		rpc.OriginBlank:         "blank",
		rpc.OriginSnapshot:      "snapshot",
		rpc.OriginImage:         "image",
		rpc.EncryptionLUKS2:     "luks2",
	} {
		if got != want {
			t.Errorf("the key %q must stay %q", got, want)
		}
		pages.Shows(t, "../../docs/reference/formats.md", "`"+want+"`")
	}
}
