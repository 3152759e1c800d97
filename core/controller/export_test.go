// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller

import (
	"context"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
)

// SettleNow finishes or takes back the expansions that were left behind, whatever their age.
func (c *Service) SettleNow(ctx context.Context) error {
	for _, client := range c.racks.all {
		var snapshots []rack.Snapshot
		for listed, err := range client.Snapshots(ctx, rack.Cursor{}, 0) {
			if err != nil {
				return err
			}
			snapshots = append(snapshots, listed.Value)
		}
		if _, err := c.expanders[client].Settle(ctx, snapshots, 0, Adoptions); err != nil {
			return err
		}
	}
	return nil
}
