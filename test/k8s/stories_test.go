// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build k8s && stories

package k8s_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/iohang"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

func init() { readsVerdicts = true }

// TestStories makes for real what can go wrong with a volume, and reads the first line of oxide-csi explain. Continuous
// integration makes six of the twenty stories. That of a restart that the node refuses is in TestPlannedRestart.
func TestStories(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: namespaces, mounts, loop devices")
	}
	c := newCluster(t)
	c.install(t, "overlay")
	c.explains(t)
	for _, story := range []struct {
		name string
		make func(*testing.T)
	}{
		{"no hot-plug", c.noHotplug},
		{"slots full", c.slotsFull},
		{"twin serial", c.twinSerial},
		{"foreign filesystem", c.foreignFilesystem},
		{"unclean filesystem", c.uncleanFilesystem},
		{"disk in use", c.diskInUse},
		{"hung disk", c.hungDisk},
		{"expansion waiting for a detach", c.expansionWaits},
		{"plugin not registered", c.notRegistered},
		{"wrong project", c.wrongProject},
		{"token revoked", c.tokenRevoked},
		{"restart planned", c.restartPlanned},
		{"node gone, instance stopped, instance deleted", c.nodeGone},
	} {
		t.Run(story.name, story.make)
	}
}

// noHotplug needs a node that runs, on a rack that attaches disks to stopped instances only.
func (c *cluster) noHotplug(t *testing.T) {
	c.setting(t, simtest.Settings{Hotplug: new(false), HotplugAsync: new(false)},
		simtest.Settings{Hotplug: new(true), HotplugAsync: new(true)})
	c.uses(t, "cold", c.a)
	c.event(t, "cold", "[RackHasNoHotplug]")
	c.explained(t, "pod/default/cold", "RackHasNoHotplug")
}

// restartPlanned installs the plugin for racks without hot-plug, so that restarts begin later.
func (c *cluster) restartPlanned(t *testing.T) {
	c.kubectl(t, "apply", "-k", "overlay-restart")
	t.Cleanup(func() {
		c.kubectl(t, "apply", "-k", "overlay")
		c.rolledOut(t)
	})
	set := func(setting string) {
		c.kubectl(t, "-n", namespace, "set", "env", "deployment/oxide-csi-controller", "-c=oxide-plugin", setting)
		c.rolledOut(t)
	}
	later := time.Now().UTC().Add(6 * time.Hour)
	set(fmt.Sprintf("OXIDE_CSI_RESTART_HOURS=Mon-Sun %s-%s", later.Format("15:04"), later.Add(time.Hour).Format("15:04")))
	c.setting(t, simtest.Settings{Hotplug: new(false), HotplugAsync: new(false)},
		simtest.Settings{Hotplug: new(true), HotplugAsync: new(true)})
	c.uses(t, "planned", c.a)
	c.explained(t, "pod/default/planned", "RestartPlanned")
}

// slotsFull lets the rack take no disk but the boot disk.
func (c *cluster) slotsFull(t *testing.T) {
	c.setting(t, simtest.Settings{MaxDisks: new(1)}, simtest.Settings{MaxDisks: new(maxDisks)})
	c.uses(t, "full", c.a)
	c.event(t, "full", "[InstanceFull]")
	c.explained(t, "pod/default/full", "InstanceFull")
}

// twinSerial attaches a second disk by hand. The guest sees the same serial for both.
func (c *cluster) twinSerial(t *testing.T) {
	disk := c.used(t, "twin")
	twin, err := c.client(t).DiskCreate(t.Context(), oxide.DiskCreateParams{
		Project: oxide.NameOrId(c.sim.Project), Body: &oxide.DiskCreate{
			Name: disk.Name + "-twin", Size: 1 << 30, DiskBackend: oxide.DiskBackend{Value: oxide.DiskBackendDistributed{
				DiskSource: oxide.DiskSource{Value: oxide.DiskSourceBlank{BlockSize: 4096}},
			}},
		},
	})
	must(t, err)
	c.attachByHand(t, twin.Id)
	c.uses(t, "twin", c.a)
	c.event(t, "twin", "[SerialCollision]")
	c.explained(t, "pod/default/twin", "SerialCollision")
}

