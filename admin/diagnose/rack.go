// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package diagnose

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
	"github.com/oxidecomputer/oxide-csi-plugin/core/controller"
	"github.com/oxidecomputer/oxide-csi-plugin/core/detach"
	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// Limits above which the rack gets a warning.
const (
	clockLimit   = 30 * time.Second
	latencyLimit = time.Second
	// latencyCalls is how many calls measure the latency.
	latencyCalls = 10
	// restartLimit is longer than a planned restart takes.
	restartLimit = time.Hour
	// keptLimit is how old the last renewal of a restart's record may be. A controller that carries the restart out renews
	// it four times a minute.
	keptLimit  = 5 * time.Minute
	tokenLimit = 7 * 24 * time.Hour
	// quotaPart is the part of the quota that is left when there is a warning: a tenth.
	quotaPart = 10
)

// Clock compares the rack's clock with this host's by the Date header of answers. Its resolution is a second.
type Clock struct {
	Next http.RoundTripper

	mu     sync.Mutex
	seen   bool
	offset time.Duration
}

// RoundTrip implements [http.RoundTripper].
func (c *Clock) RoundTrip(req *http.Request) (*http.Response, error) {
	sent := time.Now()
	resp, err := c.Next.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	if date, parseErr := http.ParseTime(resp.Header.Get("Date")); parseErr == nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		middle := sent.Add(time.Since(sent) / 2)
		c.seen, c.offset = true, date.Sub(middle).Round(time.Second)
	}
	return resp, nil
}

// difference is how far the rack's clock is ahead. It returns false if no answer had a Date.
func (c *Clock) difference() (time.Duration, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.offset, c.seen
}

// Disks are the disks of racks, as [ExamineRack] has seen them. Leaving are the IDs of the volumes whose disk this
// cluster detaches later than it was asked to.
type Disks struct {
	All     []rack.Disk
	Leaving []string
}

// ExamineAttachments compares the attachments that an orchestrator shows with the disks of the racks. A disk that is
// not among them is not judged: its rack may not have answered. If this machine has a disk, guest tells whether it is
// mounted here; guest is nil if this machine cannot be a node.
func ExamineAttachments(
	ctx context.Context, area string, attachments []orchestrator.Attachment, disks Disks, guest Guest,
) []orchestrator.Finding {
	const looked = "disks of claims"
	e := &examination{area: area}
	found := map[string]rack.Disk{}
	for _, disk := range disks.All {
		if disk.Unknown == "" {
			found[disk.VolumeID] = disk
		}
	}
	settled := []rack.State{rack.Detached, rack.Attached}
	used, agree := 0, 0
	var unused []string
	for _, a := range attachments {
		id, _ := diskname.ParseID(a.VolumeID)
		disk := found[id]
		if a.By != "" {
			used++
		}
		switch {
		case !slices.Contains(settled, disk.State):
		case a.By == "":
			if disk.State == rack.Attached && !slices.Contains(disks.Leaving, id) {
				unused = append(unused, a.Claim+" to "+disk.InstanceID)
			}
		default:
			if text := disagreement(ctx, a, disk, guest); text != "" {
				e.fail(looked, "oxide-csi explain "+a.Claim, "%s is used by %s%s", a.Claim, a.By, text)
			} else {
				agree++
			}
		}
	}
	if used > 0 && len(e.findings) == 0 {
		e.ok(looked, "of %d claims of workloads that run, %d have their disk where they run", used, agree)
	}
	if len(unused) > 0 {
		e.warn("disks without a VolumeAttachment", "if doctor still says so in a minute: oxide-csi volume detach, once "+
			"the disk is mounted nowhere on its instance", "attached on the rack: %s", orchestrator.Some(unused))
	}
	return e.findings
}

