// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build monitoring

package monitoring

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// TestPrometheus has a real Prometheus scrape the plugin in a simulated rack. Every query of the dashboard returns
// data. An alert about the token fires, and an alert about a stopped plugin fires and resolves.
func TestPrometheus(t *testing.T) {
	w := newWorld(t)
	node := w.start(t, "node")
	w.start(t, "controller")
	w.start(t, "planning controller", "--attach-mode=restart", "--restart-shutdown=hard", "--cluster-id=planning")
	prometheus := w.prometheus(t)
	ctx, stop := context.WithCancel(t.Context())
	worked := make(chan error, 1)
	go func() { worked <- w.work(ctx) }()
	for _, p := range panels(t) {
		for _, target := range p.Targets {
			query := strings.ReplaceAll(target.Expr, "$__rate_interval", "1m")
			// The token is read a minute after the start.
			await.Within(
				t,
				3*time.Minute,
				p.Title+" has data for "+query,
				func() bool { return prometheus.numbers(t, query) > 0 },
			)
		}
	}
	await.Within(
		t,
		3*time.Minute,
		"the token expires soon",
		func() bool { return prometheus.fires(t, "OxideCSITokenExpires") },
	)
	if prometheus.fires(t, "OxideCSIPluginDown") {
		t.Error("a plugin is said not to answer")
	}
	stop()
	must(t, <-worked)
	must(t, node.Stop())
	await.Within(
		t,
		3*time.Minute,
		"the node plugin does not answer",
		func() bool { return prometheus.fires(t, "OxideCSIPluginDown") },
	)
	w.start(t, "node")
	await.Within(
		t,
		3*time.Minute,
		"the node plugin answers again",
		func() bool { return !prometheus.fires(t, "OxideCSIPluginDown") },
	)
}

// world is a simulated rack, with the addresses of the plugins' metrics.
type world struct {
	programs simtest.Programs
	sim      *simtest.Sim
	// addresses and plugins are by the plugin's role.
	addresses map[string]string
	plugins   map[string]*simtest.Plugin
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{addresses: map[string]string{}, plugins: map[string]*simtest.Plugin{}}
	var err error
	w.programs, err = simtest.Build(t.TempDir(), simtest.RaceDetector())
	must(t, err)
	w.sim, err = simtest.StartSim(w.programs.Sim, nil, "--hotplug", "--instances=node-a")
	must(t, err)
	t.Cleanup(func() { must(t, w.sim.Stop()) })
	// The plugins' token expires in three days.
	answer, err := http.Post(w.sim.Control+"/v0/tokens", "application/json",
		strings.NewReader(`{"role": "limited-collaborator", "expires_in_s": 259200}`))
	must(t, err)
	defer answer.Body.Close()
	var made struct{ Token string }
	must(t, json.NewDecoder(answer.Body).Decode(&made))
	if w.sim.Token = made.Token; made.Token == "" {
		t.Fatalf("no token: %s", answer.Status)
	}
	return w
}

// start starts a plugin, again at the address that it had.
func (w *world) start(t *testing.T, role string, args ...string) *simtest.Plugin {
	t.Helper()
	dir, err := os.MkdirTemp("", "mon") // short enough for a socket
	must(t, err)
	t.Cleanup(func() { must(t, os.RemoveAll(dir)) })
	if w.addresses[role] == "" {
		w.addresses[role] = freeAddress(t)
	}
	mode := role[strings.LastIndex(role, " ")+1:]
	plugin, err := simtest.StartPlugin(w.programs.Plugin, simtest.PluginOptions{
		Mode: mode, Dir: dir, Sim: w.sim, Instance: w.sim.Instance("node-a"),
		Args: append(args, "--http-endpoint="+w.addresses[role], "--device-timeout=1s"),
	})
	must(t, err)
	t.Cleanup(func() { _ = plugin.Kill() }) // it may have been stopped
	w.plugins[role] = plugin
	return plugin
}

