// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux && !noplugin

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/oxidecomputer/oxide-csi-plugin/cmd/oxide-csi/client"
	"github.com/oxidecomputer/oxide-csi-plugin/cmd/oxide-csi/diagnose"
	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/static"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// The plugin runs on Linux. This file adds it to the program, with the commands for its host, and what doctor and
// explain look at on this host. elsewhere.go is its counterpart.

// addPlugin makes root serve, and adds the commands that need the plugin or its host.
func addPlugin(root *cobra.Command, environ []string, stdout, stderr io.Writer) {
	root.Short, root.Long, root.Example = "CSI plugin for Oxide disks", rootHelp, rootExample
	config.Flags(root.Flags())
	root.RunE = func(cmd *cobra.Command, _ []string) error {
		cfg, warnings, err := config.Load(cmd.Flags(), environ)
		if err != nil {
			helpNewcomer(cmd, stderr, err)
			for _, warning := range warnings {
				fmt.Fprintf(stderr, "oxide-csi: warning: %s\n", warning)
			}
			return err
		}
		return serve(cmd.Context(), cfg, warnings, stderr)
	}
	root.AddCommand(
		metadataCommand(environ, stdout, stderr),
		awaitDetachCommand(environ, stderr),
		readyCommand(stdout),
		volumeCommand(environ, stdout, stderr),
		snapshotCommand(environ, stdout, stderr),
	)
}

// hideNodeFlags hides nothing: this machine may be a node.
func hideNodeFlags(*pflag.FlagSet) {}

// guestOf returns what explain looks at on this host.
func guestOf(cfg config.Config) diagnose.Guest {
	return diagnose.Devices(device.Roots{Dev: cfg.DevRoot, Sys: cfg.SysRoot})
}

// examineHost returns what doctor examines on this host: the node, if it is one, and the controller's restarts.
func examineHost(
	ctx context.Context, cfg config.Config, environ []string, log *slog.Logger,
) (node, restarts []func() []orchestrator.Finding) {
	if isNode(cfg, environ) {
		node = append(node, func() []orchestrator.Finding {
			return diagnose.ExamineNode(ctx, nodeToExamine(cfg, environ, log))
		})
	}
	if socket, ok := controllerSocket(cfg, environ); ok {
		restarts = append(restarts, func() []orchestrator.Finding { return examineRestarts(ctx, socket) })
	}
	return node, restarts
}

// isNode reports whether this machine is, or should be, a node.
func isNode(cfg config.Config, environ []string) bool {
	_, err := os.Stat(cfg.StateDir)
	set := getenv(environ, "OXIDE_CSI_MODE") != "" || cfg.NodeName != "" || cfg.InstanceID != "" || cfg.MetadataFile != ""
	return cfg.Mode == config.ModeAll || cfg.Mode == config.ModeNode && (set || err == nil)
}

func nodeToExamine(cfg config.Config, environ []string, log *slog.Logger) diagnose.Node {
	n := diagnose.Node{
		Devices: device.Roots{Dev: cfg.DevRoot, Sys: cfg.SysRoot}, MaxDisks: cfg.MaxDisks, StateDir: cfg.StateDir,
		MountDirs: []string{"/var/lib/kubelet"}, Proc: "/proc",
	}
	if cfg.InstanceID != "" || cfg.MetadataFile != "" {
		explicit := static.New(static.Options{InstanceID: cfg.InstanceID, File: cfg.MetadataFile, Log: log})
		n.Sources = append(n.Sources, diagnose.IdentitySource{Name: config.MetadataStatic, Provider: explicit})
	}
	for _, name := range sources(cfg) {
		n.Sources = append(n.Sources, diagnose.IdentitySource{Name: name, Provider: source(name, cfg, log)})
	}
	if socket := getenv(environ, "CSI_ENDPOINT"); socket != "" {
		var path config.SocketFlag
		if err := path.Set(socket); err == nil {
			n.Sockets = append(n.Sockets, string(path))
		}
	}
	if cfg.KubeletRegistrationDir != "" {
		n.MountDirs = []string{filepath.Dir(filepath.Clean(cfg.KubeletRegistrationDir))}
		cfg.Mode = cmp.Or(cfg.Mode, config.ModeNode)
		n.Sockets = append(n.Sockets, filepath.Clean(cfg.KubeletSocket()))
	}
	return n
}

// controllerSocket returns the socket of a controller on this host, if there is one.
func controllerSocket(cfg config.Config, environ []string) (path string, exists bool) {
	var socket config.SocketFlag = defaultControllerSocket
	text := getenv(environ, "OXIDE_CSI_CONTROLLER_ENDPOINT")
	if text == "" && cfg.Mode.Controller() {
		text = getenv(environ, "CSI_ENDPOINT")
	}
	if text != "" && socket.Set(text) != nil {
		return "", false
	}
	info, err := os.Stat(string(socket))
	return string(socket), err == nil && info.Mode().Type() == os.ModeSocket
}

// examineRestarts asks the controller for its planned restarts, which only the controller knows.
func examineRestarts(ctx context.Context, socket string) []orchestrator.Finding {
	plugin, err := client.New(client.Options{Controller: socket, Node: socket})
	if err != nil {
		return diagnose.RestartsUnknown(socket, err)
	}
	restarts, planned, err := plugin.Restarts(ctx)
	if err = errors.Join(err, plugin.Close()); err != nil {
		return diagnose.RestartsUnknown(socket, err)
	}
	if !planned {
		return nil
	}
	return diagnose.ExamineRestarts(restarts, time.Now())
}
