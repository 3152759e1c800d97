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
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// registrationSocket is the name that node-driver-registrar would give it.
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

func (n kubeletNode) makeKnown(t *testing.T) {
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

// awaitRegistered waits until both sides say so.
func (n kubeletNode) awaitRegistered(t *testing.T, k *kubelettest.Kubelet) {
	t.Helper()
	eventually(t, "the kubelet registers the plugin", func() bool { return k.Plugin(registrationSocket) != nil })
	eventually(t, "the plugin is ready", func() bool { code, _ := get(t, n.http+"/readyz"); return code == 200 })
}

// A node is offered to the kubelet once it can say which node it is, to each kubelet that comes, and by whatever
// process comes after one that was killed; the end of the plugin takes the offer back.
func TestKubeletRegistration(t *testing.T) {
	t.Parallel()
	n := newKubeletNode(t)
	first, err := kubelettest.Start(n.registry, kubelettest.Options{Accept: accept})
	must(t, err)
	flags, err := n.opts.Flags()
	must(t, err)
	plugin := startProcess(t, flags...)
	defer func() { _ = plugin.cmd.Process.Kill() }() // fails where the test has done it
	eventually(t, "the plugin waits for its identity", func() bool {
		code, body := get(t, n.http+"/readyz")
		return code == 503 && strings.Contains(body, n.identity)
	})
	if first.SocketEvents() > 0 {
		t.Error("it is offered before it knows who it is")
	}
	n.makeKnown(t)
	n.awaitRegistered(t, first)
	if failures := first.Failures(); len(failures) > 0 {
		t.Errorf("before it succeeded: %v", failures)
	}

	must(t, first.Stop())
	second := startKubelet(t, n.registry, kubelettest.Options{Accept: accept})
	n.awaitRegistered(t, second)

	must(t, plugin.cmd.Process.Kill())
	if err := <-plugin.ended; err == nil {
		t.Error("the plugin ended by itself before it was killed")
	}
	if !isThere(t, filepath.Join(n.registry, registrationSocket)) {
		t.Fatal("no socket was left: this test shows nothing")
	}
	again := startPlugin(t, n.opts)
	eventually(t, "the kubelet sees a new socket", func() bool { return second.SocketEvents() == 2 })
	n.awaitRegistered(t, second)

	must(t, again.Signal(syscall.SIGTERM))
	if code, err := again.ExitCode(within(t, 20*time.Second)); err != nil || code != 0 {
		t.Errorf("exit code %d, %v: %s", code, err, again.Stderr())
	}
	eventually(t, "the kubelet forgets the plugin", func() bool { return second.Plugin(registrationSocket) == nil })
	if isThere(t, filepath.Join(n.registry, registrationSocket)) {
		t.Error("the socket is still there")
	}
}

// A kubelet that refuses the plugin does not end it: what it serves is served on, and people can see why.
func TestKubeletRefusesThePlugin(t *testing.T) {
	t.Parallel()
	n := newKubeletNode(t)
	n.makeKnown(t)
	var mended atomic.Bool
	k := startKubelet(t, n.registry, kubelettest.Options{Accept: func(ctx context.Context, info *api.PluginInfo) error {
		if !mended.Load() {
			return errors.New("error updating CSINode object: the server is down")
		}
		return accept(ctx, info)
	}})
	plugin := startPlugin(t, n.opts)
	eventually(t, "it says why it is not ready", func() bool {
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
	if info, err := plugin.NodeGetInfo(
		t.Context(),
		&csi.NodeGetInfoRequest{},
	); err != nil ||
		info.GetNodeId() != instanceID {
		t.Errorf("NodeGetInfo: %v, %v", info, err)
	}
	if log := plugin.Stderr().
		String(); strings.Count(log, "level=ERROR") != 1 ||
		!strings.Contains(log, "the server is down") {
		t.Errorf("the log says: %s", log)
	}
	mended.Store(true)
	n.awaitRegistered(t, k)
}

// A controller has nothing to do with a kubelet, whatever configuration it shares with its nodes, and does not wait for
// one.
func TestControllerDoesNotRegister(t *testing.T) {
	t.Parallel()
	sim, dir, addr := startSim(t), shortDir(t), freePort(t)
	k := startKubelet(t, filepath.Join(dir, "registry"), kubelettest.Options{})
	plugin := startPlugin(t, simtest.PluginOptions{Mode: "controller", Dir: dir, Sim: sim, Args: []string{
		"--kubelet-registration-dir=" + filepath.Join(dir, "registry"), "--http-endpoint=" + addr,
	}})
	if code, body := get(t, "http://"+addr+"/readyz"); code != 200 {
		t.Errorf("/readyz: %d %q", code, body)
	}
	must(t, plugin.Stop())
	if k.SocketEvents() > 0 || strings.Contains(plugin.Stderr().String(), "to the kubelet") {
		t.Errorf("it was offered to the kubelet: %s", plugin.Stderr())
	}
}
