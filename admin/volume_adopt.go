// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package admin

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/oxidecomputer/oxide-csi-plugin/admin/client"
	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
)

// adoptFlags are the flags of the command adopt.
type adoptFlags struct {
	from, orchestrator, storageClass, pluginID string
	yes                                        bool
}

func (b *storageCommands) adopt() *cobra.Command {
	var f adoptFlags
	cmd := &cobra.Command{
		Use:   "adopt",
		Short: "Take over the volumes of a cluster that is gone",
		Long: `adopt takes over all volumes of another cluster ID and their snapshots, on the racks and in the projects of the controller.
It lists them on stderr, asks, and records on the rack that the controller's cluster owns each of them. It changes no disk.
If an interrupted expansion has left a volume without a disk, adopt makes the volume's larger disk. Then it prints what
the orchestrator needs in order to use the volumes.

Nothing of the other cluster may run any more: its controller would go on using the volumes.

Repeated, adopt prints the same again and adopts what is missing. A cluster that is rebuilt and keeps its --cluster-id
adopts nothing: with its own ID, the command only prints.`,
		Example: `  oxide-csi volume adopt --from-cluster=prod-1
  oxide-csi volume adopt --from-cluster=prod-1 --for=kubernetes --yes | kubectl create -f -
  oxide-csi volume adopt --from-cluster=prod-1 --for=nomad --yes | sh`,
		Args:              NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
	}
	flags := cmd.Flags()
	flags.StringVar(&f.from, "from-cluster", "", "cluster ID of the cluster that is gone; required")
	flags.StringVar(&f.orchestrator, "for", "",
		"print the volumes' PersistentVolumes (kubernetes), or a shell script that registers them (nomad)")
	flags.StringVar(&f.storageClass, "storage-class", "oxide-disk",
		"StorageClass of the PersistentVolumes; a claim is bound only to a volume of its class")
	flags.StringVar(&f.pluginID, "plugin-id", "oxide", "ID of the plugin in Nomad")
	flags.BoolVar(&f.yes, "yes", false, "do not ask")
	completeFlag(cmd, "for", cobra.FixedCompletions([]string{"kubernetes", "nomad"}, cobra.ShellCompDirectiveNoFileComp))
	cmd.RunE = func(cmd *cobra.Command, _ []string) error { return b.runAdopt(cmd, f) }
	return cmd
}

func (b *storageCommands) runAdopt(cmd *cobra.Command, f adoptFlags) error {
	show, known := map[string]func(io.Writer, []client.AdoptableVolume){
		"":           printAdoptable,
		"kubernetes": func(w io.Writer, v []client.AdoptableVolume) { printPersistentVolumes(w, v, f.storageClass) },
		"nomad":      func(w io.Writer, v []client.AdoptableVolume) { printNomadVolumes(w, v, f.pluginID) },
	}[f.orchestrator]
	switch {
	case f.from == "":
		return config.Problems{{Flag: "--from-cluster", What: "is required: the ID of the cluster that is gone"}}
	case !known:
		return config.Problems{{Flag: "--for", What: fmt.Sprintf("%q is neither kubernetes nor nomad", f.orchestrator)}}
	}
	own := false // then nothing is adopted
	list := func(ctx context.Context, plugin *client.Client) (_ []client.AdoptableVolume, err error) {
		if own, err = plugin.Owns(ctx, f.from); err != nil {
			return nil, err
		}
		return plugin.Adoptable(ctx, f.from)
	}
	volumes, err := callPlugin(b, cmd, list)
	if err != nil {
		return err
	}
	if !f.yes && !own {
		if err := confirmAdoption(cmd.InOrStdin(), b.stderr, f.from, volumes); err != nil {
			return err
		}
	}
	return runAndPrint(b, cmd, func(ctx context.Context, plugin *client.Client) ([]client.AdoptableVolume, error) {
		return volumes, plugin.Adopt(ctx, f.from, volumes)
	}, show)
}

// confirmAdoption lists the volumes and asks whether to adopt them. The end of stdin means no.
func confirmAdoption(stdin io.Reader, stderr io.Writer, from string, volumes []client.AdoptableVolume) error {
	if err := printTable(stderr, func(w io.Writer) { printAdoptable(w, volumes) }); err != nil {
		return err
	}
	fmt.Fprintf(stderr, "Nothing of cluster %q may run any more. Adopt these %d volumes? [y/N] ", from, len(volumes))
	answer, err := bufio.NewReader(stdin).ReadString('\n')
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	switch strings.ToLower(strings.TrimSpace(answer)) {
	case "y", "yes":
		return nil
	}
	return errors.New("nothing was adopted: answer y, or repeat the command with --yes")
}

func printAdoptable(w io.Writer, volumes []client.AdoptableVolume) {
	line(w, "VOLUME ID", "SIZE", "NAME", "CLAIM", "SNAPSHOTS", "RACK", "NODE")
	for _, v := range volumes {
		size := sizeText(v.SizeBytes)
		if v.Deleted {
			size = "deleted"
		}
		snapshots := strconv.Itoa(len(v.SnapshotIDs))
		line(w, v.ID, size, cmp.Or(v.Name, "-"), cmp.Or(v.Claim, "-"), snapshots, v.Rack, cmp.Or(v.NodeName, v.NodeID, "-"))
	}
}
