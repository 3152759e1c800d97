// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package nomad

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/hashicorp/nomad/api"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// The policies of deploy/nomad/policies.
const (
	PolicyNode              = "node"
	PolicyController        = "controller"
	PolicyRestartNode       = "restart-node"
	PolicyRestartController = "restart-controller"
	PolicyRestartDrain      = "restart-drain"
	PolicyOperator          = "operator"
)

// anyNamespace stands for a namespace that the operator chooses.
const anyNamespace = ""

// rules are the rules of a policy that are looked at. Node and plugin are a level, or empty.
type rules struct {
	node, plugin string
	namespace    string
	capabilities []string
}

// policyRules are the rules of the policies. A test compares them with the files.
var policyRules = map[string]rules{
	PolicyNode: {node: "read"},
	PolicyController: {
		node: "read", plugin: "read", namespace: "*",
		capabilities: []string{"csi-list-volume", "csi-read-volume", "read-job"},
	},
	PolicyRestartNode:       {node: "write", plugin: "read"},
	PolicyRestartController: {node: "write", plugin: "read"},
	PolicyRestartDrain:      {namespace: "*", capabilities: []string{"read-job", "alloc-lifecycle"}},
	PolicyOperator: {plugin: "read", namespace: anyNamespace, capabilities: []string{
		"csi-list-volume", "csi-read-volume", "csi-write-volume", "csi-mount-volume", "list-jobs", "read-job", "submit-job",
		"read-logs",
	}},
}

// levels are the levels of a policy; a level includes those before it. Of several policies the one with the last level
// counts, so one that denies wins, as in Nomad.
var levels = []string{"", "list", "read", "write", deny}

const deny = "deny"

// implied are the capabilities of a namespace's policy, as far as [policyRules] has them: Nomad, acl/policy.go.
var implied = map[string][]string{
	"read": {"list-jobs", "read-job", "csi-list-volume", "csi-read-volume"},
	"write": {
		"list-jobs", "read-job", "csi-list-volume", "csi-read-volume", "submit-job", "read-logs", "alloc-lifecycle",
		"csi-mount-volume", "csi-write-volume",
	},
	deny: {deny},
}

// grant is what a policy of Nomad grants, as Nomad has parsed it.
type grant struct {
	Namespaces []struct {
		Name, Policy string
		Capabilities []string
	}
	Node, Plugin *struct{ Policy string }
}

// missing are the rules that no grant has.
func (r rules) missing(grants []grant) (missing []string) {
	node, plugin := "", ""
	for _, g := range grants {
		if g.Node != nil {
			node = higher(node, g.Node.Policy)
		}
		if g.Plugin != nil {
			plugin = higher(plugin, g.Plugin.Policy)
		}
	}
	if !includes(node, r.node) {
		missing = append(missing, fmt.Sprintf("node { policy = %q }", r.node))
	}
	if !includes(plugin, r.plugin) {
		missing = append(missing, fmt.Sprintf("plugin { policy = %q }", r.plugin))
	}
	for _, capability := range r.missingCapabilities(grants) {
		missing = append(missing, "capability "+capability)
	}
	return missing
}

func higher(a, b string) string {
	if slices.Index(levels, b) > slices.Index(levels, a) {
		return b
	}
	return a
}

// includes reports whether a level grants another one.
func includes(level, needed string) bool {
	return needed == "" || level != deny && higher(level, needed) == level
}

// missingCapabilities are those that the namespace lacks: if any will do, the one that lacks the fewest.
func (r rules) missingCapabilities(grants []grant) []string {
	fewest := r.capabilities
	granted := capabilities(grants)
	for _, name := range slices.Sorted(maps.Keys(granted)) {
		if r.namespace != anyNamespace && r.namespace != name {
			continue
		}
		lacks := slices.DeleteFunc(slices.Clone(r.capabilities), func(capability string) bool {
			return slices.Contains(granted[name], capability)
		})
		if len(lacks) < len(fewest) {
			fewest = lacks
		}
	}
	return fewest
}

