// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
)

func encrypted(req *csi.CreateVolumeRequest) *csi.CreateVolumeRequest {
	req.Parameters = map[string]string{rpc.KeyEncryption: rpc.EncryptionLUKS2}
	return req
}

func (r *rig) create(t *testing.T, req *csi.CreateVolumeRequest) *csi.Volume {
	t.Helper()
	resp, err := r.CreateVolume(t.Context(), req)
	r.Must(t, err)
	return resp.GetVolume()
}

// The description says that a disk is encrypted, so every answer about the volume does: the rack is asked,
// not the class.
func TestEncryptedVolumeSaysSo(t *testing.T) {
	r := newRig(t)
	created := r.create(t, encrypted(coretest.CreateRequest("secret")))
	id, node := created.GetVolumeId(), r.Node(t, "node-a")
	shown, err := r.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: id})
	r.Must(t, err)
	published, err := r.ControllerPublishVolume(t.Context(),
		&csi.ControllerPublishVolumeRequest{VolumeId: id, NodeId: node, VolumeCapability: coretest.MountWriter()})
	r.Must(t, err)
	for what, context := range map[string]map[string]string{
		"CreateVolume":            created.GetVolumeContext(),
		"ControllerGetVolume":     shown.GetVolume().GetVolumeContext(),
		"ControllerPublishVolume": published.GetPublishContext(),
	} {
		if context[rpc.KeyEncryption] != rpc.EncryptionLUKS2 {
			t.Errorf("%s: %v", what, context)
		}
	}
	plain := r.create(t, coretest.CreateRequest("plain"))
	if _, said := plain.GetVolumeContext()[rpc.KeyEncryption]; said {
		t.Errorf("a plain volume says that it is encrypted: %v", plain.GetVolumeContext())
	}
}

func TestEncryptionParameter(t *testing.T) {
	r := newRig(t)
	req := coretest.CreateRequest("secret")
	req.Parameters = map[string]string{rpc.KeyEncryption: "luks1"}
	_, err := r.CreateVolume(t.Context(), req)
	coretest.WantCode(t, err, codes.InvalidArgument)
}

// A repeated create that differs is refused: the volume would be used in clear, or the other way round.
func TestRepeatedCreateWithOtherEncryption(t *testing.T) {
	r := newRig(t)
	r.create(t, coretest.CreateRequest("plain"))
	_, err := r.CreateVolume(t.Context(), encrypted(coretest.CreateRequest("plain")))
	coretest.WantCode(t, err, codes.AlreadyExists)
	r.create(t, encrypted(coretest.CreateRequest("secret")))
	_, err = r.CreateVolume(t.Context(), coretest.CreateRequest("secret"))
	coretest.WantCode(t, err, codes.AlreadyExists)
}

// A copy has the bytes of its source, so it is encrypted exactly if the source is. That holds for the copy of a copy.
func TestSourceDiffersInEncryption(t *testing.T) {
	r := newRig(t)
	secret := r.create(t, encrypted(coretest.CreateRequest("secret"))).GetVolumeId()
	plain := r.create(t, coretest.CreateRequest("plain")).GetVolumeId()
	secretSnapshot, plainSnapshot := r.snapshot(t, "secret", secret), r.snapshot(t, "plain", plain)
	for name, req := range map[string]*csi.CreateVolumeRequest{
		"plain clone of encrypted":   from("a", fromVolume(secret)),
		"encrypted clone of plain":   encrypted(from("b", fromVolume(plain))),
		"plain restore of encrypted": from("c", fromSnapshot(secretSnapshot)),
		"encrypted restore of plain": encrypted(from("d", fromSnapshot(plainSnapshot))),
	} {
		_, err := r.CreateVolume(t.Context(), req)
		coretest.WantCode(t, err, codes.InvalidArgument)
		if t.Failed() {
			t.Fatal(name)
		}
	}
	restored := r.create(t, encrypted(from("e", fromSnapshot(secretSnapshot))))
	cloned := r.create(t, encrypted(from("f", fromVolume(restored.GetVolumeId()))))
	_, err := r.CreateVolume(t.Context(), from("g", fromVolume(cloned.GetVolumeId())))
	coretest.WantCode(t, err, codes.InvalidArgument)
	again := r.create(t, encrypted(from("g", fromSnapshot(r.snapshot(t, "again", cloned.GetVolumeId())))))
	if again.GetVolumeContext()[rpc.KeyEncryption] != rpc.EncryptionLUKS2 {
		t.Errorf("the copy of a copy: %v", again.GetVolumeContext())
	}
}
