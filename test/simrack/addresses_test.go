// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

// TestCloudControllerManager makes the calls of Oxide's cloud controller manager, in its order: see InstancesV2 in
// internal/provider/instances_v2.go of github.com/oxidecomputer/oxide-cloud-controller-manager. Its module cannot be
// imported here. A raw world, because the schema file may lack the interfaces; TestY1NetworkInterfaceFitsTheSDK checks
// their form.
func TestCloudControllerManager(t *testing.T) {
	w := newRawWorld(t, simrack.Options{Instances: []string{"worker-1", "worker-2"}})
	c, ctx := w.sdk(), t.Context()
	seen := map[string]bool{}
	for _, node := range []string{"worker-1", "worker-2"} {
		// A new Node has no provider ID: its name is the instance's.
		found, err := c.InstanceView(ctx, oxide.InstanceViewParams{Project: "proj", Instance: oxide.NameOrId(node)})
		if err != nil {
			t.Fatal(err)
		}
		instance := oxide.NameOrId(found.Id)
		interfaces, err := c.InstanceNetworkInterfaceList(ctx, oxide.InstanceNetworkInterfaceListParams{Instance: instance})
		if err != nil {
			t.Fatal(err)
		}
		external, err := c.InstanceExternalIpList(ctx, oxide.InstanceExternalIpListParams{Instance: instance})
		if err != nil {
			t.Fatal(err)
		}
		if found.Hostname != node || found.Ncpus != 1 || found.Memory != oxide.ByteCount(gib) {
			t.Errorf("instance %+v", found)
		}
		if len(interfaces.Items) != 1 || len(external.Items) != 0 {
			t.Fatalf("%d interfaces, %d external addresses, want 1 and 0", len(interfaces.Items), len(external.Items))
		}
		stack, is := interfaces.Items[0].IpStack.AsV4()
		if !is {
			t.Fatalf("the interface has %T", interfaces.Items[0].IpStack.Value)
		}
		address, err := netip.ParseAddr(stack.Value.Ip)
		if err != nil || !netip.MustParsePrefix("172.30.0.0/22").Contains(address) || seen[stack.Value.Ip] {
			t.Errorf("address %s of %s, error %v, want a new one of 172.30.0.0/22", stack.Value.Ip, node, err)
		}
		seen[stack.Value.Ip] = true
	}
}

// What the manager asks of a Node that is not ready: whether its instance exists, and whether it is shut down.
func TestCloudControllerManagerSeesARestart(t *testing.T) {
	w := newWorld(t, simrack.Options{Instances: []string{"worker-1"}})
	c, ctx := w.sdk(), t.Context()
	id := w.machines()["worker-1"].ID
	for _, test := range []struct {
		state    string
		shutdown bool
	}{{"running", false}, {"stopped", true}, {"failed", false}} {
		w.setRun("worker-1", test.state)
		instance, err := c.InstanceView(ctx, oxide.InstanceViewParams{Instance: oxide.NameOrId(id)})
		if err != nil || (instance.RunState == oxide.InstanceStateStopped) != test.shutdown {
			t.Errorf("%s: %+v, error %v", test.state, instance, err)
		}
	}
	w.setRun("worker-1", "stopped")
	w.must("DELETE", "/instances/"+id, "")
	_, err := c.InstanceView(ctx, oxide.InstanceViewParams{Instance: oxide.NameOrId(id)})
	// The manager looks for this text. Without it, it would keep the Node of a deleted instance.
	if err == nil || !strings.Contains(err.Error(), "NotFound") {
		t.Errorf("a deleted instance: %v", err)
	}
}

// Y1. The SDK's types are made from the rack's schema: an interface that they read and write unchanged has its form.
func TestY1NetworkInterfaceFitsTheSDK(t *testing.T) {
	w := newRawWorld(t, simrack.Options{Instances: []string{"i"}})
	raw := w.must("GET", "/network-interfaces?project=proj&instance=i", "").raw
	var read oxide.InstanceNetworkInterfaceResultsPage
	if err := json.Unmarshal([]byte(raw), &read); err != nil {
		t.Fatal(err)
	}
	written, err := json.Marshal(read)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(decode(t, written), decode(t, []byte(raw))); diff != "" {
		t.Errorf("the SDK's answer (-) and the rack's (+):\n%s", diff)
	}
}

func decode(t *testing.T, text []byte) (value any) {
	t.Helper()
	if err := json.Unmarshal(text, &value); err != nil {
		t.Fatal(err)
	}
	return value
}

// Y2. Each instance has one interface, so the second page is empty. A page token names the instance.
func TestY2NetworkInterfacesHavePages(t *testing.T) {
	w := newRawWorld(t, simrack.Options{Instances: []string{"i"}})
	first := w.must("GET", "/network-interfaces?project=proj&instance=i", "")
	if len(first.Items) != 1 || first.NextPage == nil {
		t.Fatalf("the first page is %s", first.raw)
	}
	second := w.must("GET", "/network-interfaces?page_token="+*first.NextPage, "")
	if len(second.Items) != 0 || second.NextPage != nil {
		t.Errorf("the second page is %s", second.raw)
	}
	disks := w.must("GET", "/disks?project=proj", "")
	w.do("GET", "/network-interfaces?instance=i&page_token="+*disks.NextPage, "").check(t, wants{
		http.StatusBadRequest, "", "unable to parse query string: failed to parse pagination token: corrupted token"})
	all, err := w.sdk().InstanceNetworkInterfaceListAllPages(t.Context(),
		oxide.InstanceNetworkInterfaceListParams{Project: "proj", Instance: "i"})
	if err != nil || len(all) != 1 {
		t.Errorf("%d interfaces, error %v", len(all), err)
	}
}

// An address stays through stop, start and a restart of the rack. A new instance has a new one.
func TestAddressesStay(t *testing.T) {
	dir := t.TempDir()
	address := func(w *world, instance string) string {
		page, err := w.sdk().InstanceNetworkInterfaceList(t.Context(),
			oxide.InstanceNetworkInterfaceListParams{Project: "proj", Instance: oxide.NameOrId(instance)})
		if err != nil || len(page.Items) != 1 {
			t.Fatalf("%d interfaces of %s, error %v", len(page.Items), instance, err)
		}
		return fmt.Sprintf("%s %s", page.Items[0].Mac, page.Items[0].IpStack.Value.(*oxide.PrivateIpStackV4).Value.Ip)
	}
	w := newRawWorld(t, simrack.Options{Instances: []string{"i"}, StateDir: dir})
	before := address(w, "i")
	w.setRun("i", "stopped")
	w.setRun("i", "running")
	if got := address(w, "i"); got != before {
		t.Errorf("after stop and start %s, before %s", got, before)
	}
	w.api.Close()
	if err := w.rack.Close(); err != nil {
		t.Fatal(err)
	}
	w = newRawWorld(t, simrack.Options{Instances: []string{"i", "j"}, StateDir: dir})
	if i, j := address(w, "i"), address(w, "j"); i != before || j == before {
		t.Errorf("after a restart of the rack %s and %s, before %s", i, j, before)
	}
}