// capabilities are what the grants allow in the namespaces that they name: what any allows, and nothing if one denies.
// Nomad adds up the same way: acl/acl.go, NewACL.
func capabilities(grants []grant) map[string][]string {
	all := map[string][]string{}
	for _, g := range grants {
		for _, n := range g.Namespaces {
			all[n.Name] = slices.Concat(all[n.Name], n.Capabilities, implied[n.Policy])
		}
	}
	maps.DeleteFunc(all, func(_ string, granted []string) bool { return slices.Contains(granted, deny) })
	return all
}

// acl looks whether the token has the rules of the policies that it needs.
func (e *examination) acl(ctx context.Context, needs []string) {
	const looked = "ACLs"
	if len(needs) == 0 {
		return
	}
	management, off, err := e.management(ctx)
	switch {
	case err == nil && off:
		e.add(orchestrator.StatusOK, looked, "off", "")
		return
	case err == nil && management:
		e.add(orchestrator.StatusOK, looked, "the token is a management token", "")
		return
	}
	grants, err := e.grants(ctx)
	if err != nil {
		e.unreadable(orchestrator.StatusWarning, looked, err, "set NOMAD_TOKEN to a token that is valid")
		return
	}
	for _, name := range needs {
		if missing := policyRules[name].missing(grants); len(missing) > 0 {
			e.add(
				orchestrator.StatusFailure, looked, fmt.Sprintf("the token lacks: %s", strings.Join(missing, ", ")),
				"apply deploy/nomad/policies/"+name+".policy.hcl as its first lines say",
			)
			continue
		}
		e.add(orchestrator.StatusOK, looked, "the token has what "+name+".policy.hcl grants", "")
	}
}

// seesClaims returns an error unless the token sees the claims on the volumes of all namespaces.
func (o *Operator) seesClaims(ctx context.Context) error {
	// An identity of a job cannot ask for its token, but for its policies.
	if management, off, err := o.management(ctx); err == nil && (off || management) {
		return nil
	}
	grants, err := o.grants(ctx)
	if err != nil {
		return err
	}
	if hidden := hidesClaims(grants); hidden != "" {
		return &metadata.Error{
			Kind: metadata.ErrInvalid,
			What: fmt.Sprintf("the Nomad token may not read volumes and jobs of namespace %q, so claims may be hidden", hidden),
			Next: "apply " + controllerPolicyFile + " as its first lines say, and no policy that takes from it",
		}
	}
	return nil
}

// hidesClaims returns a namespace, or a pattern of namespaces, in which the grants hide claims, or "". Of the rules
// whose names match a namespace only those with the closest name count.
func hidesClaims(grants []grant) string {
	granted := capabilities(grants)
	names := []string{"*"}
	for _, g := range grants {
		for _, n := range g.Namespaces {
			names = append(names, n.Name)
		}
	}
	for _, name := range names {
		for _, capability := range policyRules[PolicyController].capabilities {
			if !slices.Contains(granted[name], capability) {
				return name
			}
		}
	}
	return ""
}

// grants are what the token's policies grant. Nomad shows each token its own policies, also to an identity of a job.
func (o *Operator) grants(ctx context.Context) (grants []grant, err error) {
	op := reading("read the token's policies", "a token that is valid")
	var policies []struct{ Name string }
	if _, err := o.get(ctx, op, "/v1/acl/policies", &policies); err != nil {
		return nil, err
	}
	for _, p := range policies {
		var policy struct{ RulesJSON *grant }
		if _, err := o.get(ctx, op, "/v1/acl/policy/"+url.PathEscape(p.Name), &policy); err != nil {
			return nil, err
		}
		if policy.RulesJSON != nil {
			grants = append(grants, *policy.RulesJSON)
		}
	}
	return grants, nil
}

// management reports whether the token is a management token, and whether ACLs are off.
func (o *Operator) management(ctx context.Context) (management, off bool, err error) {
	var token struct{ Type string }
	err = o.options.Call(ctx, readToken, func(client *api.Client) error {
		_, err := client.Raw().Query("/v1/acl/token/self", &token, (&api.QueryOptions{}).WithContext(ctx))
		var refused api.UnexpectedResponseError
		if errors.As(err, &refused) && refused.StatusCode() == http.StatusBadRequest {
			off = true // "ACL support disabled": command/agent/acl_endpoint.go
			return nil
		}
		return err
	})
	return token.Type == "management", off, err
}
