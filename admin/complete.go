// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package admin

import (
	"context"
	"log/slog"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/oxidecomputer/oxide-csi-plugin/admin/diagnose"
	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
)

// completionTimeout bounds completion in a shell, where a user waits for it.
const completionTimeout = 2 * time.Second

// suggestion is one object for completion. name is empty if commands find the object only by its ID.
type suggestion struct{ id, name, description string }

// matching returns the names that begin with the prefix, and the IDs of objects whose names do not. A name that is no
// word for a shell is left out.
func matching(objects []suggestion, prefix string) (texts []string) {
	for _, object := range objects {
		for _, text := range []string{object.name, object.id} {
			if text != "" && strings.HasPrefix(text, prefix) && !strings.ContainsAny(text, "\t\n") {
				texts = append(texts, text+"\t"+object.description)
				break
			}
		}
	}
	return texts
}

// complete completes the arguments of a command of an operator. There are no suggestions if a list cannot be read.
func (o *operator) complete(list func(context.Context, config.Config) ([]suggestion, error)) cobra.CompletionFunc {
	return func(cmd *cobra.Command, _ []string, prefix string) ([]string, cobra.ShellCompDirective) {
		ctx, cancel := context.WithTimeout(context.Background(), completionTimeout)
		defer cancel()
		cfg, _, err := config.LoadOperator(cmd.Flags(), o.environ)
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		objects, err := list(ctx, cfg)
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return matching(objects, prefix), cobra.ShellCompDirectiveNoFileComp
	}
}

// completeVolume completes what explain takes: with an orchestrator claims and IDs, otherwise the names on the racks.
func (o *operator) completeVolume() cobra.CompletionFunc {
	return o.complete(func(ctx context.Context, cfg config.Config) (suggestions []suggestion, err error) {
		if orchestrator, err := inventorist(cfg); err == nil {
			inventory, err := orchestrator.Inventory(ctx)
			for _, v := range inventory.Volumes {
				suggestions = append(suggestions, suggestion{v.ID, v.Claim, v.Object})
			}
			return suggestions, err
		}
		racks, err := o.racks(cfg, slog.New(slog.DiscardHandler))
		for _, client := range racks {
			for item, err := range client.Disks(ctx, rack.Cursor{}, 0) {
				if err != nil {
					return nil, err
				}
				disk := item.Value
				name, _ := rack.FullNames(diskname.Volume, disk.Description)
				if name != "" && disk.Name == diskname.ForVolume(cfg.ClusterID, name) {
					suggestions = append(suggestions, suggestion{disk.VolumeID, name, sizeText(disk.SizeBytes)})
				}
			}
		}
		return suggestions, err
	})
}

// completeOrphan completes the IDs of orphans.
func (o *operator) completeOrphan() cobra.CompletionFunc {
	return o.complete(func(ctx context.Context, cfg config.Config) (suggestions []suggestion, err error) {
		orchestrator, err := inventorist(cfg)
		if err != nil {
			return nil, err
		}
		racks, err := o.racks(cfg, slog.New(slog.DiscardHandler))
		if err != nil {
			return nil, err
		}
		found, err := diagnose.FindOrphans(ctx, racks, cfg.ClusterID, orchestrator, time.Now())
		for _, orphan := range found.Orphans {
			suggestions = append(suggestions, suggestion{orphan.ID, "", orphan.Name})
		}
		return suggestions, err
	})
}

// firstArgument completes only the first argument. The shell completes the others as paths.
func firstArgument(complete cobra.CompletionFunc) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveDefault
		}
		return complete(cmd, args, prefix)
	}
}
