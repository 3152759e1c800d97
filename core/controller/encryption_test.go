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
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
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

// A snapshot that a user made has no description. Its disk tells whether it is encrypted, whose header and filesystem
// it may have, and whether the filesystem may grow.
func TestSnapshotMadeByHandOfAnEncryptedVolume(t *testing.T) {
	for name, prepare := range map[string]func(t *testing.T, r *rig, id string) (volume string, lineage []string){
		"a new volume": func(_ *testing.T, _ *rig, id string) (string, []string) { return "secret", []string{id} },
		"a grown volume": func(t *testing.T, r *rig, id string) (string, []string) {
			_, err := r.expand(t, id, 2*coretest.GiB)
			r.Must(t, err)
			return "secret", []string{id}
		},
		"a copy": func(t *testing.T, r *rig, id string) (string, []string) {
			copied := r.create(t, encrypted(from("copy", fromVolume(id)))).GetVolumeId()
			return "copy", []string{copied, id}
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			volume, lineage := prepare(t, r, r.create(t, encrypted(coretest.CreateRequest("secret"))).GetVolumeId())
			disk := r.volumeNamed(t, volume)
			source := fromSnapshot(r.userSnapshot(t, coretest.Project, "mine", "before the update", disk))
			_, err := r.CreateVolume(t.Context(), from("plain", source))
			coretest.WantCode(t, err, codes.InvalidArgument, "is encrypted", "set parameter encryption to luks2")
			restored := r.create(t, encrypted(from("restored", source)))
			if restored.GetVolumeContext()[rpc.KeyEncryption] != rpc.EncryptionLUKS2 {
				t.Errorf("volume context %v", restored.GetVolumeContext())
			}
			r.wantLineage(t, restored.GetVolumeId(), lineage...)
		})
	}
}

func TestSnapshotMadeByHandOfAPlainVolume(t *testing.T) {
	r := newRig(t)
	req := coretest.CreateRequest("plain")
	req.Parameters = map[string]string{rpc.KeyMkfsOptions: "-O bigalloc -C 65536"}
	plain := r.create(t, req).GetVolumeId()
	source := fromSnapshot(r.userSnapshot(t, coretest.Project, "mine", "", plain))
	_, err := r.CreateVolume(t.Context(), encrypted(from("secret", source)))
	coretest.WantCode(t, err, codes.InvalidArgument, "is not encrypted", "remove parameter encryption")
	larger := from("larger", source)
	larger.CapacityRange = &csi.CapacityRange{RequiredBytes: 2 * coretest.GiB}
	_, err = r.CreateVolume(t.Context(), larger)
	coretest.WantCode(t, err, codes.OutOfRange, "bigalloc")
	r.create(t, from("restored", source))
}

// Where no description tells, the request counts, and the node looks at the content.
func TestSourceOfUnknownEncryption(t *testing.T) {
	for name, source := range map[string]func(t *testing.T, r *rig) *csi.VolumeContentSource{
		"a snapshot by hand, whose disk is gone": func(t *testing.T, r *rig) *csi.VolumeContentSource {
			id := r.create(t, encrypted(coretest.CreateRequest("secret"))).GetVolumeId()
			source := fromSnapshot(r.userSnapshot(t, coretest.Project, "mine", "", id))
			_, err := r.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id})
			r.Must(t, err)
			return source
		},
		"a snapshot by hand of a disk by hand": func(t *testing.T, r *rig) *csi.VolumeContentSource {
			return fromSnapshot(
				r.userSnapshot(t, coretest.Project, "mine", "", r.UserDisk(t, coretest.Project, "disk", "").Id))
		},
		"a snapshot of a disk by hand": func(t *testing.T, r *rig) *csi.VolumeContentSource {
			return fromSnapshot(r.snapshot(t, "s", r.UserDisk(t, coretest.Project, "disk", "").Id))
		},
		"a disk by hand": func(t *testing.T, r *rig) *csi.VolumeContentSource {
			return fromVolume(r.UserDisk(t, coretest.Project, "disk", "").Id)
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			source := source(t, r)
			plain := r.create(t, from("plain-copy", source)).GetVolumeContext()
			secret := r.create(t, encrypted(from("secret-copy", source))).GetVolumeContext()
			if plain[rpc.KeyEncryption] != "" || secret[rpc.KeyEncryption] != rpc.EncryptionLUKS2 {
				t.Errorf("volume contexts %v, %v", plain, secret)
			}
		})
	}
}

// A rack that does not answer whether the disk is encrypted is asked again: the volume would say the wrong thing for
// good.
func TestDiskOfASnapshotIsNotShown(t *testing.T) {
	r := newRig(t)
	id := r.create(t, encrypted(coretest.CreateRequest("secret"))).GetVolumeId()
	source := fromSnapshot(r.userSnapshot(t, coretest.Project, "mine", "", id))
	r.Inject(t, "disk_view", simtest.FaultStatus, 500)
	_, err := r.CreateVolume(t.Context(), from("plain", source))
	coretest.WantCode(t, err, codes.Unavailable)
	if ids := r.Volumes(t); len(ids) != 1 {
		t.Errorf("%d disks, want 1", len(ids))
	}
}