// disagreement says how the disk contradicts a workload that uses it, or "" if both agree.
func disagreement(ctx context.Context, a orchestrator.Attachment, disk rack.Disk, guest Guest) string {
	node, _ := diskname.ParseID(a.NodeID)
	switch {
	case disk.State == rack.Detached:
		return ", and its disk is detached"
	case node != "" && disk.InstanceID != node:
		return fmt.Sprintf(" on instance %s, and its disk is attached to %s", node, disk.InstanceID)
	case a.Runs && node != "" && notMounted(ctx, guest, disk):
		return ", and nothing of its disk is mounted on this node"
	}
	return ""
}

// notMounted reports whether this machine has a disk, and has not mounted it. Of an encrypted disk another device is
// mounted.
func notMounted(ctx context.Context, guest Guest, disk rack.Disk) bool {
	described, _ := rack.ParseDescription(disk.Description)
	return guest != nil && described.LUKS == 0 &&
		slices.ContainsFunc(guest.Steps(ctx, disk.Name, disk.InstanceID), func(s orchestrator.TraceStep) bool {
			return s.State == noMounts || s.State == noDevice
		})
}

// ExamineRack examines a rack, and returns its disks as far as they were read. clock has seen the client's answers; it
// may be nil. of is the orchestrator whose words the next steps have, as in [NextFor]. It only reads, and reads each
// list once.
func ExamineRack(
	ctx context.Context,
	client *rack.Client,
	clock *Clock,
	cluster, of string,
	now time.Time,
) ([]orchestrator.Finding, Disks) {
	e := &examination{area: "rack " + client.Name(), of: of}
	project, err := client.Check(ctx)
	if err != nil {
		e.fail("API, certificate, token and project", e.nextStep(err), "%s", rack.WithoutAdvice(err))
		return e.findings, Disks{}
	}
	e.ok(
		"API, certificate, token and project",
		"API version %s, project %q (%s)",
		client.APIVersion(),
		client.ProjectName(),
		project,
	)
	e.latency(ctx, client)
	if offset, seen := clock.differenceOrNone(); seen && offset.Abs() > clockLimit {
		e.warn(
			"clock",
			"set this host's clock by NTP: ages of leases and snapshots depend on it",
			"the rack is %s ahead of this host",
			offset,
		)
	} else if seen {
		e.ok("clock", "differs by %s", offset)
	}
	e.quota(ctx, client)
	e.token(ctx, client, now)
	e.role(ctx, client)
	disks := e.contents(ctx, client, cluster, now)
	return e.findings, disks
}

// differenceOrNone is [Clock.difference], also without a clock.
func (c *Clock) differenceOrNone() (time.Duration, bool) {
	if c == nil {
		return 0, false
	}
	return c.difference()
}

// nextStep is the next step after an error of the rack.
func (e *examination) nextStep(err error) string {
	row := cmp.Or(fault.Of(err), Unknown)
	if row == fault.RackUnavailable || row == fault.RackFailed { // whose next step is doctor
		return "see that the host is the rack's API and can be reached from here; then ask the rack's operator"
	}
	return NextFor(row, e.of)
}

func (e *examination) latency(ctx context.Context, client *rack.Client) {
	var took []time.Duration
	for range latencyCalls {
		start := time.Now()
		if err := client.ConfirmProject(ctx); err != nil {
			e.fail("latency", e.nextStep(err), "%s", err)
			return
		}
		took = append(took, time.Since(start))
	}
	slices.Sort(took)
	median, worst := took[len(took)/2].Round(time.Millisecond), took[len(took)-1].Round(time.Millisecond)
	if worst > latencyLimit {
		e.warn(
			"latency",
			"look at the network between this host and the rack, and at the rack's load",
			"p50 %s, worst of %d %s",
			median,
			latencyCalls,
			worst,
		)
		return
	}
	e.ok("latency", "p50 %s, worst of %d %s", median, latencyCalls, worst)
}

