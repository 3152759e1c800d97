// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package diagnose

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// Facts are what is known of one volume. The verdict follows from them alone.
type Facts struct {
	orchestrator.Trace
	// Disk and Instance are nil if they were not found or no rack was asked. Instance is the node that needs the volume,
	// or else the one that has the disk.
	Disk     *rack.Disk
	Rack     string
	Instance *rack.Instance
	// DiskGone and InstanceGone say that the rack has proved that they do not exist.
	DiskGone, InstanceGone bool
	// Unasked says why the orchestrator could not be asked. The verdict then follows from the rack alone.
	Unasked string
	// NotMounted says that this machine has the disk, and that nothing of it is mounted here.
	NotMounted bool
	// NoDevice says that this machine is the instance of the attached disk, and does not have the disk.
	NoDevice bool
	// RackError is the message of the error with which the rack was read, or empty.
	RackError string
}

func (f Facts) has(condition orchestrator.TraceCondition) bool {
	return slices.Contains(f.Conditions, condition)
}

func (f Facts) messages() []string {
	texts := []string{f.RackError}
	for _, m := range f.Messages {
		texts = append(texts, m.Text)
	}
	return texts
}

// blocked finds the volume and the instance in the message about a disk that is still attached, which may be that of
// another volume: the controller's waitsForDetachError.
var blocked = regexp.MustCompile(`disk "[^"]+" \(([0-9a-f-]{36})\) was given up by instance ([0-9a-f-]{36})`)

// fill replaces the placeholders of a text.
func (f Facts) fill(text string) string {
	volume, disk, instance := cmp.Or(f.VolumeID, f.CSIName), "of the volume", f.NodeID
	if f.Orchestrator == orchestrator.None {
		volume = cmp.Or(f.CSIName, f.VolumeID) // as it was typed
	}
	if f.Disk != nil {
		disk = nameOnRack(*f.Disk)
	}
	if f.Instance != nil {
		instance = fmt.Sprintf("%q (%s)", f.Instance.Name, f.Instance.ID)
	}
	node := f.Node
	if node == "" && f.Instance != nil {
		node = f.Instance.Name
	}
	holder, blocker := "that has it", cmp.Or(volume, "VOLUME")
	if f.Disk != nil && f.Disk.InstanceID != "" {
		holder = f.Disk.InstanceID
	}
	if named := blocked.FindStringSubmatch(strings.Join(f.messages(), "\n")); named != nil {
		blocker, holder = named[1], named[2]
	}
	namespace, _, _ := strings.Cut(f.Claim, "/")
	return strings.NewReplacer(
		"{volume}", cmp.Or(volume, "of the claim"), "{disk}", disk, "{instance}", cmp.Or(instance, "of the node"),
		"{holder}", holder, "{blocker}", blocker, "{node}", cmp.Or(node, "of the workload"),
		"{claim}", cmp.Or(f.Claim, "of the workload"), "{namespace}", cmp.Or(namespace, "NAMESPACE"),
		"{pod}", f.pod(), "{allocation}", f.allocation(),
	).Replace(text)
}

// pod is the pod as arguments of kubectl.
func (f Facts) pod() string {
	if name, ok := strings.CutPrefix(f.Workload, "pod "); ok {
		namespace, name, _ := strings.Cut(name, "/")
		return fmt.Sprintf("pod -n %s %s", namespace, name)
	}
	return "pod -n NAMESPACE POD"
}

// allocation is the allocation as arguments of nomad.
func (f Facts) allocation() string {
	label, ok := strings.CutPrefix(f.Workload, "allocation ")
	if !ok {
		return "ALLOCATION"
	}
	id, _, _ := strings.Cut(label, " ")
	if namespace, _, ok := strings.Cut(f.Claim, "/"); ok && namespace != "default" {
		return "-namespace=" + namespace + " " + id // Nomad's commands find it in its namespace only
	}
	return id
}

// Explanation is the answer to an operator's question about one volume.
type Explanation struct {
	// Reason is the permanent word of the verdict: the heading in docs/reference/errors.md.
	Reason  string `json:"reason"`
	Verdict string `json:"verdict"`
	// Broken is the link of the chain that is broken, or empty.
	Broken string `json:"brokenLink,omitempty"`
	Actor  string `json:"whoActs"`
	Next   string `json:"next"`
	// Chain are all links, from the claim to the workload.
	Chain    []orchestrator.TraceStep    `json:"chain"`
	Messages []orchestrator.TraceMessage `json:"messages"`
}

// Verdict returns the first fault of the table that the facts show.
func Verdict(f Facts) *fault.Row {
	if i := slices.IndexFunc(fault.Table, f.show); i >= 0 {
		return fault.Table[i]
	}
	if f.RackError == "" && len(f.Messages) == 0 {
		return Works
	}
	return Unknown
}