// foreignFilesystem replaces the volume's filesystem by swap space.
func (c *cluster) foreignFilesystem(t *testing.T) {
	file := c.store(c.used(t, "foreign"))
	run(t, "wipefs", "--all", "--quiet", file)
	run(t, "mkswap", file)
	c.uses(t, "foreign", c.a)
	c.event(t, "foreign", "[ForeignFilesystem]")
	c.explained(t, "pod/default/foreign", "ForeignFilesystem")
}

// uncleanFilesystem removes the root folder of the volume's filesystem, which no automatic check repairs.
func (c *cluster) uncleanFilesystem(t *testing.T) {
	file := c.store(c.used(t, "unclean"))
	run(t, "debugfs", "-w", "-R", "set_super_value state 3", file)
	run(t, "debugfs", "-w", "-n", "-R", "clri <2>", file)
	c.uses(t, "unclean", c.a)
	c.explained(t, "pod/default/unclean", "FilesystemUnclean")
}

// diskInUse holds the volume's device as another program on the node would.
func (c *cluster) diskInUse(t *testing.T) {
	disk := c.used(t, "held")
	c.attachByHand(t, disk.Id)
	holder, err := os.OpenFile(c.device(t, disk.Id), os.O_RDONLY|unix.O_EXCL, 0)
	must(t, err)
	t.Cleanup(func() { must(t, holder.Close()) })
	c.uses(t, "held", c.a)
	c.explained(t, "pod/default/held", "DiskInUse")
}

// hungDisk lets the volume's device hang for the plugin on the node.
func (c *cluster) hungDisk(t *testing.T) {
	disk := c.used(t, "hung")
	c.attachByHand(t, disk.Id)
	var device unix.Stat_t
	must(t, unix.Stat(c.device(t, disk.Id), &device))
	for pid := range c.pluginProcesses(t, c.a) {
		t.Cleanup(iohang.Start(t, pid, unix.Major(device.Rdev), unix.Minor(device.Rdev)))
	}
	c.uses(t, "hung", c.a)
	c.explained(t, "pod/default/hung", "DiskNotResponding")
}

func (c *cluster) expansionWaits(t *testing.T) {
	c.uses(t, "grows", c.a)
	c.running(t, "grows")
	c.kubectl(t, "patch", "pvc", "grows", "-p", `{"spec":{"resources":{"requests":{"storage":"3Gi"}}}}`)
	c.explained(t, "default/grows", "ExpansionWaits")
}

func (c *cluster) notRegistered(t *testing.T) {
	c.used(t, "nowhere")
	c.withoutPlugin(t, c.b)
	c.uses(t, "nowhere", c.b)
	c.explained(t, "pod/default/nowhere", "PluginNotRegistered")
}

// wrongProject gives the plugin a project that does not exist. The command has the right one.
func (c *cluster) wrongProject(t *testing.T) {
	c.used(t, "astray")
	c.setSecret(t, "project", "no-such-project")
	c.kubectl(t, "-n", namespace, "delete", "pods", "-l", "app=oxide-csi-controller", "--force", "--grace-period=0")
	t.Cleanup(func() { c.restored(t, "project", c.sim.Project) })
	c.uses(t, "astray", c.a)
	c.explained(t, "pod/default/astray", "ProjectUnusable")
}

// tokenRevoked revokes the plugin's token. The command has another one.
func (c *cluster) tokenRevoked(t *testing.T) {
	c.used(t, "revoked")
	token, err := c.sim.NewToken(t.Context(), "limited-collaborator")
	must(t, err)
	must(t, c.sim.RevokeToken(t.Context(), c.sim.Token))
	c.sim.Token = token
	t.Cleanup(func() { c.restored(t, "token", token) })
	c.uses(t, "revoked", c.a)
	c.explained(t, "pod/default/revoked", "TokenRejected")
}