func (e *examination) quota(ctx context.Context, client *rack.Client) {
	quota, used, err := client.Storage(ctx)
	switch {
	case err != nil:
		e.fail("quota", e.nextStep(err), "%s", err)
	case used >= quota:
		e.fail("quota", NextFor(fault.QuotaExhausted, e.of), "%s of %s is used", config.Size(used), config.Size(quota))
	case quota-used < quota/quotaPart:
		e.warn("quota", NextFor(fault.QuotaExhausted, e.of), "%s of %s is used", config.Size(used), config.Size(quota))
	default:
		e.ok("quota", "%s of %s is used", config.Size(used), config.Size(quota))
	}
}

// token looks at when the tokens of the user expire. The rack does not tell which of them is ours.
func (e *examination) token(ctx context.Context, client *rack.Client, now time.Time) {
	tokens, err := client.AccessTokens(ctx)
	if err != nil {
		e.warn("token", "read the token's expiry in the rack's console", "its expiry cannot be read: %s", err)
		return
	}
	var first time.Time
	for _, token := range tokens {
		if !token.Expires.IsZero() && (first.IsZero() || token.Expires.Before(first)) {
			first = token.Expires
		}
	}
	switch {
	case first.IsZero():
		e.ok("token", "does not expire")
	case first.Sub(now) < tokenLimit:
		e.warn(
			"token",
			"make a new token and put it into the token file",
			"a token of this user expires at %s",
			first.UTC().Format(time.RFC3339),
		)
	default:
		e.ok("token", "no token of this user expires before %s", first.UTC().Format(time.RFC3339))
	}
}

// role looks whether the token's user may do what the plugin does.
func (e *examination) role(ctx context.Context, client *rack.Client) {
	const looked = "role on the project"
	role, err := client.Role(ctx)
	switch {
	case err != nil:
		e.warn(looked, "see the access of the project in the rack's console", "it cannot be read: %s", err)
	case role < rack.LimitedCollaborator:
		e.fail(looked, NextFor(fault.RoleTooLow, e.of), "%s: the token may not create, attach and delete disks", role)
	default:
		e.ok(looked, "%s: the token may create, attach and delete disks", role)
	}
}

// hotplug looks for a disk that was attached while its instance ran. A rack does not tell whether it can do that. But a
// disk that is younger than the start of its instance proves it.
func (e *examination) hotplug(ctx context.Context, client *rack.Client, disks []rack.Disk) {
	const looked = "hot-plug"
	instances, err := client.Instances(ctx)
	if err != nil {
		e.fail(looked, e.nextStep(err), "%s", err)
		return
	}
	started := map[string]time.Time{}
	for _, instance := range instances {
		if instance.RunState == rack.Running {
			started[instance.ID] = instance.RunStateSince
		}
	}
	for _, disk := range disks {
		start, runs := started[disk.InstanceID]
		if runs && disk.State == rack.Attached && disk.Created.After(start) {
			e.ok(looked, "yes: disk %s is younger than the start of instance %s, which has it", disk.ID, disk.InstanceID)
			return
		}
	}
	e.ok(looked, "not known: no instance has a disk that is younger than its start; the first attach shows it")
}

