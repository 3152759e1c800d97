// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package kubernetes_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/admin/diagnose"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// doctor compares each PersistentVolume's VolumeAttachments with its disk, in both directions. What is being attached
// or detached is not judged.
func TestAttachmentsAndDisksAgree(t *testing.T) {
	r := coretest.New(t, func(o *coretest.Options) { o.DetachGrace = time.Hour })
	here, elsewhere := r.Node(t, "node-a"), r.Node(t, "node-b")
	client, err := rack.New(rack.Config{
		Name: "default", Host: r.Sim.Host, Project: coretest.Project, Token: rack.FixedToken(coretest.Token),
	})
	coretest.Must(t, err)
	c := wellCluster()
	c.Put(csiNodeList, "", "worker-1", registeredAs(here))
	const none, attaching, attached, detaching = "no", "attaching", "attached", "detaching"
	for name, of := range map[string]struct{ attachment, on string }{
		"agrees":       {attached, here},
		"lost":         {attached, ""},
		"moved":        {attached, elsewhere},
		"is-attached":  {attaching, here},
		"is-detached":  {detaching, ""},
		"left":         {none, here},
		"not-attached": {none, ""},
	} {
		id := r.Create(t, name)
		if of.on != "" {
			coretest.Must(t, r.Publish(t, id, of.on))
		}
		putVolume(c, name, id)
		if of.attachment == none {
			continue
		}
		attachment := attachmentSince(time.Now(), of.attachment != attaching)
		attachment["spec"].(object)["source"] = object{"persistentVolumeName": name}
		if of.attachment == detaching {
			attachment["metadata"].(object)["deletionTimestamp"] = time.Now().UTC().Format(time.RFC3339)
		}
		c.Put(attachmentList, "", "va-"+name, attachment)
	}
	// Without hot-plug a disk stays attached although its VolumeAttachment is gone, and the plugin knows that.
	leaving := r.Create(t, "leaving")
	coretest.Must(t, r.Publish(t, leaving, here))
	coretest.Must(t, r.Unpublish(t, leaving, here))
	putVolume(c, "leaving", leaving)

	_, attachments := operatorOf(t, c).Examine(t.Context())
	_, disks := diagnose.ExamineRack(t.Context(), client, nil, coretest.Cluster, orchestrator.Kubernetes, time.Now())
	got := map[string]orchestrator.Status{}
	for _, f := range diagnose.ExamineAttachments(t.Context(), "kubernetes", attachments, disks, nil) {
		got[f.Found] = f.Status
	}
	want := map[string]orchestrator.Status{
		"shop/lost is used by VolumeAttachment va-lost, and its disk is detached": orchestrator.StatusFailure,
		"shop/moved is used by VolumeAttachment va-moved on instance " + here + ", and its disk is attached to " +
			elsewhere: orchestrator.StatusFailure,
		"attached on the rack: shop/left to " + here: orchestrator.StatusWarning,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// putVolume adds a PersistentVolume and its claim in the namespace shop.
func putVolume(c *simtest.Cluster, name, id string) {
	c.Put(pvList, "", name, object{"spec": object{
		"claimRef": object{"namespace": "shop", "name": name},
		"csi":      object{"driver": "csi.oxide.computer", "volumeHandle": id},
	}})
}
