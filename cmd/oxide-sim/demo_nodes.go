// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// machine is an instance of the rack. With nodes it has a guest: processes in namespaces of their own, among them a
// node plugin.
type machine struct {
	name, id string
	// guest is the folder of the guest. dir is the folder where its node plugin and its commands work.
	guest, dir string
	// pid is the process ID of the node plugin while the guest runs.
	pid string
}

// Folders in the demo's folder. mountFolder is in the folder of each node.
const (
	rackFolder       = "rack"
	guestsFolder     = "guests"
	controllerFolder = "controller"
	mountFolder      = "data"
)

// shutdownGrace is how long a guest's processes may take to end.
const shutdownGrace = 10 * time.Second

// start starts the rack, its instances and the plugins, in their own process groups. A Ctrl-C must not reach them: the
// demo ends them in order.
func (d *demo) start(ctx context.Context) error {
	api, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	d.api = api
	kubeconfig := filepath.Join(d.dir, "kubeconfig")
	text := (&simtest.Node{}).Kubeconfig("http://" + api.Addr().String())
	if err := os.WriteFile(kubeconfig, []byte(text), 0o600); err != nil {
		return err
	}
	args := []string{"--instances=", "--state=" + filepath.Join(d.dir, rackFolder)}
	if d.hotplug {
		args = append(args, "--hotplug")
	}
	shutdown := "--restart-shutdown=hard"
	if d.nodesOff == "" {
		boot, err := d.writeBoot(kubeconfig)
		if err != nil {
			return err
		}
		args = append(args, "--guest-root="+filepath.Join(d.dir, guestsFolder), "--guest-boot="+boot)
		shutdown = "--restart-shutdown=guest"
	}
	d.sim, err = simtest.StartSimWith(
		d.programs.Sim,
		simtest.SimOptions{Args: args, Stderr: d.logTo, OwnProcessGroup: true},
	)
	if err != nil {
		if d.nodesOff == "" {
			err = fmt.Errorf("%w (--controller-only needs no loop devices)", err)
		}
		return fmt.Errorf("start the simulated rack: %w", err)
	}
	if err := d.addInstances(ctx); err != nil {
		return err
	}
	dir := filepath.Join(d.dir, controllerFolder)
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	d.controller, err = simtest.StartPlugin(d.programs.Plugin, simtest.PluginOptions{
		Mode: "controller", Dir: dir, Sim: d.sim, Stderr: d.logTo, OwnProcessGroup: true,
		Args: []string{
			"--metadata=none", "--kubeconfig=" + kubeconfig, "--attach-mode=restart", shutdown,
			"--restart-cool-down=0s", // by default the first restart begins 5 minutes after the instances were started
		},
	})
	if err != nil {
		return fmt.Errorf("start the plugin with --mode=controller: %w", err)
	}
	return nil
}

// writeBoot writes the program that the guests boot: an init with a node plugin.
func (d *demo) writeBoot(kubeconfig string) (path string, err error) {
	options := simtest.PluginOptions{
		Mode:     "node",
		Dir:      "$dir/$OXIDE_SIM_INSTANCE",
		Instance: simtest.Instance{Guest: "$OXIDE_SIM_GUEST"},
		Args: []string{
			"--node-name=$OXIDE_SIM_INSTANCE", "--kubeconfig=" + "$dir/" + filepath.Base(kubeconfig),
			"--attach-mode=restart", "--restart-poweroff=signal:SIGRTMIN+4",
		},
	}
	flags, err := options.Flags()
	if err != nil {
		return "", err
	}
	service := fmt.Sprintf("dir=%s\nexec %s \"%s\"\n",
		simtest.Quote(d.dir), simtest.Quote(d.programs.Plugin), strings.Join(flags, `" "`))
	return simtest.WriteBoot(d.dir, d.programs.Sim, shutdownGrace, service)
}