// contents lists disks, snapshots and records.
func (e *examination) contents(
	ctx context.Context, client *rack.Client, cluster string, now time.Time,
) Disks {
	all, err := readContents(ctx, []*rack.Client{client})
	if err != nil {
		e.fail("disks, snapshots and records", e.nextStep(err), "%s", err)
		return Disks{}
	}
	c, ours, attached := all[0], 0, 0
	owners := controller.Adoptions(c.records)
	isOurs := func(disk rack.Disk) bool { return ownedBy(disk.Description, owners[disk.VolumeID]) == cluster }
	var faulted, halfDeleted, unknown []string
	for _, disk := range c.disks {
		if disk.Unknown != "" { // also one that was made by hand: it may be a volume
			unknown = append(unknown, fmt.Sprintf("%s has the %s", nameOnRack(disk), disk.Unknown))
		}
		if !isOurs(disk) {
			continue
		}
		ours++
		if disk.InstanceID != "" {
			attached++
		}
		if disk.State == rack.Faulted {
			faulted = append(faulted, nameOnRack(disk))
		}
	}
	for _, disk := range c.halfDeleted {
		if isOurs(disk) {
			halfDeleted = append(halfDeleted, nameOnRack(disk))
		}
	}
	e.ok("disks", "%d of this cluster, %d of them attached; %d in the project", ours, attached, len(c.disks))
	if len(faulted) > 0 {
		e.fail("faulted disks", "report the disks to the operator of the rack", "%s", strings.Join(faulted, ", "))
	}
	for _, snapshot := range c.snapshots {
		if snapshot.CheckKnown() != nil {
			unknown = append(
				unknown,
				fmt.Sprintf("snapshot %q (%s) has the state %q", snapshot.Name, snapshot.ID, snapshot.State),
			)
		}
	}
	if len(unknown) > 0 {
		e.warn("unknown states", NextFor(fault.StateUnknown, e.of), "%s", strings.Join(unknown, ", "))
	}
	if len(halfDeleted) > 0 {
		e.warn(
			"half-deleted disks",
			"delete these disks on the rack: no volume uses them",
			"%s",
			strings.Join(halfDeleted, ", "),
		)
	}
	e.hotplug(ctx, client, c.disks)
	e.records(c, cluster, now)
	return Disks{c.disks, slices.Collect(maps.Keys(detach.Parse(c.records, cluster).Instances()))}
}

// nameOnRack names a disk for the rack's operator. The rack does not know the IDs of volumes.
func nameOnRack(disk rack.Disk) string { return fmt.Sprintf("%q (%s)", disk.Name, disk.ID) }

// records looks for planned restarts that have not ended, and for records of disks that are gone.
func (e *examination) records(c contents, cluster string, now time.Time) {
	planned := 0
	restarts, _ := record.Restarts.In(c.records, cluster)
	for _, r := range restarts {
		planned++
		if age := now.Sub(r.Stored.Modified); age > keptLimit {
			e.warn(
				"planned restarts",
				"see that a controller with --attach-mode=restart runs and reaches the rack: it takes the restart over",
				"no controller carries out the restart of instance %s: its record %s was last renewed %s ago",
				r.Instance, r.Stored.Name, age.Round(time.Minute),
			)
		} else if age := now.Sub(r.Stored.Created); age > restartLimit {
			e.warn(
				"planned restarts",
				"see the controller's log, and that the instance runs: oxide-csi volume list shows why it waits",
				"the restart of instance %s has begun %s ago and has not ended",
				r.Instance,
				age.Round(time.Minute),
			)
		}
	}
	e.ok("planned restarts", "%d under way", planned)
	for _, err := range record.Unread(c.records, cluster) {
		e.warn("records", fault.Of(err).Next, "%v", err)
	}
	e.namesTaken(c, cluster)
	if left := recordOrphans(c, cluster); len(left) > 0 {
		e.warn("records", "oxide-csi orphans --delete", "%d records of this cluster are of disks that are gone", len(left))
	}
}

// namesTaken looks for disks that took the name of a volume's disk while an expansion had deleted the old one. A create
// that ended in the middle leaves such a disk.
func (e *examination) namesTaken(c contents, cluster string) {
	intents, _ := record.Intents.In(c.records, "")
	decisions, _ := record.Replacements.In(c.records, "")
	for _, i := range intents {
		committed := slices.ContainsFunc(decisions, func(d record.Replacement) bool {
			return d.Committed && d.Attempt == i.Attempt
		})
		for _, disk := range c.disks {
			if committed && i.Cluster == cluster && disk.Name == i.DiskName && disk.ID != i.Disk && disk.VolumeID != i.Volume {
				e.fail("names of disks", NextFor(fault.NameTaken, e.of),
					"disk %s took the name of volume %s, which cannot finish its expansion", disk.ID, i.Volume)
			}
		}
	}
}
