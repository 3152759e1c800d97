// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package core_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
)

// Since 0.1.0. Orchestrators keep contexts as long as their volume, and nodes of other versions read them. Here every
// key has a value. A node of this version knows every key.
func TestContextsArePermanent(t *testing.T) {
	e := newEverything(t)
	encrypted := coretest.CreateRequest("source")
	encrypted.Parameters = map[string]string{rpc.KeyEncryption: rpc.EncryptionLUKS2}
	created, err := e.CreateVolume(t.Context(), encrypted)
	coretest.Must(t, err)
	source := created.GetVolume().GetVolumeId()
	shot, err := e.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: source})
	coretest.Must(t, err)
	req := coretest.CreateRequest("v")
	req.Parameters = map[string]string{
		rpc.KeyEncryption: rpc.EncryptionLUKS2, rpc.KeyMkfsOptions: "-N 4096",
		rpc.KeyRootUID: "1000", rpc.KeyRootGID: "1000", rpc.KeyRootMode: "2770",
	}
	req.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
		Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: shot.GetSnapshot().GetSnapshotId()},
	}}
	block := coretest.MountWriter()
	block.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
	req.VolumeCapabilities = append(req.VolumeCapabilities, block)
	created, err = e.CreateVolume(t.Context(), req)
	coretest.Must(t, err)
	volume := created.GetVolume()
	_, err = e.ControllerExpandVolume(t.Context(), &csi.ControllerExpandVolumeRequest{
		VolumeId: volume.GetVolumeId(), CapacityRange: &csi.CapacityRange{RequiredBytes: 2 * coretest.GiB},
	})
	coretest.Must(t, err)
	published, err := e.ControllerPublishVolume(t.Context(), &csi.ControllerPublishVolumeRequest{
		VolumeId: volume.GetVolumeId(), NodeId: e.nodeID, VolumeCapability: block,
	})
	coretest.Must(t, err)
	placeholders := strings.NewReplacer(volume.GetVolumeId(), "VOLUME", source, "SOURCE",
		diskname.ForVolume(coretest.Cluster, "v"), "DISK")
	for want, context := range map[string]map[string]string{
		`{"blockSize":"4096","diskName":"DISK","encryption":"luks2","mkfsOptions":"-N 4096","rawBlock":"true",` +
			`"rootGid":"1000","rootMode":"2770","rootUid":"1000","sizeBytes":"1073741824"}`: volume.GetVolumeContext(),
		`{"blockSize":"4096","diskID":"VOLUME","diskName":"DISK","encryption":"luks2","firstBytes":"1073741824",` +
			`"fsLineage":"SOURCE","origin":"snapshot","rawBlock":"true","readOnly":"false",` +
			`"sizeBytes":"2147483648"}`: published.GetPublishContext(),
	} {
		text, err := json.Marshal(context)
		coretest.Must(t, err)
		if got := placeholders.Replace(string(text)); got != want {
			t.Errorf("the context is\n%s\nwant\n%s", got, want)
		}
	}
	_, err = csi.NewNodeClient(e.Conn).NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{
		VolumeId: volume.GetVolumeId(), StagingTargetPath: e.path("staging"), VolumeCapability: block,
		PublishContext: published.GetPublishContext(), VolumeContext: volume.GetVolumeContext(),
	})
	coretest.WantCode(t, err, codes.Unavailable, "disk not found in this guest")
}