// addInstances makes the instances, and the part of a Kubernetes API server that carries the requests for restarts from
// the controller to the nodes.
func (d *demo) addInstances(ctx context.Context) error {
	var nodes simtest.Nodes
	for _, name := range []string{"node-a", "node-b"} {
		dir := filepath.Join(d.dir, name)
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
		instance, err := d.sim.AddInstance(ctx, name, "", "stopped")
		if err != nil {
			return err
		}
		nodes = append(nodes, &simtest.Node{Name: name, ProviderID: "oxide://" + instance.ID})
		d.nodes = append(d.nodes, &machine{name: name, id: instance.ID, guest: instance.Guest, dir: dir})
	}
	server := &http.Server{Handler: nodes, ReadHeaderTimeout: time.Minute}
	go func() { _ = server.Serve(d.api) }() // until the demo closes the listener
	running := d.nodes
	if !d.hotplug {
		running = running[:1]
	}
	for _, m := range running {
		if err := d.powerOn(ctx, m); err != nil {
			return err
		}
	}
	return nil
}

// powerOn starts an instance, and waits for its node plugin.
func (d *demo) powerOn(ctx context.Context, m *machine) error {
	if err := d.sim.SetRunState(ctx, m.id, "running"); err != nil {
		return err
	}
	return d.awaitPlugin(m)
}

// awaitPlugin waits for the node plugin of a guest, and looks for its process.
func (d *demo) awaitPlugin(m *machine) error {
	if d.nodesOff != "" {
		return nil
	}
	client, err := simtest.Connect(m.socket())
	if err != nil {
		return fmt.Errorf("the node plugin on %s, see %s/console: %w", m.name, m.guest, err)
	}
	commands, err := readEach("/proc/[0-9]*/cmdline")
	for path, command := range commands {
		if strings.Contains(command, "--endpoint=unix://"+m.socket()+"\x00") {
			m.pid = strings.Split(path, "/")[2]
		}
	}
	return errors.Join(err, client.Close())
}

func (m *machine) socket() string { return simtest.PluginOptions{Dir: m.dir}.Socket() }

// starts is the owner of a stopped instance that starts it. With hot-plug it runs already.
func (d *demo) starts(m *machine) action {
	if d.hotplug {
		return nil
	}
	return func(ctx context.Context) (string, error) { return "", d.powerOn(ctx, m) }
}

// shutsDown is the owner of an instance that shuts it down in order. With hot-plug there is no need for that.
func (d *demo) shutsDown(m *machine) action {
	if d.hotplug {
		return nil
	}
	return func(ctx context.Context) (string, error) {
		if err := d.sim.Halt(ctx, m.id); err != nil {
			return "", err
		}
		return "", d.awaitRunState(ctx, m, "stopped")
	}
}

// types runs a command of oxide-csi beside the controller.
func (d *demo) types(line string) action {
	return func(ctx context.Context) (string, error) { return "$ " + line, d.run(ctx, nil, line) }
}

// typesAtOnce runs two commands at the same time.
func (d *demo) typesAtOnce(one, other string) action {
	return func(ctx context.Context) (string, error) {
		first := make(chan error, 1)
		go func() { first <- d.run(ctx, nil, one) }()
		err := d.run(ctx, nil, other)
		return "$ " + one + " &\n$ " + other, errors.Join(<-first, err)
	}
}

// typesOn runs a command of oxide-csi on a node.
func (d *demo) typesOn(m *machine, line string) action {
	if d.nodesOff != "" {
		return nil
	}
	return func(ctx context.Context) (string, error) { return m.name + "# " + line, d.run(ctx, m, line) }
}

