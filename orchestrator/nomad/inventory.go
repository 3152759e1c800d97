// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package nomad

import (
	"context"
	"errors"
	"net/url"

	"github.com/hashicorp/nomad/api"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/nomad"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// options calls the agent as the metadata provider does.
type options struct{ nomad.Options }

// Operator reads what Nomad knows of the plugin's volumes, for the commands of an operator. It changes nothing.
type Operator struct {
	options options
	// Needs are the policies whose rules [Operator.Examine] looks for: [PolicyOperator] and the others.
	Needs []string
}

// NewOperator makes an Operator. It does no I/O.
func NewOperator(o nomad.Options) *Operator { return &Operator{options: options{o}} }

// volumeStub is a volume in Nomad's list. Provider is the plugin's name, or empty while no plugin of its ID is known.
type volumeStub struct {
	ID, Namespace, ExternalID, Provider string
	CurrentReaders, CurrentWriters      int
	// ModifyTime is in nanoseconds since 1970.
	ModifyTime int64
}

// Inventory implements [orchestrator.Inventorist]. Nomad leaves out of its lists what a token may not read, without an
// error. So with ACLs on it needs a management token.
func (o *Operator) Inventory(ctx context.Context) (orchestrator.Inventory, error) {
	if err := o.seesAll(ctx); err != nil {
		return orchestrator.Inventory{}, err
	}
	volumes, err := o.volumes(ctx, "a management token")
	if err != nil {
		return orchestrator.Inventory{}, err
	}
	known := orchestrator.Inventory{SnapshotsUnknown: true}
	for _, v := range volumes {
		known.Volumes = append(known.Volumes, orchestrator.KnownObject{
			ID: v.ExternalID, Object: "Nomad volume " + v.ID + " in namespace " + v.Namespace,
		})
	}
	return known, nil
}

// volumes lists the plugin's volumes that the token may see, including those of a plugin that is not known now. The
// caller needs the policy with ACLs on.
func (o *Operator) volumes(ctx context.Context, policy string) (all []volumeStub, err error) {
	query := url.Values{"type": {"csi"}, "namespace": {"*"}, "per_page": {"500"}}
	for {
		var page []volumeStub
		next := ""
		err := o.options.Call(ctx, reading("list the volumes", policy), func(client *api.Client) error {
			meta, err := client.Raw().Query("/v1/volumes?"+query.Encode(), &page, (&api.QueryOptions{}).WithContext(ctx))
			if err == nil && meta.LastIndex == 0 {
				err = errNoIndex
			}
			if err == nil {
				next = meta.NextToken
			}
			return err
		})
		if err != nil {
			return nil, err
		}
		for _, v := range page {
			if v.Provider == "" || v.Provider == driver {
				all = append(all, v)
			}
		}
		if next == "" {
			return all, nil
		}
		query.Set("next_token", next)
	}
}

// readVolume reads a volume of a list. It returns false if the volume was deleted since. The caller needs the policy
// with ACLs on.
func (o *Operator) readVolume(
	ctx context.Context, stub volumeStub, policy string,
) (v volumeInfo, exists bool, err error) {
	path := "/v1/volume/csi/" + url.PathEscape(stub.ID) + "?" + url.Values{"namespace": {stub.Namespace}}.Encode()
	exists, err = o.get(ctx, reading("read volume "+stub.ID, policy), path, &v)
	return v, exists, err
}

var readToken = reading("look up the token's policies", "a management token")

// errNoIndex means that an answer lacks the headers of Nomad. Then the client does not see that another page follows.
var errNoIndex = errors.New("the response has no X-Nomad-Index")

// seesAll returns an error unless the token sees the volumes of all namespaces.
func (o *Operator) seesAll(ctx context.Context) error {
	management, off, err := o.management(ctx)
	if err != nil || off || management {
		return err
	}
	return &metadata.Error{
		Kind: metadata.ErrInvalid,
		What: "the Nomad token may hide volumes: it is not a management token",
		Next: "set NOMAD_TOKEN, or --nomad-token-file, to a management token",
	}
}

var _ orchestrator.Inventorist = (*Operator)(nil)