// work creates, attaches, detaches and deletes volumes until ctx ends. The guest shows no disks, so staging fails.
func (w *world) work(ctx context.Context) error {
	capability := &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
	}
	controller, node := w.plugins["controller"], w.plugins["node"]
	staging := filepath.Join(os.TempDir(), "no-staging-path")
	for n := 0; ; n++ {
		created, err := controller.CreateVolume(ctx, &csi.CreateVolumeRequest{
			Name: fmt.Sprint("v", n), VolumeCapabilities: []*csi.VolumeCapability{capability},
		})
		id, nodeID := created.GetVolume().GetVolumeId(), w.sim.Instance("node-a").ID
		var published *csi.ControllerPublishVolumeResponse
		if err == nil {
			published, err = controller.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{
				VolumeId: id, NodeId: nodeID, VolumeCapability: capability, VolumeContext: created.GetVolume().GetVolumeContext(),
			})
		}
		if err == nil {
			_, err = controller.ListVolumes(ctx, &csi.ListVolumesRequest{})
		}
		if err == nil {
			if _, staged := node.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
				VolumeId: id, StagingTargetPath: staging, VolumeCapability: capability,
				PublishContext: published.GetPublishContext(), VolumeContext: created.GetVolume().GetVolumeContext(),
			}); staged == nil {
				return fmt.Errorf("volume %s was staged without a disk", id)
			}
			_, err = controller.ControllerUnpublishVolume(ctx,
				&csi.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: nodeID})
		}
		if err == nil {
			_, err = controller.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: id})
		}
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			return err
		}
	}
}

// prometheus is a running Prometheus.
type prometheus struct{ url string }

// prometheus starts Prometheus with the rules, whose alerts wait for no longer than two seconds.
func (w *world) prometheus(t *testing.T) prometheus {
	t.Helper()
	dir := t.TempDir()
	rules := regexp.MustCompile(`for: \w+`).ReplaceAllString(read(t, "deploy/monitoring/rules.yaml"), "for: 2s")
	must(t, os.WriteFile(filepath.Join(dir, "rules.yaml"), []byte(rules), 0o600))
	config := "global: {scrape_interval: 1s, evaluation_interval: 1s}\nrule_files: [rules.yaml]\nscrape_configs:\n"
	for role, address := range w.addresses {
		job := "oxide-csi-" + strings.ReplaceAll(role, " ", "-")
		config += fmt.Sprintf("  - {job_name: %s, static_configs: [{targets: [%q]}]}\n", job, address)
	}
	must(t, os.WriteFile(filepath.Join(dir, "prometheus.yaml"), []byte(config), 0o600))
	address := freeAddress(t)
	log, err := os.Create(filepath.Join(dir, "log"))
	must(t, err)
	cmd := exec.Command(program(t, "prometheus"), "--config.file="+filepath.Join(dir, "prometheus.yaml"),
		"--storage.tsdb.path="+filepath.Join(dir, "data"), "--web.listen-address="+address)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	must(t, cmd.Start())
	t.Cleanup(func() {
		must(t, cmd.Process.Kill())
		_ = cmd.Wait() // it was killed
		must(t, log.Close())
		if text, _ := os.ReadFile(log.Name()); t.Failed() {
			t.Logf("Prometheus printed:\n%s", text[max(0, len(text)-3000):])
		}
	})
	p := prometheus{"http://" + address}
	await.Within(t, 3*time.Minute, "Prometheus is ready", func() bool {
		answer, err := http.Get(p.url + "/-/ready")
		if err != nil {
			return false
		}
		must(t, answer.Body.Close())
		return answer.StatusCode == http.StatusOK
	})
	return p
}

// numbers returns how many series a query has whose value is a number.
func (p prometheus) numbers(t *testing.T, query string) int {
	t.Helper()
	var data struct{ Result []struct{ Value [2]any } }
	p.get(t, "/api/v1/query?query="+url.QueryEscape(query), &data)
	numbers := 0
	for _, series := range data.Result {
		if series.Value[1] != "NaN" {
			numbers++
		}
	}
	return numbers
}

// fires reports whether an alert fires.
func (p prometheus) fires(t *testing.T, name string) bool {
	t.Helper()
	type alert struct {
		Labels map[string]string
		State  string
	}
	var data struct{ Alerts []alert }
	p.get(t, "/api/v1/alerts", &data)
	return slices.ContainsFunc(data.Alerts, func(a alert) bool {
		return a.Labels["alertname"] == name && a.State == "firing"
	})
}

func (p prometheus) get(t *testing.T, path string, data any) {
	t.Helper()
	answer, err := http.Get(p.url + path)
	must(t, err)
	defer answer.Body.Close()
	var body struct {
		Status, Error string
		Data          json.RawMessage
	}
	must(t, json.NewDecoder(answer.Body).Decode(&body))
	if body.Status != "success" {
		t.Fatalf("%s: %s", path, body.Error)
	}
	must(t, json.Unmarshal(body.Data, data))
}

func freeAddress(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer listener.Close()
	return listener.Addr().String()
}