// nodeGone ends a node while its instance runs, then stops the instance, and then deletes it.
func (c *cluster) nodeGone(t *testing.T) {
	c.apply(t, claim{name: "lost"}.String()+pod{name: "lost", claim: "lost", on: c.b}.String())
	c.running(t, "lost")
	c.b.stop(t)
	c.explained(t, "pod/default/lost", "NodeNotReady")
	must(t, c.sim.PowerCut(t.Context(), c.b.Name))
	c.explained(t, "pod/default/lost", "InstanceStopped")
	must(t, c.client(t).InstanceDelete(t.Context(), oxide.InstanceDeleteParams{Instance: oxide.NameOrId(c.b.Instance)}))
	c.explained(t, "pod/default/lost", "InstanceDeleted")
}

// used makes a volume that was used and is detached, and returns its disk.
func (c *cluster) used(t *testing.T, name string) *oxide.Disk {
	t.Helper()
	c.apply(t, claim{name: name}.String()+pod{name: name, claim: name, on: c.a}.String())
	c.running(t, name)
	c.gone(t, "pod", name)
	pv := c.get(t, ".spec.volumeName", "pvc", name)
	id := c.get(t, ".spec.csi.volumeHandle", "pv", pv)
	var disk *oxide.Disk
	await.Within(t, waitLimit, "the disk is detached", func() bool {
		var err error
		disk, err = c.client(t).DiskView(t.Context(), oxide.DiskViewParams{Disk: oxide.NameOrId(id)})
		must(t, err)
		_, detached := disk.State.Value.(*oxide.DiskStateDetached)
		return detached
	})
	// Until then the attacher may ask for the detach again, and take away a disk that was attached by hand.
	c.notAttached(t, pv)
	return disk
}

// notAttached waits until a PersistentVolume has no VolumeAttachment.
func (c *cluster) notAttached(t *testing.T, pv string) {
	t.Helper()
	await.Within(t, waitLimit, "the VolumeAttachment is gone", func() bool {
		return !strings.Contains(c.get(t, ".items[*].spec.source.persistentVolumeName", "volumeattachments"), pv)
	})
}

func (c *cluster) client(t *testing.T) *oxide.Client {
	t.Helper()
	client, err := oxide.NewClient(oxide.WithHost(c.sim.Host), oxide.WithToken(c.sim.Token))
	must(t, err)
	return client
}

// attachByHand attaches a disk to node-a until the end of the test.
func (c *cluster) attachByHand(t *testing.T, disk string) {
	t.Helper()
	instance, body := oxide.NameOrId(c.a.Instance), &oxide.DiskPath{Disk: oxide.NameOrId(disk)}
	_, err := c.client(t).InstanceDiskAttach(t.Context(), oxide.InstanceDiskAttachParams{Instance: instance, Body: body})
	must(t, err)
	await.Within(t, waitLimit, "the disk is in the guest", func() bool { return c.deviceOf(t, disk) != "" })
	t.Cleanup(func() { // the plugin may have detached it
		_, _ = c.client(t).InstanceDiskDetach(c.t.Context(), oxide.InstanceDiskDetachParams{Instance: instance, Body: body})
	})
}

// device returns the path of a disk's device in its guest, as this process sees it.
func (c *cluster) device(t *testing.T, disk string) string {
	t.Helper()
	return filepath.Join(c.a.Guest, "dev", filepath.Base(c.deviceOf(t, disk)))
}

// deviceOf returns the name of a disk's device, or "" if no guest has it.
func (c *cluster) deviceOf(t *testing.T, disk string) string {
	t.Helper()
	instances, err := c.sim.ListInstances(t.Context())
	must(t, err)
	for _, instance := range instances {
		for _, attached := range instance.Disks {
			if attached.ID == disk {
				return attached.Device
			}
		}
	}
	return ""
}

// store returns the file with the content of a disk that is not attached.
func (c *cluster) store(disk *oxide.Disk) string {
	return c.path("racks/rack/disks/" + disk.Id + ".disk")
}

// restored corrects the plugin's Secret.
func (c *cluster) restored(t *testing.T, key, value string) {
	t.Helper()
	c.setSecret(t, key, value)
	c.kubectl(t, "-n", namespace, "delete", "pods", "-l", "app=oxide-csi-controller", "--force", "--grace-period=0")
	c.rolledOut(t)
}

func run(t *testing.T, program string, args ...string) {
	t.Helper()
	_, err := output(exec.Command(program, args...))
	must(t, err)
}
