// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package admin

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/oxidecomputer/oxide-csi-plugin/admin/diagnose"
	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
	"github.com/oxidecomputer/oxide-csi-plugin/core/controller"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator/choice"
)

const orphansHelp = `orphans lists the disks, snapshots and records of this cluster on the rack that no PersistentVolume, no
VolumeSnapshotContent and no Nomad volume knows, with their size, which counts against the quota. It also lists volumes
of the orchestrator whose disk is gone.

With --delete it asks for each of them, or deletes those whose IDs are arguments with --yes. It keeps what is younger
than a day, attached, or not certainly this cluster's. It deletes nothing if the orchestrator cannot be read completely
(docs/reference/rights.md). Nomad does not list snapshots, so under Nomad no snapshot counts as an orphan.

` + operatorHelp

func orphansCommand(p Program) *cobra.Command {
	o := newOperator(p)
	var remove, yes bool
	cmd := &cobra.Command{
		Use:   "orphans [--delete [--yes ID...]]",
		Short: "List, and delete, what the rack has and the orchestrator does not know",
		Long:  orphansHelp,
		Example: `  oxide-csi orphans --kubeconfig=$HOME/.kube/config
  oxide-csi orphans --delete --yes 0b19a3c4-6a0e-4c52-9f0a-0e5f3a7d9b11`,
		ValidArgsFunction: o.completeOrphan(),
	}
	cmd.Flags().BoolVar(&remove, "delete", false, "ask for each orphan whether to delete it")
	cmd.Flags().BoolVar(&yes, "yes", false, "with --delete: do not ask, and delete the orphans whose IDs are arguments")
	return o.command(cmd, func(cmd *cobra.Command, cfg config.Config, ids []string) error {
		switch {
		case yes && !remove:
			return Usage("--yes needs --delete")
		case yes != (len(ids) > 0):
			return Usage("--yes and the IDs of orphans need each other: --delete --yes ID...")
		case !cfg.Mode.Controller():
			return Usage("orphans needs the settings of a rack: set --oxide-host, or run it in the controller's container")
		}
		orchestrator, err := inventorist(cfg)
		if err != nil {
			return err
		}
		racks, err := o.racks(cfg, slog.New(slog.DiscardHandler))
		if err != nil {
			return err
		}
		found, err := diagnose.FindOrphans(cmd.Context(), racks, cfg.ClusterID, orchestrator, time.Now())
		if err != nil {
			return err
		}
		if !remove {
			return o.printOrphans(found)
		}
		if !yes {
			ids = o.choose(found)
		}
		cleaner := diagnose.Cleaner{
			Racks: racks, Cluster: cfg.ClusterID, Orchestrator: orchestrator, Now: time.Now,
			Service: controller.New(controller.Options{
				Racks: racks, Cluster: cfg.ClusterID, MaxDisks: cfg.MaxDisks, Log: slog.New(slog.DiscardHandler),
			}),
		}
		deleted, err := cleaner.Delete(cmd.Context(), ids)
		for _, orphan := range deleted {
			_, _ = fmt.Fprintf(o.stdout, "%s %s is deleted\n", orphan.Kind, orphan.ID)
		}
		return err
	})
}

// inventorist returns the orchestrator of the settings.
func inventorist(cfg config.Config) (orchestrator.Inventorist, error) {
	if known := choice.Of(cfg).Inventory; known != nil {
		return known, nil
	}
	return nil, Usage("no orchestrator is set, which knows the volumes: set --kubeconfig, or NOMAD_ADDR")
}

func (o *operator) printOrphans(found diagnose.Orphans) error {
	if o.json {
		return printJSON(o.stdout, found)
	}
	return printTable(o.stdout, func(w io.Writer) {
		line(w, "KIND", "SIZE", "AGE", "NAME", "CLAIM", "RACK", "ID", "KEPT BECAUSE")
		for _, o := range found.Orphans {
			size, name := cmp.Or(sizeText(o.SizeBytes), "-"), cmp.Or(o.Name, "("+o.RackName+")")
			line(w, string(o.Kind), size, ageText(o.Created), name, cmp.Or(o.Claim, "-"), o.Rack, o.ID, cmp.Or(o.Keep, "-"))
		}
		line(w)
		quota := cmp.Or(sizeText(found.QuotaBytes()), "0")
		line(w, fmt.Sprintf("%d orphans, which cost %s of the quota", len(found.Orphans), quota))
		for _, gone := range found.Missing {
			line(w, fmt.Sprintf("%s: no rack has %s", gone.Object, gone.ID))
		}
	})
}

// choose asks for each orphan that can be deleted. The end of the input means no.
func (o *operator) choose(found diagnose.Orphans) (ids []string) {
	answers := bufio.NewScanner(o.stdin)
	for _, orphan := range found.Orphans {
		if orphan.Keep != "" {
			continue
		}
		_, _ = fmt.Fprintf(o.stdout, "delete %s %s (%s, %s, age %s)? [y/N] ", orphan.Kind, orphan.ID,
			cmp.Or(orphan.Name, orphan.RackName), cmp.Or(sizeText(orphan.SizeBytes), "no size"), ageText(orphan.Created))
		if !answers.Scan() {
			return ids
		}
		if answer := strings.ToLower(strings.TrimSpace(answers.Text())); answer == "y" || answer == "yes" {
			ids = append(ids, orphan.ID)
		}
	}
	return ids
}
