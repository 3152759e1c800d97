// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package nomad

import (
	"context"
	"fmt"

	"github.com/hashicorp/nomad/api"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

var listPlugins = operation{
	what: "list the plugins through", wrong: "the answer is not from a Nomad agent", policy: `plugin { policy = "list" }`,
}

// pluginStub is a plugin in Nomad's list.
type pluginStub struct {
	ID, Provider                                                         string
	ControllersHealthy, ControllersExpected, NodesHealthy, NodesExpected int
}

// Examine implements [metadata.Examiner]. With ACLs on it needs plugin { policy = "list" }.
func (o *Operator) Examine(ctx context.Context) []metadata.Finding {
	const looked = "plugins"
	finding := func(status metadata.Status, found, next string) metadata.Finding {
		return metadata.Finding{Area: "nomad", Status: status, Looked: looked, Found: found, Next: next}
	}
	var all []pluginStub
	err := o.options.call(ctx, listPlugins, func(client *api.Client) error {
		_, err := client.Raw().Query("/v1/plugins?type=csi", &all, (&api.QueryOptions{}).WithContext(ctx))
		return err
	})
	if err != nil {
		return []metadata.Finding{
			finding(metadata.StatusFailure, err.Error(), "set NOMAD_ADDR, and NOMAD_TOKEN if ACLs are on"),
		}
	}
	var findings []metadata.Finding
	for _, p := range all {
		if p.Provider != driver {
			continue
		}
		found := fmt.Sprintf("%s: %d of %d controllers and %d of %d nodes are healthy",
			p.ID, p.ControllersHealthy, p.ControllersExpected, p.NodesHealthy, p.NodesExpected)
		next := "nomad plugin status -verbose " + p.ID + " names the allocations; their logs say why"
		switch {
		case p.ControllersHealthy == 0 || p.NodesHealthy == 0:
			findings = append(findings, finding(metadata.StatusFailure, found, next))
		case p.ControllersHealthy < p.ControllersExpected || p.NodesHealthy < p.NodesExpected:
			findings = append(findings, finding(metadata.StatusWarning, found, next))
		default:
			findings = append(findings, finding(metadata.StatusOK, found, ""))
		}
	}
	if len(findings) == 0 {
		return []metadata.Finding{
			finding(metadata.StatusFailure, "no plugin of this driver is known", "run the jobs: docs/how-to/nomad.md"),
		}
	}
	return findings
}

var _ metadata.Examiner = (*Operator)(nil)
