// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package admin

import (
	"errors"
	"io"
	"log/slog"
	"strings"

	"github.com/spf13/cobra"

	"github.com/oxidecomputer/oxide-csi-plugin/admin/diagnose"
	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator/choice"
)

const explainHelp = `explain follows a volume from its claim to the disk on the rack and to the pod that uses it. It begins with a permanent
word (docs/reference/errors.md), what is wrong, who acts, and the next step. Then come all links of the chain, and what
plugin and orchestrator said last. It changes nothing.

VOLUME is a volume ID, NAMESPACE/CLAIM, pod/NAMESPACE/NAME, or the name of a PersistentVolume. In Nomad it is a volume's
ID or external ID, NAMESPACE/VOLUME, or the ID of an allocation or its beginning. Without an orchestrator it is a volume
ID or name, and the command shows the rack's part. The node's part comes from events of Kubernetes, or from the logs of
the plugin's allocations in Nomad. On the instance that has the disk it also shows device, filesystem and mounts.

` + operatorHelp

func explainCommand(p Program) *cobra.Command {
	o := newOperator(p)
	cmd := &cobra.Command{
		Use:   "explain VOLUME",
		Short: "Say why a volume does not work, and who has to act",
		Long:  explainHelp,
		Example: `  oxide-csi explain default/data --kubeconfig=$HOME/.kube/config
  oxide-csi explain pod/default/postgres-0 --kubeconfig=$HOME/.kube/config
  NOMAD_ADDR=https://nomad.example:4646 oxide-csi explain shop/data`,
		Args:              exactly("VOLUME"),
		ValidArgsFunction: firstArgument(o.completeVolume()),
	}
	return o.command(cmd, func(cmd *cobra.Command, cfg config.Config, args []string) error {
		racks, err := o.racks(cfg, slog.New(slog.DiscardHandler))
		if err != nil {
			return err
		}
		subject, err := parseSubject(args[0])
		if err != nil {
			return err
		}
		asked := choice.Of(cfg).Tracer
		if asked == nil && (len(racks) == 0 || subject.Claim != "" || subject.Pod != "") {
			return Usage(
				"explain needs an orchestrator for this: set --kubeconfig or NOMAD_ADDR; for a volume ID the settings of a rack are enough",
			)
		}
		guest := guestOf(cmd.Context(), cfg, o.environ)
		explained, err := diagnose.Explain(cmd.Context(), subject, asked, racks, cfg.ClusterID, guest)
		if errors.Is(err, orchestrator.ErrNotFound) {
			return Exit(ExitNotFound, err)
		}
		if err != nil {
			return err
		}
		if o.json {
			return printJSON(o.stdout, explained)
		}
		return printTable(o.stdout, func(w io.Writer) { printExplanation(w, explained) })
	})
}

func parseSubject(text string) (orchestrator.Subject, error) {
	parts := strings.Split(text, "/")
	for _, part := range parts {
		if part == "" {
			return orchestrator.Subject{}, Usage(
				"%q is not a volume: write an ID, NAMESPACE/CLAIM, pod/NAMESPACE/NAME or a name", text)
		}
	}
	switch {
	case len(parts) == 3 && parts[0] == "pod":
		return orchestrator.Subject{Pod: parts[1] + "/" + parts[2]}, nil
	case len(parts) == 2:
		return orchestrator.Subject{Claim: text}, nil
	case len(parts) > 1:
		return orchestrator.Subject{}, Usage("%q is not a volume: write an ID, NAMESPACE/CLAIM, pod/NAMESPACE/NAME or a name",
			text)
	}
	if id, ok := diskname.ParseID(text); ok {
		return orchestrator.Subject{VolumeID: id}, nil
	}
	return orchestrator.Subject{Name: text}, nil
}

// printExplanation prints an explanation. Its first line alone says what to do.
func printExplanation(w io.Writer, e diagnose.Explanation) {
	line(w, e.Reason+": "+e.Verdict+"; next: "+e.Next)
	line(w, "who acts: "+e.Actor)
	line(w)
	for _, step := range e.Chain {
		mark := ""
		if step.Link == e.Broken {
			mark = "  <- here"
		}
		line(w, step.Link, step.Object, step.State+mark, ageText(step.Since))
	}
	for _, message := range e.Messages {
		line(w)
		from := message.Link
		if !message.Last.IsZero() {
			from += ", " + ageText(message.Last) + " ago"
		}
		line(w, from+": "+message.Text)
	}
}