// Guest is the machine that the process runs on, as far as it may be the node of a volume.
type Guest interface {
	// Steps returns the links between the instance and the workload: device, filesystem and mounts. There are none if
	// this guest does not have the disk and is not known to be that instance.
	Steps(ctx context.Context, diskName, instanceID string) []orchestrator.TraceStep
	// Waits returns what a controller on this machine says that the volume waits for, and the node that it shall be
	// attached to. Only the controller knows that.
	Waits(ctx context.Context, volumeID string) (node string, messages []orchestrator.TraceMessage)
}

// find returns the facts about a volume. Of the volumes of a workload, these are the facts about the one that it waits
// for.
func find(
	ctx context.Context, subject orchestrator.Subject, tracer orchestrator.Tracer, racks []*rack.Client, cluster string,
) (Facts, error) {
	f, err := collect(ctx, subject, tracer, racks, cluster)
	if err == nil && f.Unasked != "" && f.Disk != nil && subject.VolumeID != "" && subject.VolumeID != f.VolumeID {
		// The subject is the ID of a disk, as errors name it. The orchestrator knows only the ID of the volume.
		subject.VolumeID = f.VolumeID
		f, err = collect(ctx, subject, tracer, racks, cluster)
	}
	if err != nil {
		return Facts{}, err
	}
	if tracer == nil && f.Disk == nil && f.RackError == "" {
		return Facts{}, fmt.Errorf("volume %s of cluster %q %w on any rack: check both names",
			cmp.Or(subject.VolumeID, subject.Name), cluster, orchestrator.ErrNotFound)
	}
	for _, other := range f.Others {
		if Verdict(f) != Works && Verdict(f) != fault.NotStartedYet {
			break // the workload waits for this volume
		}
		if next, err := collect(ctx, other, tracer, racks, cluster); err == nil && Verdict(next) != Works {
			f = next
		}
	}
	return f, nil
}

// Explain follows a volume through the orchestrator, unless it is nil, and the racks. It changes nothing. Of the node
// it reads what the orchestrator repeats of the node plugin's answers: that needs no right to run or reach anything
// there. If this machine is the node, it also asks guest, which is nil if this machine cannot be a node.
func Explain(
	ctx context.Context,
	subject orchestrator.Subject,
	tracer orchestrator.Tracer,
	racks []*rack.Client,
	cluster string,
	guest Guest,
) (Explanation, error) {
	f, err := find(ctx, subject, tracer, racks, cluster)
	if err != nil {
		return Explanation{}, err
	}
	if guest != nil && f.VolumeID != "" {
		node, messages := guest.Waits(ctx, f.VolumeID)
		f.Node, f.Messages = cmp.Or(f.Node, node), append(f.Messages, messages...)
	}
	steps := f.guestSteps(ctx, guest)
	seen := func(state string) bool {
		return slices.ContainsFunc(steps, func(s orchestrator.TraceStep) bool { return s.State == state })
	}
	f.NotMounted, f.NoDevice = seen(noMounts), seen(noDevice)
	row := Verdict(f)
	verdict := f.fill(row.Verdict)
	if messages := f.allMessages(); row == Unknown && len(messages) > 0 {
		verdict = f.fill("volume {volume} waits: ") + slices.MaxFunc(messages, newer).Text
	}
	return Explanation{
		Reason: row.Word, Verdict: verdict, Broken: row.Link, Actor: row.Actor,
		Next: f.fill(NextFor(row, f.Orchestrator)), Chain: f.chain(steps), Messages: f.allMessages(),
	}, nil
}

func newer(a, b orchestrator.TraceMessage) int { return a.Last.Compare(b.Last) }

// collect asks the orchestrator and the racks.
func collect(
	ctx context.Context, subject orchestrator.Subject, tracer orchestrator.Tracer, racks []*rack.Client, cluster string,
) (Facts, error) {
	f := Facts{Trace: orchestrator.Trace{VolumeID: subject.VolumeID, CSIName: subject.Name}}
	if tracer != nil {
		trace, err := tracer.Trace(ctx, subject)
		if err != nil && (subject.Claim != "" || subject.Pod != "" || len(racks) == 0) {
			return Facts{}, err
		}
		if err == nil {
			f.Trace = trace
		} else {
			f.Unasked = err.Error()
		}
	}
	f.readRacks(ctx, racks, cluster)
	return f, nil
}

// readRacks reads the disk and the instance. Every rack is asked, until one has the disk.
func (f *Facts) readRacks(ctx context.Context, racks []*rack.Client, cluster string) {
	gone := 0
	for _, client := range racks {
		if _, err := client.Check(ctx); err != nil {
			f.RackError = fault.Message(err)
			return
		}
		disk, err := f.lookUp(ctx, client, cluster)
		if errors.Is(err, rack.ErrNotFound) {
			// A token that has lost its role gets the same answer.
			if unconfirmed := client.ConfirmProject(ctx); unconfirmed != nil {
				err = unconfirmed
			}
		}
		if errors.Is(err, rack.ErrUnknown) {
			f.Disk, f.Rack, f.VolumeID = &disk, client.Name(), disk.VolumeID
		}
		switch {
		case errors.Is(err, rack.ErrNotFound):
			gone++
		case err != nil:
			f.RackError = fault.Message(err)
			return
		case f.Disk == nil && disk.VolumeID != "":
			f.Disk, f.Rack, f.VolumeID = &disk, client.Name(), disk.VolumeID
		}
	}
	f.DiskGone = f.VolumeID != "" && f.Disk == nil && gone > 0 && gone == len(racks)
	f.readInstance(ctx, racks)
}

