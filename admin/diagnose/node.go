// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package diagnose

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/hostexec"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/volumerecord"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/auto"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// Node is what [ExamineNode] looks at.
type Node struct {
	// Sources are the sources of the node's identity that are set up, in the order of their precedence.
	Sources  []auto.Source
	Devices  device.Roots
	MaxDisks int
	StateDir string
	// MountDirs are folders below which an orchestrator has volumes mounted. Those that do not exist are left out.
	MountDirs []string
	// Sockets are the sockets of the plugin: that of the service, and that of the registration, if it registers itself.
	Sockets []string
	// Proc is the folder /proc.
	Proc string
}

// ExamineNode examines the node that the process runs on. It only reads.
func ExamineNode(ctx context.Context, n Node) []orchestrator.Finding {
	e := &examination{area: "node"}
	e.identity(ctx, n.Sources)
	e.kernel(n)
	e.tools(ctx)
	e.disks(ctx, n)
	e.stateDir(n.StateDir)
	e.propagation(n)
	for _, socket := range n.Sockets {
		e.socket(ctx, socket)
	}
	e.selinux(n)
	return e.findings
}

// selinux shows the mode. A node plugin is privileged, and no mode keeps it from its work: docs/how-to/platforms.md.
func (e *examination) selinux(n Node) {
	text, err := os.ReadFile(filepath.Join(n.sys(), "fs/selinux/enforce"))
	switch {
	case err != nil:
		e.ok("SELinux", "off")
	case strings.TrimSpace(string(text)) == "0":
		e.ok("SELinux", "permissive")
	default:
		e.ok("SELinux", "enforcing; docs/how-to/platforms.md has what it denies to containers that are not privileged")
	}
}

func (n Node) sys() string {
	if n.Devices.Sys == "" {
		return "/sys"
	}
	return n.Devices.Sys
}

// identity asks every source, and compares the answers. The first that answers counts.
func (e *examination) identity(ctx context.Context, sources []auto.Source) {
	answers, ids := []string{}, map[string]bool{}
	var failures []string
	for _, source := range sources {
		instance, err := source.Provider.Instance(ctx)
		if err != nil {
			failures = append(failures, source.Name+": "+err.Error())
			continue
		}
		answers = append(answers, source.Name+" says "+instance.ID)
		ids[instance.ID] = true
	}
	switch {
	case len(ids) > 1:
		e.fail(
			"identity",
			"remove the wrong source: docs/how-to/identity.md",
			"the sources name different instances: %s",
			strings.Join(answers, ", "),
		)
	case len(ids) == 1:
		e.ok("identity", "%s", strings.Join(answers, ", "))
	default:
		e.fail(
			"identity",
			"set up one source: docs/how-to/identity.md",
			"no source responds: %s",
			strings.Join(failures, "; "),
		)
	}
}

func (e *examination) kernel(n Node) {
	release, err := os.ReadFile(filepath.Join(n.Proc, "sys/kernel/osrelease"))
	if err != nil {
		e.warn("kernel", "mount /proc into the container", "its release cannot be read: %s", err)
	} else {
		e.ok("kernel", "%s", strings.TrimSpace(string(release)))
	}
	if _, err := os.Stat(filepath.Join(n.sys(), "module/nvme")); err != nil {
		e.fail("NVMe driver", "load it: modprobe nvme; it is in the package of the kernel", "the kernel has no driver nvme")
		return
	}
	// The kernel gives a request that long before it resets the controller.
	timeout, err := os.ReadFile(filepath.Join(n.sys(), "module/nvme_core/parameters/io_timeout"))
	if err != nil {
		e.ok("NVMe driver", "nvme")
		return
	}
	e.ok("NVMe driver", "nvme, a request may take %s s", strings.TrimSpace(string(timeout)))
}

// tools are the programs that the plugin runs, with the argument for the version. Those for ext3, for btrfs and for
// encrypted volumes may be missing.
var tools = []struct {
	name, version string
	needed        bool
}{
	{"mkfs.ext4", "-V", true},
	{"e2fsck", "-V", true},
	{"resize2fs", "", true},
	{"mkfs.xfs", "-V", true},
	{"xfs_growfs", "-V", true},
	{"mount", "-V", true},
	{"blkid", "-V", true},
	{"wipefs", "-V", true},
	{"dd", "--version", true},
	{"mkfs.ext3", "-V", false},
	{"mkfs.btrfs", "-V", false},
	{"btrfs", "--version", false},
	{"cryptsetup", "--version", false},
	{"dmsetup", "--version", false},
}

func (e *examination) tools(ctx context.Context) {
	var found, absent []string
	for _, tool := range tools {
		path, err := exec.LookPath(tool.name)
		if err != nil && tool.needed {
			absent = append(absent, tool.name)
		}
		if err != nil {
			continue
		}
		version := path
		if tool.version != "" {
			if result, err := hostexec.Run(ctx, path, tool.version); err == nil {
				version = firstLine(result.Message())
			}
		}
		found = append(found, tool.name+" ("+version+")")
	}
	if len(absent) > 0 {
		e.fail(
			"tools",
			"install e2fsprogs, xfsprogs and util-linux, or use the plugin's image",
			"missing: %s",
			strings.Join(absent, ", "),
		)
	}
	e.ok("tools", "%s", strings.Join(found, ", "))
}

func firstLine(text string) string {
	text, _, _ = strings.Cut(strings.TrimSpace(text), "\n")
	return text
}

