// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/oxidecomputer/oxide-csi-plugin/cmd/oxide-csi/kubelet/kubelettest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// registrationSocket is the name of the registration socket, the same as node-driver-registrar uses.
const registrationSocket = "csi.oxide.computer-reg.sock"

// kubeletNode is a node plugin that registers with a kubelet.
type kubeletNode struct {
	opts               simtest.PluginOptions
	registry, identity string
	http               string
}

func newKubeletNode(t *testing.T) kubeletNode {
	t.Helper()
	dir := shortDir(t)
	n := kubeletNode{
		registry: filepath.Join(dir, "registry"),
		identity: filepath.Join(dir, "identity.env"),
		http:     "http://" + freePort(t),
	}
	must(t, errors.Join(os.Mkdir(filepath.Join(dir, "block"), 0o755), os.Mkdir(n.registry, 0o755)))
	n.opts = simtest.PluginOptions{Mode: "node", Dir: dir, Instance: simtest.Instance{ID: "unused"}, Args: []string{
		"--instance-id=",
		"--metadata-file=" + n.identity,
		"--sys-root=" + dir,
		"--http-endpoint=" + strings.TrimPrefix(n.http, "http://"),
		"--kubelet-registration-dir=" + n.registry,
	}}
	return n
}

// writeIdentity writes the file from which the plugin learns its identity.
func (n kubeletNode) writeIdentity(t *testing.T) {
	t.Helper()
	must(t, os.WriteFile(n.identity+".new", []byte("OXIDE_INSTANCE_ID="+instanceID+"\n"), 0o644))
	must(t, os.Rename(n.identity+".new", n.identity))
}

// accept asks a plugin for its node ID, as the kubelet does.
func accept(ctx context.Context, info *api.PluginInfo) (err error) {
	conn, err := grpc.NewClient("unix:"+info.GetEndpoint(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	node, err := csi.NewNodeClient(conn).NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
	if err == nil && node.GetNodeId() != instanceID {
		return errors.New("the node ID is " + node.GetNodeId())
	}
	return err
}

func startKubelet(t *testing.T, dir string, options kubelettest.Options) *kubelettest.Kubelet {
	t.Helper()
	k, err := kubelettest.Start(dir, options)
	must(t, err)
	t.Cleanup(func() { must(t, k.Stop()) })
	return k
}

// awaitRegistered waits until the kubelet has registered the plugin and the plugin is ready.
func (n kubeletNode) awaitRegistered(t *testing.T, k *kubelettest.Kubelet) {
	t.Helper()
	await.Eventually(t, "the kubelet registers the plugin", func() bool { return k.Plugin(registrationSocket) != nil })
	await.Eventually(t, "the plugin is ready", func() bool { code, _ := get(t, n.http+"/readyz"); return code == 200 })
}

// The plugin registers when it knows its identity. It registers again with a restarted kubelet, and after it was killed
// and started again. The registration ends when the plugin stops.
func TestKubeletRegistration(t *testing.T) {
	t.Parallel()
	n := newKubeletNode(t)
	first, err := kubelettest.Start(n.registry, kubelettest.Options{Accept: accept})
	must(t, err)
	flags, err := n.opts.Flags()
	must(t, err)
	plugin := startProcess(t, flags...)
	defer func() { _ = plugin.cmd.Process.Kill() }() // fails if the test has already killed it
	await.Eventually(t, "/readyz says that the plugin waits for its identity", func() bool {
		code, body := get(t, n.http+"/readyz")
		return code == 503 && strings.Contains(body, n.identity)
	})
	if first.SocketEvents() > 0 {
		t.Error("the plugin created its registration socket before it knows its identity")
	}
	n.writeIdentity(t)
	n.awaitRegistered(t, first)
	if failures := first.Failures(); len(failures) > 0 {
		t.Errorf("failed registrations: %v", failures)
	}

	must(t, first.Stop())
	second := startKubelet(t, n.registry, kubelettest.Options{Accept: accept})
	n.awaitRegistered(t, second)

	must(t, plugin.cmd.Process.Kill())
	if err := <-plugin.ended; err == nil {
		t.Error("the plugin ended before it was killed")
	}
	if !exists(t, filepath.Join(n.registry, registrationSocket)) {
		t.Fatal("the killed plugin left no socket, which this test needs")
	}
	again := startPlugin(t, n.opts)
	await.Eventually(t, "the kubelet sees a new socket", func() bool { return second.SocketEvents() == 2 })
	n.awaitRegistered(t, second)

	must(t, again.Signal(syscall.SIGTERM))
	if code, err := again.ExitCode(within(t, 2*time.Minute)); err != nil || code != 0 {
		t.Errorf("exit code %d, %v: %s", code, err, again.Stderr())
	}
	await.Eventually(
		t,
		"the kubelet removes the registration",
		func() bool { return second.Plugin(registrationSocket) == nil },
	)
	if exists(t, filepath.Join(n.registry, registrationSocket)) {
		t.Error("the socket was not removed")
	}
}

// If the kubelet rejects the plugin, the plugin continues to serve, and the log and /readyz give the reason.
func TestKubeletRejectsThePlugin(t *testing.T) {
	t.Parallel()
	n := newKubeletNode(t)
	n.writeIdentity(t)
	var repaired atomic.Bool
	k := startKubelet(t, n.registry, kubelettest.Options{Accept: func(ctx context.Context, info *api.PluginInfo) error {
		if !repaired.Load() {
			return errors.New("error updating CSINode object: the server is down")
		}
		return accept(ctx, info)
	}})
	plugin := startPlugin(t, n.opts)
	await.Eventually(t, "/readyz gives the reason", func() bool {
		code, body := get(t, n.http+"/readyz")
		return code == 503 && strings.Contains(body, "the kubelet rejects this plugin") &&
			strings.Contains(body, "the server is down")
	})
	if code, _ := get(t, n.http+"/livez"); code != 200 {
		t.Errorf("/livez is %d", code)
	}
	if probe, err := plugin.Probe(t.Context(), &csi.ProbeRequest{}); err != nil || !probe.GetReady().GetValue() {
		t.Errorf("Probe: %v, %v", probe, err)
	}
	info, err := plugin.NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{})
	if err != nil || info.GetNodeId() != instanceID {
		t.Errorf("NodeGetInfo: %v, %v", info, err)
	}
	log := plugin.Stderr().String()
	if strings.Count(log, "level=ERROR") != 1 || !strings.Contains(log, "the server is down") {
		t.Errorf("want one error with the reason in the log: %s", log)
	}
	repaired.Store(true)
	n.awaitRegistered(t, k)
}

// A controller does not register and does not wait for a kubelet, even if its configuration has a registration folder.
func TestControllerDoesNotRegister(t *testing.T) {
	t.Parallel()
	sim, dir, addr := startSim(t), shortDir(t), freePort(t)
	k := startKubelet(t, filepath.Join(dir, "registry"), kubelettest.Options{})
	plugin := startPlugin(t, simtest.PluginOptions{Mode: "controller", Dir: dir, Sim: sim, Args: []string{
		"--kubelet-registration-dir=" + filepath.Join(dir, "registry"), "--http-endpoint=" + addr,
	}})
	await.Eventually(
		t,
		"the plugin is ready",
		func() bool { code, _ := get(t, "http://"+addr+"/readyz"); return code == 200 },
	)
	must(t, plugin.Stop())
	if k.SocketEvents() > 0 || strings.Contains(plugin.Stderr().String(), "to the kubelet") {
		t.Errorf("the controller registers with the kubelet: %s", plugin.Stderr())
	}
}
