// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package nomad

import (
	"context"
	"errors"
	"net/http"
	"net/url"

	"github.com/hashicorp/nomad/api"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// Operator reads what Nomad knows of the plugin's volumes, for the commands of an operator. It changes nothing.
type Operator struct{ options Options }

// NewOperator makes an Operator. It does no I/O.
func NewOperator(options Options) *Operator { return &Operator{options} }

// volumeStub is a volume in Nomad's list. Provider is the plugin's name, or empty while no plugin of its ID is known.
type volumeStub struct{ ID, Namespace, ExternalID, Provider string }

// Inventory implements [metadata.Inventorist]. Nomad leaves out of its lists what a token may not read, without an
// error. So with ACLs on it needs a management token.
func (o *Operator) Inventory(ctx context.Context) (metadata.Inventory, error) {
	if err := o.seesAll(ctx); err != nil {
		return metadata.Inventory{}, err
	}
	known := metadata.Inventory{SnapshotsUnknown: true}
	query := url.Values{"type": {"csi"}, "namespace": {"*"}, "per_page": {"500"}}
	for {
		var page []volumeStub
		next := ""
		err := o.options.call(ctx, listVolumes, func(client *api.Client) error {
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
			return metadata.Inventory{}, err
		}
		for _, v := range page {
			if v.Provider != "" && v.Provider != driver {
				continue
			}
			known.Volumes = append(known.Volumes, metadata.KnownObject{
				ID: v.ExternalID, Object: "Nomad volume " + v.ID + " in namespace " + v.Namespace,
			})
		}
		if next == "" {
			return known, nil
		}
		query.Set("next_token", next)
	}
}

var (
	listVolumes = operation{
		what: "list the volumes through", wrong: "the answer is not from a Nomad agent", policy: "a management token",
	}
	readToken = operation{
		what:   "look up the token's policies through",
		wrong:  "the answer is not from a Nomad agent",
		policy: "a management token",
	}
)

// errNoIndex means that an answer lacks the headers of Nomad. Then the client does not see that another page follows.
var errNoIndex = errors.New("the answer has no X-Nomad-Index")

// seesAll returns an error unless the token sees the volumes of all namespaces.
func (o *Operator) seesAll(ctx context.Context) error {
	var token struct{ Type string }
	disabled := false
	err := o.options.call(ctx, readToken, func(client *api.Client) error {
		_, err := client.Raw().Query("/v1/acl/token/self", &token, (&api.QueryOptions{}).WithContext(ctx))
		var refused api.UnexpectedResponseError
		if errors.As(err, &refused) && refused.StatusCode() == http.StatusBadRequest {
			disabled = true // "ACL support disabled": command/agent/acl_endpoint.go
			return nil
		}
		return err
	})
	if err != nil || disabled || token.Type == "management" {
		return err
	}
	return &metadata.Error{
		Kind: metadata.ErrInvalid,
		What: "the Nomad token may hide volumes: it is not a management token",
		Next: "set NOMAD_TOKEN, or --nomad-token-file, to a management token",
	}
}

var _ metadata.Inventorist = (*Operator)(nil)
