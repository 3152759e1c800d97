// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package kubernetes

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

const (
	cosi       = "/apis/objectstorage.k8s.io/v1alpha1/"
	cosiDriver = "cosi.oxide.computer"
)

// cosiObject has the fields of a BucketClaim, a Bucket and a BucketAccess that are read.
type cosiObject struct {
	object
	Spec   struct{ DriverName, BucketClaimName, CredentialsSecretName string }
	Status struct {
		BucketName  string
		BucketReady bool
	}
}

// buckets looks for claims and accesses of buckets that COSI v0.2.2 leaves as they are for good. It says nothing of a
// cluster without COSI, nor to those who may not read its objects.
func (e *examination) buckets(ctx context.Context) {
	const looked = "claims of buckets"
	lists := map[string][]cosiObject{}
	for _, resource := range []string{"buckets", "bucketclaims", "bucketaccesses"} {
		var err error
		lists[resource], err = listAll[cosiObject](
			ctx, e.client, cosi+resource, resource, http.StatusNotFound, http.StatusForbidden)
		if err != nil {
			e.unreadable(looked, err)
			return
		}
	}
	ready, exists := map[string]bool{}, map[string]bool{}
	for _, b := range lists["buckets"] {
		ready[b.Name] = b.Spec.DriverName == cosiDriver && b.Status.BucketReady
	}
	stuck, said := 0, sync.OnceValue(func() map[string]string { return e.said(ctx) })
	warn := func(found, next string) {
		if found != "" {
			stuck++
			e.add(orchestrator.StatusWarning, looked, found, next)
		}
	}
	for _, c := range lists["bucketclaims"] {
		exists[c.key()] = true
		warn(c.stuckClaim(ready, said))
	}
	for _, a := range lists["bucketaccesses"] {
		warn(a.stuckAccess(exists))
	}
	if claims := len(lists["bucketclaims"]); claims > 0 && stuck == 0 {
		e.add(orchestrator.StatusOK, looked, fmt.Sprintf("%d, none of them stuck", claims), "")
	}
}

// stuckClaim says why a BucketClaim does not come to its end, and the next step. It says nothing if it does. ready are
// the plugin's Buckets that are ready, said the warnings about each Bucket.
func (c cosiObject) stuckClaim(ready map[string]bool, said func() map[string]string) (found, next string) {
	deleted := c.DeletionTimestamp != nil
	switch {
	case !deleted && ready[c.Status.BucketName] && !c.Status.BucketReady:
		return "BucketClaim " + c.key() + " is not ready, and its Bucket is: COSI has overwritten the status", fmt.Sprintf(
			`kubectl patch bucketclaim -n %s %s --subresource=status --type=merge -p '{"status":{"bucketReady":true}}'`,
			c.Namespace, c.Name)
	case deleted && time.Since(c.DeletionTimestamp.Time) > stuckAfter:
		return "BucketClaim " + c.key() + " is being deleted for a long time" + said()[c.Status.BucketName], fmt.Sprintf(
			`if its objects may go, too: kubectl patch bucket %s --type=merge -p '{"spec":{"parameters":{"deleteContents":"true"}}}'`,
			c.Status.BucketName,
		)
	case !deleted && !c.Status.BucketReady && time.Since(c.CreationTimestamp.Time) > stuckAfter:
		return "BucketClaim " + c.key() + " is not ready" + said()[c.Status.BucketName],
			"correct the BucketClass or the store, and make the claim again: docs/explanation/buckets.md"
	}
	return "", ""
}

// stuckAccess says why a BucketAccess is not deleted, and the next step, if it should be long gone. exists are the
// claims that exist.
func (a cosiObject) stuckAccess(exists map[string]bool) (found, next string) {
	if a.DeletionTimestamp == nil || time.Since(a.DeletionTimestamp.Time) < stuckAfter {
		return "", ""
	}
	found = "BucketAccess " + a.key() + " is being deleted for a long time"
	if !exists[a.Namespace+"/"+a.Spec.BucketClaimName] {
		return found + ", and its claim is gone", fmt.Sprintf(
			`kubectl patch bucketaccess -n %s %s --type=merge -p '{"metadata":{"finalizers":null}}'`, a.Namespace, a.Name)
	}
	return found, fmt.Sprintf(
		"kubectl describe bucketaccess -n %s %s; if its Secret is gone: kubectl create secret generic -n %s %s",
		a.Namespace, a.Name, a.Namespace, a.Spec.CredentialsSecretName)
}

// said returns what the last warning about each Bucket says. COSI says it there, and not to the owner of the claim.
func (e *examination) said(ctx context.Context) map[string]string {
	all, err := e.events(ctx, "Bucket")
	if err != nil {
		return nil // the messages are a help only
	}
	slices.SortFunc(all, func(a, b event) int { return a.LastTimestamp.Compare(b.LastTimestamp) })
	said := map[string]string{}
	for _, found := range all {
		if found.Type == "Warning" {
			said[found.InvolvedObject.Name] = ": " + strings.Join(strings.Fields(found.Message), " ")
		}
	}
	return said
}