// run runs a command of oxide-csi, on a node if one is given.
func (d *demo) run(ctx context.Context, m *machine, line string) error {
	words := append([]string{d.programs.Plugin}, strings.Fields(line)[1:]...)
	env := []string{"OXIDE_CSI_CONTROLLER_ENDPOINT=" + d.controller.Socket}
	if m != nil {
		enter := []string{"nsenter", "--target=" + m.pid, "--mount", "--pid", "sh", "-c", `cd "$0" && exec "$@"`, m.dir}
		words = append(enter, words...)
		env = append(env, "PATH="+os.Getenv("PATH"), "OXIDE_CSI_NODE_ENDPOINT="+m.socket(),
			"OXIDE_CSI_STAGING_DIR="+filepath.Join(m.dir, "staging"), "OXIDE_CSI_SYS_ROOT="+filepath.Join(m.guest, "sys"))
	}
	cmd := exec.CommandContext(ctx, words[0], words[1:]...)
	var output bytes.Buffer
	cmd.Env, cmd.Stdout, cmd.Stderr = env, &output, &output
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // so that a Ctrl-C reaches only the demo, which ends the command
	cmd.WaitDelay = time.Second                           // a process in a guest ends with the guest
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w: %s", line, err, bytes.TrimSpace(output.Bytes()))
	}
	return nil
}

// mounted is the folder where a node has mounted its volume, as seen from outside.
func (m *machine) mounted() string { return filepath.Join("/proc", m.pid, "root", m.dir, mountFolder) }

// measures compares the size of a mounted filesystem with the wanted one, in GiB.
func (d *demo) measures(m *machine, want int) action {
	if d.nodesOff != "" {
		return nil
	}
	return func(context.Context) (string, error) {
		var stat unix.Statfs_t
		if err := unix.Statfs(m.mounted(), &stat); err != nil {
			return "", err
		}
		kind := fmt.Sprintf("a filesystem of kind %#x", stat.Type)
		if stat.Type == unix.EXT4_SUPER_MAGIC {
			kind = "an ext4 filesystem"
		}
		// The filesystem needs a part of the disk for itself.
		size := (stat.Blocks*uint64(stat.Bsize) + 1<<30 - 1) >> 30
		return expect(m.name+": ", fmt.Sprintf("%s is %s of %d GiB", mountFolder, kind, size),
			fmt.Sprintf("%s is an ext4 filesystem of %d GiB", mountFolder, want))
	}
}

const (
	fileName      = "orders.db"
	fileMebibytes = 16
)

// fileContent is what is written to the volume: pseudo-random bytes with a fixed seed, so that the checksum is the same
// in each run.
func fileContent() io.Reader {
	seed := [32]byte{}
	copy(seed[:], "the orders of a database")
	return io.LimitReader(rand.NewChaCha8(seed), fileMebibytes<<20)
}

func (d *demo) writes(m *machine) action {
	if d.nodesOff != "" {
		return nil
	}
	return func(context.Context) (string, error) {
		f, err := os.OpenFile(filepath.Join(m.mounted(), fileName), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return "", err
		}
		hash := sha256.New()
		_, err = io.Copy(io.MultiWriter(f, hash), fileContent())
		d.written = fmt.Sprintf("%d MiB, sha256 %.10x", fileMebibytes, hash.Sum(nil))
		line := fmt.Sprintf("%s: %s/%s is written: %s", m.name, mountFolder, fileName, d.written)
		return line, errors.Join(err, f.Sync(), f.Close())
	}
}

func (d *demo) reads(m *machine) action {
	if d.nodesOff != "" {
		return nil
	}
	return func(context.Context) (string, error) {
		f, err := os.Open(filepath.Join(m.mounted(), fileName))
		if err != nil {
			return "", err
		}
		defer func() { _ = f.Close() }() // it was only read
		hash := sha256.New()
		size, err := io.Copy(hash, f)
		if err != nil {
			return "", err
		}
		where := fmt.Sprintf("%s: %s/%s still has ", m.name, mountFolder, fileName)
		return expect(where, fmt.Sprintf("%d MiB, sha256 %.10x", size>>20, hash.Sum(nil)), d.written)
	}
}
