// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// processes are the programs that the demo runs: the simulated rack and the plugins.
type processes struct {
	sim        *simtest.Sim
	controller *simtest.Plugin
	nodes      []*machine
}

// machine is an instance of the rack with the plugin on it.
type machine struct {
	instance simtest.Instance
	// plugin is nil without nodes.
	plugin *simtest.Plugin
	// shell runs the commands for this node.
	shell *shell
	// id is the node ID from the plugin; without nodes the instance's ID.
	id string
	// staging is the node's staging folder, target the folder where the volume's user wants the volume.
	staging, target string
}

const (
	stagingFolder = "staging"
	targetFolder  = "data"
)

// Folders in the demo's folder.
const (
	rackFolder       = "rack"
	guestsFolder     = "guests"
	controllerFolder = "controller"
)

// start starts the rack and the plugins in their own process groups. A Ctrl-C must not reach them: the demo ends them
// in order.
func (d *demo) start() (err error) {
	args := []string{"--instances=node-a,node-b", "--hotplug", "--state=" + filepath.Join(d.dir, rackFolder)}
	if d.nodesOff == "" {
		args = append(args, "--guest-root="+filepath.Join(d.dir, guestsFolder))
	}
	if d.processes.sim, err = simtest.StartSimWith(
		d.programs.Sim,
		simtest.SimOptions{Args: args, Stderr: d.logTo, OwnProcessGroup: true},
	); err != nil {
		if d.nodesOff == "" {
			err = fmt.Errorf("%w (--controller-only needs no loop devices)", err)
		}
		return fmt.Errorf("start the simulated rack: %w", explain(err))
	}
	if d.processes.controller, err = d.startPlugin("controller", controllerFolder, simtest.Instance{}); err != nil {
		return err
	}
	for _, instance := range d.processes.sim.Instances {
		m := &machine{instance: instance, id: instance.ID}
		d.processes.nodes = append(d.processes.nodes, m)
		if d.nodesOff != "" {
			m.shell, err = d.newShell("", filepath.Join(d.dir, controllerFolder), d.variables(nil)...)
		} else {
			err = d.startNode(m)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (d *demo) startNode(m *machine) (err error) {
	name := m.instance.Name
	if m.plugin, err = d.startPlugin("node", name, m.instance); err != nil {
		return err
	}
	dir := filepath.Join(d.dir, name)
	m.staging = filepath.Join(dir, stagingFolder)
	m.target = filepath.Join(dir, targetFolder)
	m.shell, err = d.newShell(name, dir, d.variables(m)...)
	return err
}

func (d *demo) startPlugin(mode, folder string, instance simtest.Instance) (*simtest.Plugin, error) {
	dir := filepath.Join(d.dir, folder)
	if err := os.Mkdir(dir, 0o755); err != nil {
		return nil, err
	}
	plugin, err := simtest.StartPlugin(
		d.programs.Plugin,
		simtest.PluginOptions{
			Mode:            mode,
			Dir:             dir,
			Sim:             d.processes.sim,
			Instance:        instance,
			Stderr:          d.logTo,
			OwnProcessGroup: true,
		},
	)
	if err != nil {
		return nil, fmt.Errorf("start the plugin with --mode=%s in the folder %s: %w", mode, folder, explain(err))
	}
	return plugin, nil
}

// plugins describes the processes of the plugin.
func (p processes) plugins() string {
	text := "oxide-csi --mode=controller"
	for _, m := range p.nodes {
		if m.plugin != nil {
			text += ", --mode=node on " + m.instance.Name
		}
	}
	return text
}

// running lists the started plugins.
func (p processes) running() []*simtest.Plugin {
	var plugins []*simtest.Plugin
	if p.controller != nil {
		plugins = append(plugins, p.controller)
	}
	for _, m := range p.nodes {
		if m.plugin != nil {
			plugins = append(plugins, m.plugin)
		}
	}
	return plugins
}

// register reads the node ID, as an orchestrator does before it schedules anything there. It returns the number of
// volumes that the node takes.
func (m *machine) register(ctx context.Context) (room int64, err error) {
	info, err := m.plugin.NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
	if err != nil {
		return 0, fmt.Errorf("get the identity of %s: %w", m.instance.Name, explain(err))
	}
	m.id = info.GetNodeId()
	return info.GetMaxVolumesPerNode(), nil
}
