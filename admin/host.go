// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux && !noplugin

package admin

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/oxidecomputer/oxide-csi-plugin/admin/client"
	"github.com/oxidecomputer/oxide-csi-plugin/admin/diagnose"
	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/auto"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/guest"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/static"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// The plugin runs on Linux. This file is what doctor and explain look at on this host. elsewhere.go is its counterpart.

// HostCommands returns the commands that call a plugin on this host, or look at the host alone.
func HostCommands(p Program) []*cobra.Command {
	return []*cobra.Command{
		volumeCommand(p.Environ, p.Stdout, p.Stderr), snapshotCommand(p.Environ, p.Stdout, p.Stderr),
		verifyGuestCommand(p.Stdout),
	}
}

// hideNodeFlags hides nothing: this machine may be a node.
func hideNodeFlags(*pflag.FlagSet) {}

// guestOf returns what explain looks at on this host.
func guestOf(ctx context.Context, cfg config.Config, environ []string) diagnose.Guest {
	host := diagnose.Host{
		Devices: device.Roots{Dev: cfg.DevRoot, Sys: cfg.SysRoot}, Instance: ownInstance(ctx, cfg),
	}
	if socket, exists := controllerSocket(cfg, environ); exists {
		host.Controller = socket
	}
	return host
}

// ownInstance returns the ID of the instance that this machine is, or "" if the settings and the firmware do not tell.
func ownInstance(ctx context.Context, cfg config.Config) string {
	var source metadata.Provider = guest.New(guest.Options{Sys: cfg.SysRoot})
	if cfg.InstanceID != "" || cfg.MetadataFile != "" {
		source = static.New(static.Options{InstanceID: cfg.InstanceID, File: cfg.MetadataFile})
	}
	own, err := source.Instance(ctx)
	if err != nil {
		return ""
	}
	return own.ID
}

// examineHost returns what doctor examines on this host: the node, if it is one, and the controller's restarts.
func (o *operator) examineHost(
	ctx context.Context, cfg config.Config, log *slog.Logger,
) (node, restarts []func() []orchestrator.Finding) {
	if isNode(cfg, o.environ) {
		node = append(node, func() []orchestrator.Finding {
			return diagnose.ExamineNode(ctx, o.nodeToExamine(cfg, log))
		})
	}
	if socket, ok := controllerSocket(cfg, o.environ); ok {
		restarts = append(restarts, func() []orchestrator.Finding { return examineRestarts(ctx, socket) })
	}
	return node, restarts
}

// isNode reports whether this machine is, or should be, a node.
func isNode(cfg config.Config, environ []string) bool {
	_, err := os.Stat(cfg.StateDir)
	set := Getenv(environ, "OXIDE_CSI_MODE") != "" || cfg.NodeName != "" || cfg.InstanceID != "" || cfg.MetadataFile != ""
	return cfg.Mode == config.ModeAll || cfg.Mode == config.ModeNode && (set || err == nil)
}

func (o *operator) nodeToExamine(cfg config.Config, log *slog.Logger) diagnose.Node {
	n := diagnose.Node{
		Devices: device.Roots{Dev: cfg.DevRoot, Sys: cfg.SysRoot}, MaxDisks: cfg.MaxDisks, StateDir: cfg.StateDir,
		MountDirs: []string{"/var/lib/kubelet"}, Proc: "/proc",
	}
	if cfg.InstanceID != "" || cfg.MetadataFile != "" {
		explicit := static.New(static.Options{InstanceID: cfg.InstanceID, File: cfg.MetadataFile, Log: log})
		n.Sources = append(n.Sources, auto.Source{Name: config.MetadataStatic, Provider: explicit})
	}
	n.Sources = append(n.Sources, o.program.Sources(cfg, log)...)
	if socket := Getenv(o.environ, "CSI_ENDPOINT"); socket != "" {
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
	text := Getenv(environ, "OXIDE_CSI_CONTROLLER_ENDPOINT")
	if text == "" && cfg.Mode.Controller() {
		text = Getenv(environ, "CSI_ENDPOINT")
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
