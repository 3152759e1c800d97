// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package kubernetes

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// The service accounts of the manifests and of the chart.
const (
	controllerAccount = "oxide-csi-controller"
	nodeAccount       = "oxide-csi-node"
)

// right is a right that the manifests grant. A test compares the list with docs/reference/kubernetes-rights.md, which
// is made from the manifests.
type right struct {
	account string
	// component is the component of the manifests that adds the right, or empty.
	component string
	// namespaced rights hold in the plugin's namespace only.
	namespaced bool
	// resource is RESOURCE[.GROUP][/SUBRESOURCE]. verbs are separated by spaces.
	resource, verbs string
}

var rights = []right{
	{controllerAccount, "", false, "persistentvolumes", "get list watch create patch delete"},
	{controllerAccount, "", false, "persistentvolumeclaims", "get list watch update"},
	{controllerAccount, "", false, "persistentvolumeclaims/status", "patch"},
	{controllerAccount, "", false, "nodes", "get list watch"},
	{controllerAccount, "", false, "events", "list watch create update patch"},
	{controllerAccount, "", false, "storageclasses.storage.k8s.io", "get list watch"},
	{controllerAccount, "", false, "csinodes.storage.k8s.io", "get list watch"},
	{controllerAccount, "", false, "volumeattachments.storage.k8s.io", "get list watch patch"},
	{controllerAccount, "", false, "volumeattachments.storage.k8s.io/status", "patch"},
	{controllerAccount, "", true, "leases.coordination.k8s.io", "get list watch create update patch delete"},
	{
		controllerAccount, "capacity", true, "csistoragecapacities.storage.k8s.io",
		"get list watch create update patch delete",
	},
	{controllerAccount, "capacity", true, "pods", "get"},
	{controllerAccount, "capacity", true, "replicasets.apps", "get"},
	{controllerAccount, "restart", false, "nodes", "patch"},
	{controllerAccount, "restart", false, "restarts.csi.oxide.computer", "request"},
	{controllerAccount, "restart-drain", false, "pods", "list"},
	{controllerAccount, "restart-drain", false, "pods/eviction", "create"},
	{controllerAccount, "snapshots", false, "volumesnapshots.snapshot.storage.k8s.io", "get list watch update"},
	{controllerAccount, "snapshots", false, "volumesnapshotclasses.snapshot.storage.k8s.io", "get list watch"},
	{
		controllerAccount, "snapshots", false, "volumesnapshotcontents.snapshot.storage.k8s.io",
		"get list watch update patch",
	},
	{controllerAccount, "snapshots", false, "volumesnapshotcontents.snapshot.storage.k8s.io/status", "update patch"},
	{nodeAccount, "", false, "nodes", "get list watch"},
	{nodeAccount, "await-detach", false, "volumeattachments.storage.k8s.io", "list"},
	{nodeAccount, "restart", false, "nodes", "patch"},
	{nodeAccount, "restart", false, "restarts.csi.oxide.computer", "reply"},
	{nodeAccount, "startup-taint", false, "nodes", "patch"},
	{nodeAccount, "startup-taint", false, "csinodes.storage.k8s.io", "get list watch"},
}

// oneRight is a single verb of a right.
type oneRight struct {
	right
	verb string
}

func (r oneRight) text() string { return r.verb + " " + r.resource }

// attributes are the resourceAttributes of an access review.
func (r oneRight) attributes(namespace string) map[string]any {
	resource, subresource, _ := strings.Cut(r.resource, "/")
	resource, group, _ := strings.Cut(resource, ".")
	attributes := map[string]any{"verb": r.verb, "group": group, "resource": resource, "subresource": subresource}
	if r.namespaced {
		attributes["namespace"] = namespace
	}
	return attributes
}

// each returns the single rights of an account.
func each(account string) (all []oneRight) {
	for _, r := range rights {
		for verb := range strings.FieldsSeq(r.verbs) {
			if r.account == account {
				all = append(all, oneRight{r, verb})
			}
		}
	}
	return all
}

// reviewsAtOnce bounds the access reviews that are under way.
const reviewsAtOnce = 8

// rights asks the API server which of the rights that the manifests grant the plugin's service accounts have. It needs
// the verb "create" on "subjectaccessreviews", which changes nothing. namespace is the plugin's.
func (e *examination) rights(ctx context.Context, namespace string) {
	if namespace == "" {
		return // the sidecars have reported that
	}
	for _, account := range []string{controllerAccount, nodeAccount} {
		looked := "rights of " + account
		has, err := e.review(ctx, namespace, account)
		if err != nil {
			e.unreadable(looked, err)
			continue
		}
		granted := slices.Contains(slices.Collect(maps.Values(has)), true)
		switch missing := missingRights(has); {
		case account == nodeAccount && !granted:
			e.add(orchestrator.StatusOK, looked, "none: right for nodes that learn their instance without Kubernetes", "")
		case len(missing) > 0:
			e.add(
				orchestrator.StatusFailure, looked, "missing: "+orchestrator.Some(missing),
				"apply deploy/k8s, or the chart, again: docs/reference/kubernetes-rights.md says what each right is for",
			)
		default:
			e.add(orchestrator.StatusOK, looked, "all that the installed components need", "")
		}
	}
}

// review tells for each single right of an account whether it has the right.
func (e *examination) review(ctx context.Context, namespace, account string) (map[oneRight]bool, error) {
	asked := each(account)
	allowed := make([]bool, len(asked))
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(reviewsAtOnce)
	for i, r := range asked {
		group.Go(func() error {
			var answer struct{ Status struct{ Allowed bool } }
			_, err := e.Do(ctx, post(
				"ask for the rights of "+account, "/apis/authorization.k8s.io/v1/subjectaccessreviews", "subjectaccessreviews",
				map[string]any{
					"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview",
					"spec": map[string]any{
						"user": fmt.Sprintf("system:serviceaccount:%s:%s", namespace, account),
						"groups": []string{
							"system:serviceaccounts", "system:serviceaccounts:" + namespace, "system:authenticated",
						},
						"resourceAttributes": r.attributes(namespace),
					},
				},
			), &answer)
			allowed[i] = answer.Status.Allowed
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	has := map[oneRight]bool{}
	for i, r := range asked {
		has[r] = allowed[i]
	}
	return has, nil
}

// missingRights are the rights that are not granted, except those of components that are not installed. A component is
// installed if the account has a right that no other component adds.
func missingRights(has map[oneRight]bool) (missing []string) {
	adds := map[string]map[string]bool{} // the components that add a right
	for r := range has {
		if adds[r.text()] == nil {
			adds[r.text()] = map[string]bool{}
		}
		adds[r.text()][r.component] = true
	}
	installed := map[string]bool{"": true}
	for r, granted := range has {
		if granted && len(adds[r.text()]) == 1 {
			installed[r.component] = true
		}
	}
	for r, granted := range has {
		if !granted && installed[r.component] && !slices.Contains(missing, r.text()) {
			missing = append(missing, r.text())
		}
	}
	slices.Sort(missing)
	return missing
}
