// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package diagnose

import (
	"path"
	"regexp"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/expand"
	"github.com/oxidecomputer/oxide-csi-plugin/core/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/core/hostexec"
	"github.com/oxidecomputer/oxide-csi-plugin/core/luks"
	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/restart"
	"github.com/oxidecomputer/oxide-csi-plugin/core/statefile"
	"github.com/oxidecomputer/oxide-csi-plugin/core/volumelock"
	"github.com/oxidecomputer/oxide-csi-plugin/core/volumerecord"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// What several errors need.
const (
	endsAlone = "Nothing: the orchestrator repeats the call."
	repair    = "Repair the folder `--state-dir` of the node: it must be writable, and its disk must have room."
	identity  = "[Who am I](identity.md#what-each-failure-looks-like) has each message."
)

// pageErrors are the errors of the plugin's answers, in the order of core's table of codes: a test of core looks for
// each error of that table on the page. Next says what to do. It is empty for an error that shows a symptom.
var pageErrors = []struct {
	err  error
	next string
}{
	{rack.ErrUnauthenticated, ""},
	{rack.ErrForbidden, ""},
	{rack.ErrProject, ""},
	{rack.ErrNotFound, "The message names what does not exist. `oxide-csi orphans` lists volumes without a disk."},
	{rack.ErrSize, "Ask for a size that the rack makes: [limits](../reference/limits.md)."},
	{rack.ErrCapacity, ""},
	{rack.ErrUnavailable, ""},
	{rack.ErrFormat, "Upgrade the plugin again: [upgrade](upgrade.md). Nothing was changed."},
	{rack.ErrUnknown, ""},
	{rack.ErrConflict, endsAlone},
	{rack.ErrInternal, ""},
	{rack.ErrBusy, endsAlone + " If the disk stays in this state, tell the operator of the rack its ID."},
	{rack.ErrRefused, "The rack's own words follow in the message. Tell them to the operator of the rack."},
	{expand.ErrOnlySnapshot, ""},
	{expand.ErrNameTaken, ""},
	{expand.ErrAttached, "As for [ExpansionWaits](#expansionwaits)."},
	{expand.ErrTakenBack, "Nothing: the volume keeps its size. It grows when no workload uses it."},
	{expand.ErrUnderWay, endsAlone},
	{rack.ErrReplaced, ""},
	{expand.ErrDeleted, "Nothing: the volume does not exist any more."},
	{expand.ErrNoRoom, ""},
	{restart.ErrPlanned, ""},
	{hostexec.ErrMissing, ""},
	{device.ErrNotFound, endsAlone + " If it lasts for minutes, run `oxide-csi doctor` on the node."},
	{device.ErrAmbiguous, ""},
	{
		device.ErrMismatch,
		"Nothing was changed. Let the orchestrator detach and attach the volume. If it comes back, report it.",
	},
	{device.ErrInUse, ""},
	{device.ErrNotBlank, ""},
	{device.ErrNoAnswer, ""},
	{device.ErrUnreadable, "Read the kernel's log of the node, and ask the operator of the rack about the disk."},
	{
		filesystem.ErrOption,
		"Correct the class: [parameters](../reference/parameters.md), [mount flags](../reference/mount-flags.md).",
	},
	{filesystem.ErrUnsupported, "Use ext4, ext3, xfs or btrfs: [parameters](../reference/parameters.md)."},
	{
		mount.ErrFormat,
		"The message has the words of mkfs. Correct `mkfsOptions` if they are the cause. The disk was blank.",
	},
	{mount.ErrDamaged, ""},
	{mount.ErrChecking, ""},
	{
		mount.ErrGrow,
		"The message has the program's words. The volume works with its old size, and growing is tried again.",
	},
	{mount.ErrMount, "The message has the kernel's words. Correct the mount flags if they are the cause."},
	{statefile.ErrFolder, repair},
	{mount.ErrBusy, "End the process, or unmount the mount, that the message names."},
	{mount.ErrForeign, "Look at the path that the message names, and remove what is there by hand."},
	{luks.ErrPassphrase, ""},
	{luks.ErrHeader, "Restore the copy of the header: [encryption](encrypt-volumes.md#keep-the-header)."},
	{luks.ErrNoDeviceMapper, "Load `dm_crypt` on the node: [encryption](encrypt-volumes.md#what-a-node-needs)."},
	{luks.ErrBusy, "End the process, or the device, that the message names."},
	{luks.ErrMemory, ""},
	{luks.ErrCryptsetup, endsAlone + " The message has the words of cryptsetup."},
	{
		volumerecord.ErrUnreadable,
		"The message names the file. Keep a copy of it, and report it: the node may hold the volume.",
	},
	{volumelock.ErrHeld, endsAlone + " The program is an mkfs or e2fsck that must not be interrupted."},
	{volumelock.ErrNodeHeld, endsAlone + " One key at a time is derived on a node, because it takes much memory."},
	{metadata.ErrNotReady, identity},
	{metadata.ErrConflict, identity},
	{metadata.ErrInvalid, identity},
}

// link is a link of the page.
var link = regexp.MustCompile(`\[[^]]+\]\(([^)]+)\)`)

// nextForError returns what to do about an error that shows no symptom. It is empty if no message has such an error.
func (f Facts) nextForError() string {
	for _, e := range pageErrors {
		if e.next != "" && f.says(e.err.Error()) {
			return link.ReplaceAllStringFunc(e.next, func(of string) string {
				return path.Join("docs/how-to", link.FindStringSubmatch(of)[1])
			})
		}
	}
	return ""
}
