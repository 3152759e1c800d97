// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"
)

// step is one step of the story.
type step struct {
	says string
	acts []action
}

// action is one thing that happens in a step: a command, an act of an instance's owner, or a look from outside. It
// returns the lines that tell it, or none. A nil action is left out.
type action func(ctx context.Context) (line string, err error)

// stepTimeout is how long a step may take.
const stepTimeout = 2 * time.Minute

// story is the life of two volumes. Without hot-plug a disk changes only while its instance is stopped: the plugin
// restarts node-a once for both volumes, and the owner of the instances stops them before a volume leaves.
func (d *demo) story() []step {
	a, b := d.nodes[0], d.nodes[1]
	steps := []step{
		{"Make two volumes.", []action{
			d.types("oxide-csi volume create orders --size=1GiB"),
			d.types("oxide-csi volume create photos --size=1GiB"),
			d.lists("orders 1 GiB free, photos 1 GiB free"),
		}},
		{
			d.says("Attach both to node-a. It runs, so the plugin restarts it, once for both.",
				"Attach both to node-a, while it runs."),
			[]action{
				d.typesAtOnce(
					"oxide-csi volume attach orders --node=node-a --wait",
					"oxide-csi volume attach photos --node=node-a --wait",
				),
				d.restarted(a),
				d.lists("orders 1 GiB on node-a, photos 1 GiB on node-a"),
			},
		},
		{"Mount orders, and write a file.", []action{
			d.typesOn(a, "oxide-csi volume mount orders data"),
			d.measures(a, 1),
			d.writes(a),
		}},
		{"Take a snapshot of orders.", []action{
			d.types("oxide-csi snapshot create monday --volume=orders"),
			d.lists("orders 1 GiB on node-a, photos 1 GiB on node-a, snapshot monday"),
		}},
		{d.says("Shut node-a down, and detach both. A running instance keeps its disks.",
			"Detach both, while node-a runs."), []action{
			d.typesOn(a, "oxide-csi volume unmount orders data"),
			d.shutsDown(a),
			d.types("oxide-csi volume detach orders --node=node-a --unmounted"),
			d.types("oxide-csi volume detach photos --node=node-a --unmounted"),
			d.lists("orders 1 GiB free, photos 1 GiB free, snapshot monday"),
		}},
		{"Make orders larger.", []action{
			d.types("oxide-csi volume expand orders --size=2GiB"),
			d.lists("orders 2 GiB free, photos 1 GiB free, snapshot monday"),
		}},
		{d.says("Move orders to node-b. It is stopped, so attach first, and then start it.",
			"Move orders to node-b, while it runs."), []action{
			d.types("oxide-csi volume attach orders --node=node-b"),
			d.lists("orders 2 GiB on node-b, photos 1 GiB free, snapshot monday"),
			d.starts(b),
			d.typesOn(b, "oxide-csi volume mount orders data"),
			d.measures(b, 2),
			d.reads(b),
		}},
		{d.says("Shut node-b down, and delete everything.", "Delete everything."), []action{
			d.typesOn(b, "oxide-csi volume unmount orders data"),
			d.shutsDown(b),
			d.types("oxide-csi volume detach orders --node=node-b --unmounted"),
			d.types("oxide-csi volume delete orders"),
			d.types("oxide-csi volume delete photos"),
			d.types("oxide-csi snapshot delete monday"),
			d.lists("no volumes"),
		}},
	}
	for i := range steps {
		steps[i].acts = slices.DeleteFunc(steps[i].acts, func(a action) bool { return a == nil })
	}
	return slices.DeleteFunc(steps, func(s step) bool { return len(s.acts) == 0 })
}

// says returns the sentence for a rack as racks are today, or for one with hot-plug.
func (d *demo) says(today, hotplug string) string {
	if d.hotplug {
		return hotplug
	}
	return today
}

// tell tells the story. The error names the step.
func (d *demo) tell(ctx context.Context) error {
	if err := d.start(ctx); err != nil {
		return err
	}
	if err := d.introduce(ctx); err != nil {
		return err
	}
	for i, s := range d.story() {
		d.out.begin(fmt.Sprintf("%d. %s", i+1, s.says))
		lines, err := take(ctx, s)
		d.out.end(lines)
		if err == nil {
			err = d.out.pause(ctx)
		}
		if err != nil {
			return fmt.Errorf("step %d (%s): %w", i+1, s.says, err)
		}
	}
	return nil
}

// take does what happens in a step, up to the first error.
func take(ctx context.Context, s step) (lines []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	for _, act := range s.acts {
		line, err := act(ctx)
		if line != "" {
			lines = append(lines, strings.Split(line, "\n")...)
		}
		if err != nil {
			return lines, err
		}
	}
	return lines, nil
}

// introduce says what is simulated, and shows the rack.
func (d *demo) introduce(ctx context.Context) (err error) {
	if d.disksBefore, err = d.disks(ctx); err != nil {
		return err
	}
	if d.hotplug {
		d.out.line("A rack with hot-plug, which no rack has yet: disks come and go at any time.")
	} else {
		d.out.line("A rack as they are today: disks come and go only while an instance is stopped.")
	}
	if d.nodesOff == "" {
		d.out.line("Rack and instances are simulated. Plugin, disks and files are real.")
	} else {
		d.out.line("Rack and instances are simulated. The nodes are left out: %s.", d.nodesOff)
	}
	var instances []string
	for _, m := range d.nodes {
		state, err := d.runState(ctx, m)
		if err != nil {
			return err
		}
		instances = append(instances, m.name+" "+state)
	}
	d.out.line("   rack: %s; disks %s", strings.Join(instances, ", "), strings.Join(d.disksBefore, ", "))
	if d.step {
		d.out.line("   In another shell: export OXIDE_CSI_CONTROLLER_ENDPOINT=%s", d.controller.Socket)
	}
	d.out.line("")
	return d.out.err
}