// lookUp looks up the disk of the volume. It also takes the ID of a disk: that of a grown volume is not the volume's.
func (f *Facts) lookUp(ctx context.Context, client *rack.Client, cluster string) (rack.Disk, error) {
	if id, ok := diskname.ParseID(f.VolumeID); ok {
		disk, err := client.Disk(ctx, id)
		if errors.Is(err, rack.ErrNotFound) {
			if disk, err = client.DiskByID(ctx, rack.DiskID(id)); err == nil {
				return client.Disk(ctx, disk.VolumeID)
			}
		}
		return disk, err
	}
	if f.CSIName == "" || f.VolumeID != "" {
		return rack.Disk{}, nil
	}
	disk, err := client.DiskByName(ctx, diskname.ForVolume(cluster, f.CSIName))
	if errors.Is(err, rack.ErrNotFound) {
		return rack.Disk{}, nil // it need not exist yet
	}
	return disk, err
}

func (f *Facts) readInstance(ctx context.Context, racks []*rack.Client) {
	id, ok := diskname.ParseID(f.NodeID)
	if !ok && f.Disk != nil {
		id = f.Disk.InstanceID
	}
	gone := 0
	for _, client := range racks {
		if id == "" {
			return
		}
		instance, err := client.Instance(ctx, id)
		if errors.Is(err, rack.ErrNotFound) {
			if unconfirmed := client.ConfirmProject(ctx); unconfirmed != nil {
				err = unconfirmed
			}
		}
		switch {
		case err == nil:
			f.Instance = &instance
			return
		case errors.Is(err, rack.ErrNotFound):
			gone++
		default:
			f.RackError = fault.Message(err)
		}
	}
	f.InstanceGone = gone > 0 && gone == len(racks)
}

// noMounts is the state of a disk without mounts, noDevice that of an attached disk that its guest lacks.
const (
	noMounts = "none"
	noDevice = "missing"
)

// guestSteps returns the links between the instance and the workload. They can be seen only on the instance itself.
// Elsewhere one link says so.
func (f Facts) guestSteps(ctx context.Context, guest Guest) []orchestrator.TraceStep {
	if f.Disk == nil || f.Disk.InstanceID == "" {
		return nil
	}
	if guest != nil {
		if steps := guest.Steps(ctx, f.Disk.Name, f.Disk.InstanceID); len(steps) > 0 {
			return steps
		}
	}
	return []orchestrator.TraceStep{{
		Link: "device", Object: "device in the guest of " + f.Disk.InstanceID,
		State: "not read: run explain on that instance",
	}}
}

// chain puts the rack's links and those of the node's guest between those of the orchestrator.
func (f Facts) chain(guest []orchestrator.TraceStep) []orchestrator.TraceStep {
	var chain, after []orchestrator.TraceStep
	for _, step := range f.Steps {
		if step.Link == "node" || step.Link == "workload" {
			after = append(after, step)
			continue
		}
		chain = append(chain, step)
	}
	switch {
	case f.Disk != nil:
		state := string(f.Disk.State)
		if f.Disk.InstanceID != "" {
			state += " to instance " + f.Disk.InstanceID
		}
		chain = append(chain, orchestrator.TraceStep{
			Link: "disk", Object: fmt.Sprintf("disk %s of rack %s", f.Disk.Name, f.Rack), State: state, Since: f.Disk.Created,
		})
	case f.DiskGone:
		chain = append(chain, orchestrator.TraceStep{
			Link: "disk", Object: "disk of volume " + f.VolumeID, State: "does not exist",
		})
	}
	switch {
	case f.Instance != nil:
		chain = append(chain, orchestrator.TraceStep{
			Link: "instance", Object: "instance " + f.Instance.Name, State: f.Instance.RunState, Since: f.Instance.RunStateSince,
		})
	case f.InstanceGone:
		chain = append(
			chain,
			orchestrator.TraceStep{Link: "instance", Object: "instance " + f.NodeID, State: "does not exist"},
		)
	}
	return slices.Concat(chain, guest, after)
}

func (f Facts) allMessages() []orchestrator.TraceMessage {
	messages := slices.Clone(f.Messages)
	if f.RackError != "" {
		messages = append(messages, orchestrator.TraceMessage{Link: "rack", Text: f.RackError})
	}
	if f.Unasked != "" {
		messages = append(messages, orchestrator.TraceMessage{Link: "orchestrator", Text: "it was not asked: " + f.Unasked})
	}
	return messages
}
