// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package admin

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/oxidecomputer/oxide-csi-plugin/admin/diagnose"
	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator/choice"
)

const doctorHelp = `doctor examines what it finds set up: racks, this node and the orchestrator. Each line is ok, a warning or a failure, with
what was found and what to do. It changes nothing.

It examines a rack if there are settings of one; the node if --mode, the Node's name or the state directory says that
this is one; Kubernetes with --kubeconfig or a service account; Nomad with NOMAD_ADDR. Planned restarts it asks of the
controller at --endpoint, else it reads the controller's last reports in the orchestrator.

` + operatorHelp + `

Exit codes: 0, all is well; 1, there are warnings; 2, there are failures, or the settings are wrong.`

// doctorTimeout bounds the whole examination.
const doctorTimeout = 2 * time.Minute

func doctorCommand(p Program) *cobra.Command {
	o := newOperator(p)
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Examine rack, node and orchestrator",
		Long:  doctorHelp,
		Example: `  kubectl -n oxide-csi exec deploy/oxide-csi-controller -- /oxide-csi doctor
  kubectl -n oxide-csi exec ds/oxide-csi-node -- /oxide-csi doctor
  oxide-csi doctor --kubeconfig=$HOME/.kube/config`,
		Args:              NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
	}
	return o.command(cmd, func(cmd *cobra.Command, cfg config.Config, _ []string) error {
		ctx, cancel := context.WithTimeout(cmd.Context(), doctorTimeout)
		defer cancel()
		findings, err := o.examine(ctx, cfg)
		if err != nil {
			return err
		}
		if err := o.printFindings(findings); err != nil {
			return err
		}
		if code := diagnose.ExitCode(findings); code != 0 {
			return ExitError{code, fmt.Errorf("see the lines that are not ok: docs/how-to/troubleshooting.md")}
		}
		return nil
	})
}

// examine examines all parts at once.
func (o *operator) examine(ctx context.Context, cfg config.Config) ([]orchestrator.Finding, error) {
	var parts []func() []orchestrator.Finding
	log, asked := slog.New(slog.DiscardHandler), choice.Of(cfg)
	var attachments []orchestrator.Attachment
	disks := make([]diagnose.Disks, len(cfg.RackList()))
	if cfg.Mode.Controller() {
		for i, one := range cfg.RackList() {
			client, clock, err := o.newClockedRack(one, log)
			if err != nil {
				return nil, err
			}
			parts = append(parts, func() (found []orchestrator.Finding) {
				found, disks[i] = diagnose.ExamineRack(ctx, client, clock, cfg.ClusterID, asked.Name, time.Now())
				return found
			})
		}
	}
	node, restarts := o.examineHost(ctx, cfg, log)
	parts = append(parts, node...)
	if asked.Examiner != nil {
		parts = append(parts, func() (found []orchestrator.Finding) {
			found, attachments = asked.Examiner.Examine(ctx)
			return found
		})
	}
	if asked.Classes != nil {
		parts = append(parts,
			func() []orchestrator.Finding { return diagnose.ExamineClasses(ctx, asked.Classes, asked.Name) })
	}
	parts = append(parts, restarts...)
	if len(parts) == 0 {
		return nil, Usage(
			"there is nothing to examine: set --oxide-host for a rack, --kubeconfig or NOMAD_ADDR, or --mode=node on a node",
		)
	}
	found := make([][]orchestrator.Finding, len(parts))
	var group sync.WaitGroup
	for i, part := range parts {
		group.Go(func() { found[i] = part() })
	}
	group.Wait()
	var all []orchestrator.Finding
	for _, findings := range found {
		all = append(all, findings...)
	}
	var seen diagnose.Disks
	for _, of := range disks {
		seen.All, seen.Leaving = append(seen.All, of.All...), append(seen.Leaving, of.Leaving...)
	}
	guest := guestOf(ctx, cfg, o.environ)
	return append(all, diagnose.ExamineAttachments(ctx, asked.Name, attachments, seen, guest)...), nil
}

// newClockedRack makes a client of a rack that also reads the rack's clock.
func (o *operator) newClockedRack(cfg config.Rack, log *slog.Logger) (*rack.Client, *diagnose.Clock, error) {
	clock := &diagnose.Clock{}
	client, err := o.program.NewRack(cfg, nil, log, func(next http.RoundTripper) http.RoundTripper {
		clock.Next = next
		return clock
	})
	return client, clock, err
}

func (o *operator) printFindings(findings []orchestrator.Finding) error {
	if o.json {
		return printJSON(o.stdout, findings)
	}
	return printTable(o.stdout, func(w io.Writer) {
		for _, f := range findings {
			text := f.Found
			if f.Next != "" {
				text += ": " + f.Next
			}
			line(w, string(f.Status), f.Area, f.Looked, text)
		}
	})
}