// disks looks at the NVMe disks of the guest.
func (e *examination) disks(ctx context.Context, n Node) {
	disks, err := n.Devices.Disks()
	if err != nil {
		e.fail("NVMe disks", "mount the host's /sys into the container", "%s", err)
		return
	}
	if len(disks) == 0 {
		e.warn(
			"NVMe disks",
			"check that this is an Oxide instance, and that the kernel has the driver nvme",
			"there are none",
		)
	}
	for _, disk := range disks {
		dev, err := n.Devices.ByNumber(disk.Number)
		if err == nil {
			_, err = os.Stat(dev.Path)
		}
		if errors.Is(err, fs.ErrNotExist) {
			e.fail("/dev", "mount the host's /dev into the container", "%s has no device node %s", disk.Name, dev.Path)
		}
		if state := n.Devices.ControllerState(disk.Name); state != "" && state != device.ControllerLive {
			e.fail("NVMe disks", "read the kernel's log", "the controller of %s (%s) is %s", disk.Name, disk.Serial, state)
		}
	}
	e.slots(n, disks)
	if refused, err := n.Devices.FunctionsNotReady(ctx); err == nil && len(refused) > 0 {
		e.fail(
			"NVMe functions",
			`look for "Duplicate cntlid" in the kernel's log, and detach one of two disks whose names share the first 20 bytes`,
			"the kernel has refused %s",
			strings.Join(refused, ", "),
		)
	}
}

// slots counts free places for disks, and volumes that nothing on this node uses.
func (e *examination) slots(n Node, disks []device.Disk) {
	used := map[string]bool{}
	for _, record := range (volumerecord.Store{StateDir: n.StateDir}).List() {
		used[record.Serial] = true
	}
	var idle []string
	for _, disk := range disks {
		if diskname.IsVolumeSerial(disk.Serial) && !used[disk.Serial] {
			idle = append(idle, disk.Serial)
		}
	}
	if free := n.MaxDisks - len(disks); free <= 0 {
		e.warn(
			"places for disks",
			"move a workload with a volume to another node; racks from release 18 on take --max-disks=12",
			"all %d are taken",
			n.MaxDisks,
		)
	} else {
		e.ok("places for disks", "%d of %d are free", free, n.MaxDisks)
	}
	if len(idle) > 0 {
		e.ok("disks that are not in use here", "%s: attached, and not staged", strings.Join(idle, ", "))
	}
}

func (e *examination) stateDir(dir string) {
	const looked = "state directory"
	info, err := os.Stat(dir)
	switch {
	case err != nil || !info.IsDir():
		e.warn(looked, "start the plugin, which makes it; it must survive reboots", "%s does not exist", dir)
	case unix.Access(dir, unix.W_OK) != nil:
		e.fail(looked, "make it writable for the plugin", "%s is not writable", dir)
	default:
		e.ok(looked, "%s", dir)
	}
}

// propagation looks whether a mount of the plugin reaches the host. Otherwise a volume is mounted, and its pod sees an
// empty folder.
func (e *examination) propagation(n Node) {
	file, err := os.Open(filepath.Join(n.Proc, "self/mountinfo"))
	if err != nil {
		e.fail("mount propagation", "mount /proc into the container", "%s", err)
		return
	}
	mounts, err := mountinfo.GetMountsFromReader(file, nil)
	if err := errors.Join(err, file.Close()); err != nil {
		e.fail("mount propagation", "mount /proc into the container", "%s", err)
		return
	}
	for _, m := range mounts {
		if orchestratorDir.MatchString(m.Mountpoint) && !slices.Contains(n.MountDirs, m.Mountpoint) {
			n.MountDirs = append(n.MountDirs, m.Mountpoint)
		}
	}
	for _, dir := range n.MountDirs {
		if _, err := os.Stat(dir); err != nil {
			continue
		}
		mount := mountOf(mounts, dir)
		if mount == nil || !strings.Contains(mount.Optional, "shared:") {
			e.fail(
				"mount propagation",
				"Kubernetes: set mountPropagation: Bidirectional for the container's mount; then, and for Nomad, make it shared on the host: mount --make-rshared",
				"%s is not a shared mount: volumes that are mounted there stay invisible to workloads",
				dir,
			)
			continue
		}
		e.ok("mount propagation", "%s is shared", dir)
	}
}

// orchestratorDir matches the folders that are mounted into the plugin's container, and in which orchestrators have
// volumes mounted: that of a Nomad client (deploy/nomad, stage_publish_base_dir), and that of a kubelet, which several
// distributions have at a place of their own.
var orchestratorDir = regexp.MustCompile(`/client/csi/(node|monolith)/[^/]+$|/kubelet$`)

// mountOf is the mount that a path is on: the last one of the longest path above it.
func mountOf(mounts []*mountinfo.Info, path string) (found *mountinfo.Info) {
	for _, m := range mounts {
		above := m.Mountpoint == "/" || m.Mountpoint == path || strings.HasPrefix(path, m.Mountpoint+"/")
		if above && (found == nil || len(m.Mountpoint) >= len(found.Mountpoint)) {
			found = m
		}
	}
	return found
}

func (e *examination) socket(ctx context.Context, path string) {
	info, err := os.Stat(path)
	switch {
	case err != nil:
		e.fail("socket", "start the plugin, and check its log", "%s does not exist", path)
		return
	case info.Mode().Type() != fs.ModeSocket:
		e.fail("socket", "remove it, and start the plugin", "%s is no socket", path)
		return
	}
	conn, err := new(net.Dialer).DialContext(ctx, "unix", path)
	switch {
	case errors.Is(err, unix.ECONNREFUSED):
		e.fail(
			"socket",
			"start the plugin, and check its log",
			"nothing listens on %s: it is left from a plugin that ended",
			path,
		)
	case err != nil:
		e.warn("socket", "repeat the command as root", "%s cannot be tried: %s", path, err)
	default:
		_ = conn.Close() // nothing was sent
		e.ok("socket", "%s", path)
	}
}
