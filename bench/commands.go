// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"context"
	"errors"
	"fmt"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

const (
	// commandVolumes is the number of volumes that rack and cluster have, and commandLatency the time of each of the
	// rack's calls.
	commandVolumes = 10_000
	commandLatency = 50 * time.Millisecond
	commandRounds  = 3
)

// commands measures doctor and orphans where users outgrow one machine. TestCommandsNeedOnePass counts their calls.
func commands(ctx context.Context, b *bench) (_ []row, err error) {
	r, err := b.newRack("--instances=node-a", "--hotplug")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.stop()) }()
	cluster, err := r.fillCluster(ctx)
	if err != nil {
		return nil, err
	}
	server := httptest.NewTLSServer(cluster)
	defer server.Close()
	kubeconfig := filepath.Join(b.dir, "kubeconfig")
	if err := os.WriteFile(kubeconfig, []byte(cluster.Kubeconfig(server)), 0o600); err != nil {
		return nil, err
	}
	latency := int(commandLatency.Milliseconds())
	if err := r.sim.Set(ctx, simtest.Settings{LatencyMillis: &latency}); err != nil {
		return nil, err
	}
	var rows []row
	for _, name := range []string{"doctor", "orphans"} {
		var seconds []float64
		for range commandRounds {
			cmd := exec.CommandContext(ctx, b.programs.Plugin, name, "--json", "--kubeconfig="+kubeconfig)
			cmd.Env = []string{
				"PATH=" + os.Getenv("PATH"), "OXIDE_HOST=" + r.sim.Host, "OXIDE_PROJECT=" + r.sim.Project,
				"OXIDE_TOKEN=" + r.sim.Token, "OXIDE_CSI_CA_FILE=" + r.sim.CAFile, "OXIDE_CSI_CLUSTER_ID=" + simtest.ClusterID,
			}
			start := time.Now()
			output, err := cmd.Output()
			seconds = append(seconds, time.Since(start).Seconds())
			// The simulated cluster lacks much, so doctor finds failures.
			if ended := (*exec.ExitError)(nil); err != nil && (name != "doctor" || !errors.As(err, &ended)) || len(output) == 0 {
				return nil, fmt.Errorf("%s: %w: %s", name, err, output)
			}
		}
		rows = append(rows, median(fmt.Sprintf("commands/%s/%d volumes", name, commandVolumes), "s",
			seconds))
	}
	return rows, nil
}

// fillCluster makes the volumes on the rack, and a cluster that knows them.
func (r *rig) fillCluster(ctx context.Context) (*simtest.Cluster, error) {
	const volumes, claims = "/api/v1/persistentvolumes", "/api/v1/persistentvolumeclaims"
	cluster := simtest.NewCluster("token", volumes, claims)
	return cluster, inParallel(ctx, commandVolumes, func(ctx context.Context, i int) error {
		name := fmt.Sprintf("pvc-%032d", i)
		id, err := r.createDiskFrom(ctx, simtest.ClusterID, name, blank)
		cluster.Put(volumes, "", name, map[string]any{"spec": map[string]any{
			"csi": map[string]any{"driver": "csi.oxide.computer", "volumeHandle": id},
		}})
		return err
	})
}
