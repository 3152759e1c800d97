// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Command standin plays COSI's controller and sidecar in a test: the released ones cannot be built through the module
// proxy. It turns a BucketClaim into a Bucket, asks the driver for the bucket, and turns a BucketAccess into a Secret.
// It is written from the documentation of the objects and the source of COSI v0.2.2, whose names, order and mistakes it
// keeps:
//
//   - The controller writes the status that it has computed over what the sidecar has written meanwhile. With -stale=N
//     it does so for each Nth claim: the claim never becomes ready, although its Bucket is.
//   - An access whose Secret or claim is gone is never released, and no event says so. So of two accesses with one
//     Secret the second one hangs.
//   - A claim's deletion deletes all its accesses first, also if its bucket then stays because it has objects.
//   - What the driver says is an event of the Bucket or the access, and not of the claim.
//
// As with the real sidecar, only the holder of a lease works: see elect.go.
package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	cosi "sigs.k8s.io/container-object-storage-interface/proto"
)

// Finalizers of COSI. Source: container-object-storage-interface v0.2.2, client/apis/objectstorage/consts/consts.go.
const (
	claimFinalizer  = "cosi.objectstorage.k8s.io/bucketclaim-protection"
	bucketFinalizer = "cosi.objectstorage.k8s.io/bucket-protection"
	accessFinalizer = "cosi.objectstorage.k8s.io/bucketaccess-protection"
	// usedFinalizer is that of a Bucket with accesses.
	usedFinalizer   = "cosi.objectstorage.k8s.io/bucketaccess-bucket-protection"
	secretFinalizer = "cosi.objectstorage.k8s.io/secret-protection"
)

const (
	interval = 500 * time.Millisecond
	// callTimeout bounds one pass over all objects.
	callTimeout = time.Minute
)

func main() {
	address := flag.String("driver-addr", "", "the driver's socket")
	_ = flag.Int("v", 0, "not used: a flag of the real sidecar")
	stale := flag.Int("stale", 0, "write an old status over that of each claim with this number; 0 means never")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *address, *stale); err != nil {
		fmt.Fprintf(os.Stderr, "standin: %v\n", err)
		os.Exit(1)
	}
}

// run works until the context ends, or returns why it cannot begin.
func run(ctx context.Context, address string, stale int) error {
	config, err := rest.InClusterConfig()
	if err != nil {
		return err
	}
	api, err := dynamic.NewForConfig(config)
	if err != nil {
		return err
	}
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	s := &standIn{api: api, driver: cosi.NewProvisionerClient(conn), stale: stale}
	info, err := cosi.NewIdentityClient(conn).DriverGetInfo(ctx, &cosi.DriverGetInfoRequest{}, grpc.WaitForReady(true))
	if err != nil {
		return err
	}
	s.name = info.GetName()
	identity, err := os.Hostname() // that of the pod
	if err != nil {
		return err
	}
	namespace := cmp.Or(os.Getenv("POD_NAMESPACE"), metav1.NamespaceDefault)
	e := &election{
		leases: api.Resource(schema.GroupVersionResource{Group: "coordination.k8s.io", Version: "v1", Resource: "leases"}).
			Namespace(namespace),
		name: strings.NewReplacer(".", "-", "/", "-").Replace(s.name + "/cosi"), identity: identity,
	}
	return e.elect(ctx, s.lead)
}

// lead looks at all objects again and again until the context ends.
func (s *standIn) lead(ctx context.Context) {
	slog.Info("serving", "driver", s.name)
	for ctx.Err() == nil {
		if err := s.pass(ctx); err != nil {
			slog.Error(err.Error()) // the next pass repeats it
		}
		time.Sleep(interval)
	}
}

// standIn plays controller and sidecar for one driver.
type standIn struct {
	api    dynamic.Interface
	driver cosi.ProvisionerClient
	name   string
	// stale is the flag, claims counts the claims, and late are the writes that come after the sidecar's.
	stale, claims int
	late          []func(context.Context) error
}

// pass looks at all objects once.
func (s *standIn) pass(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	var errs []error
	for _, kind := range []struct {
		resource string
		handle   func(context.Context, *object) error
	}{{"bucketclaims", s.claim}, {"buckets", s.bucket}, {"bucketaccesses", s.access}} {
		list, err := s.cosi(kind.resource, "").List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for i := range list.Items {
			if err := kind.handle(ctx, &object{list.Items[i]}); err != nil {
				errs = append(errs, fmt.Errorf("%s %s: %w", kind.resource, list.Items[i].GetName(), err))
			}
		}
	}
	for _, write := range s.late {
		errs = append(errs, write(ctx))
	}
	s.late = nil
	return errors.Join(errs...)
}

// claim makes the Bucket of a claim, or deletes it.
func (s *standIn) claim(ctx context.Context, claim *object) error {
	buckets := s.cosi("buckets", "")
	name := claim.text("status", "bucketName")
	if claim.deleted() {
		if name == "" || !slices.Contains(claim.GetFinalizers(), claimFinalizer) {
			return nil
		}
		return ignoreNotFound(buckets.Delete(ctx, name, metav1.DeleteOptions{}))
	}
	if claim.is("status", "bucketReady") {
		return nil
	}
	if name = claim.text("spec", "existingBucketName"); name != "" {
		return s.claimExisting(ctx, claim, name)
	}
	className := claim.text("spec", "bucketClassName")
	class, err := s.get(ctx, "bucketclasses", "", className)
	if err != nil {
		return s.failed(ctx, claim, "FailedCreateBucket", err)
	}
	if class.text("driverName") != s.name {
		return nil
	}
	name = "bucket-" + string(claim.GetUID())
	protocols, _, _ := unstructured.NestedSlice(claim.Object, "spec", "protocols")
	bucket := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "objectstorage.k8s.io/v1alpha1", "kind": "Bucket",
		"metadata": map[string]any{"name": name},
		"spec": map[string]any{
			"driverName": s.name, "bucketClassName": className, "deletionPolicy": class.text("deletionPolicy"),
			"parameters": class.Object["parameters"], "protocols": protocols,
			"bucketClaim": map[string]any{
				"namespace": claim.GetNamespace(), "name": claim.GetName(), "uid": string(claim.GetUID()),
			},
		},
	}}
	if _, err := buckets.Create(ctx, bucket, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
		return err
	}
	write := func(ctx context.Context) error {
		latest, err := s.get(ctx, "bucketclaims", claim.GetNamespace(), claim.GetName())
		if err != nil {
			return err
		}
		state := map[string]any{"bucketName": name, "bucketReady": false}
		return s.finish(ctx, "bucketclaims", latest, claimFinalizer, state)
	}
	if s.claims++; s.stale > 0 && s.claims%s.stale == 0 {
		s.late = append(s.late, write)
		return nil
	}
	return write(ctx)
}

// claimExisting binds a claim to a Bucket that an administrator made.
func (s *standIn) claimExisting(ctx context.Context, claim *object, name string) error {
	bucket, err := s.get(ctx, "buckets", "", name)
	if err != nil || bucket.text("spec", "driverName") != s.name {
		return err
	}
	reference := map[string]any{"namespace": claim.GetNamespace(), "name": claim.GetName(), "uid": string(claim.GetUID())}
	if err := unstructured.SetNestedMap(bucket.Object, reference, "spec", "bucketClaim"); err != nil {
		return err
	}
	if _, err := s.cosi("buckets", "").Update(ctx, &bucket.Unstructured, metav1.UpdateOptions{}); err != nil {
		return err
	}
	return s.finish(ctx, "bucketclaims", claim, claimFinalizer, map[string]any{"bucketName": name, "bucketReady": true})
}

// bucket asks the driver for the bucket of a Bucket, or for its deletion.
func (s *standIn) bucket(ctx context.Context, bucket *object) error {
	if bucket.text("spec", "driverName") != s.name {
		return nil
	}
	namespace, claimName := bucket.text("spec", "bucketClaim", "namespace"), bucket.text("spec", "bucketClaim", "name")
	if bucket.deleted() {
		if err := s.deleteAccesses(ctx, bucket, namespace, claimName); err != nil {
			return err
		}
		if bucket.text("spec", "deletionPolicy") == "Delete" {
			if _, err := s.driver.DriverDeleteBucket(ctx, &cosi.DriverDeleteBucketRequest{
				BucketId: bucket.text("status", "bucketID"), DeleteContext: bucket.texts("spec", "parameters"),
			}); err != nil && status.Code(err) != codes.NotFound {
				return s.failed(ctx, bucket, "FailedDeleteBucket", err)
			}
		}
		if claim, err := s.get(ctx, "bucketclaims", namespace, claimName); err == nil {
			if err := s.release(ctx, "bucketclaims", claim, claimFinalizer); err != nil {
				return err
			}
		}
		return s.release(ctx, "buckets", bucket, bucketFinalizer)
	}
	if bucket.is("status", "bucketReady") {
		return nil
	}
	if id := bucket.text("spec", "existingBucketID"); id != "" {
		return s.finish(ctx, "buckets", bucket, bucketFinalizer, map[string]any{"bucketReady": true, "bucketID": id})
	}
	made, err := s.driver.DriverCreateBucket(ctx, &cosi.DriverCreateBucketRequest{
		Name: bucket.GetName(), Parameters: bucket.texts("spec", "parameters"),
	})
	if status.Code(err) == codes.AlreadyExists {
		return err // without an event
	}
	if err != nil {
		return s.failed(ctx, bucket, "FailedCreateBucket", err)
	}
	claim, err := s.get(ctx, "bucketclaims", namespace, claimName)
	if err != nil {
		return s.failed(ctx, bucket, "FailedCreateBucket", err)
	}
	// The sidecar sets the one field, and leaves the controller's as it has read it.
	state := map[string]any{"bucketName": claim.text("status", "bucketName"), "bucketReady": true}
	if err := s.finish(ctx, "bucketclaims", claim, "", state); err != nil {
		return s.failed(ctx, bucket, "FailedCreateBucket", err)
	}
	state = map[string]any{"bucketReady": true, "bucketID": made.GetBucketId()}
	return s.finish(ctx, "buckets", bucket, bucketFinalizer, state)
}

// deleteAccesses deletes all accesses of a claim whose Bucket is deleted, before the bucket is.
func (s *standIn) deleteAccesses(ctx context.Context, bucket *object, namespace, claimName string) error {
	if !slices.Contains(bucket.GetFinalizers(), usedFinalizer) {
		return nil
	}
	accesses := s.cosi("bucketaccesses", namespace)
	list, err := accesses.List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for i := range list.Items {
		access := &object{list.Items[i]}
		if access.text("spec", "bucketClaimName") != claimName {
			continue
		}
		if err := accesses.Delete(ctx, access.GetName(), metav1.DeleteOptions{}); err != nil {
			return err
		}
	}
	bucket.SetFinalizers(slices.DeleteFunc(bucket.GetFinalizers(), func(f string) bool { return f == usedFinalizer }))
	return nil
}

// failed makes an event about an object, unless it has one with this reason, and returns the error.
func (s *standIn) failed(ctx context.Context, of *object, reason string, err error) error {
	namespace, now := cmp.Or(of.GetNamespace(), metav1.NamespaceDefault), time.Now().UTC().Format(time.RFC3339)
	name := strings.ToLower(of.GetName() + "." + reason)
	event := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "v1", "kind": "Event", "type": "Warning", "reason": reason, "message": err.Error(),
		"metadata": map[string]any{"name": name, "namespace": namespace},
		"involvedObject": map[string]any{
			"kind": of.GetKind(), "namespace": of.GetNamespace(), "name": of.GetName(), "uid": string(of.GetUID()),
		},
		"firstTimestamp": now, "lastTimestamp": now, "count": int64(1),
	}}
	client := s.api.Resource(schema.GroupVersionResource{Version: "v1", Resource: "events"}).Namespace(namespace)
	if _, recorded := client.Create(ctx, event, metav1.CreateOptions{}); !apierrors.IsAlreadyExists(recorded) {
		err = errors.Join(err, recorded)
	}
	return err
}

// access asks the driver for keys and writes them to the Secret of a BucketAccess, or revokes them.
func (s *standIn) access(ctx context.Context, access *object) error {
	claim, err := s.get(ctx, "bucketclaims", access.GetNamespace(), access.text("spec", "bucketClaimName"))
	if err != nil {
		return err
	}
	if !access.deleted() && !claim.is("status", "bucketReady") {
		return s.failed(ctx, access, "WaitingForBucket", errors.New("invalid bucket state"))
	}
	bucket, err := s.get(ctx, "buckets", "", claim.text("status", "bucketName"))
	if err != nil || bucket.text("spec", "driverName") != s.name {
		return err
	}
	bucketID := bucket.text("status", "bucketID")
	if access.deleted() {
		if _, err := s.driver.DriverRevokeBucketAccess(ctx, &cosi.DriverRevokeBucketAccessRequest{
			BucketId: bucketID, AccountId: access.text("status", "accountID"),
		}); err != nil {
			return s.failed(ctx, access, "FailedRevokeAccess", err)
		}
		if err := s.deleteSecret(ctx, access); err != nil {
			return err
		}
		return s.release(ctx, "bucketaccesses", access, accessFinalizer)
	}
	if access.is("status", "accessGranted") || bucketID == "" {
		return nil
	}
	class, err := s.get(ctx, "bucketaccessclasses", "", access.text("spec", "bucketAccessClassName"))
	if err != nil {
		return err
	}
	kind := cosi.AuthenticationType_UnknownAuthenticationType
	if class.text("authenticationType") == "Key" {
		kind = cosi.AuthenticationType_Key
	}
	granted, err := s.driver.DriverGrantBucketAccess(ctx, &cosi.DriverGrantBucketAccessRequest{
		BucketId:           bucketID,
		Name:               "ba-" + string(access.GetUID()),
		AuthenticationType: kind,
		Parameters:         class.texts("parameters"),
	})
	if err != nil {
		return s.failed(ctx, access, "FailedGrantAccess", err)
	}
	if err := s.createSecret(ctx, access, bucket, granted.GetCredentials()["s3"].GetSecrets()); err != nil {
		return err
	}
	if !slices.Contains(bucket.GetFinalizers(), usedFinalizer) {
		bucket.SetFinalizers(append(bucket.GetFinalizers(), usedFinalizer))
		if _, err := s.cosi("buckets", "").Update(ctx, &bucket.Unstructured, metav1.UpdateOptions{}); err != nil {
			return err
		}
	}
	return s.finish(ctx, "bucketaccesses", access, accessFinalizer,
		map[string]any{"accountID": granted.GetAccountId(), "accessGranted": true})
}

// createSecret writes what the workload needs.
func (s *standIn) createSecret(ctx context.Context, access, bucket *object, keys map[string]string) error {
	info, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"name": "bc-" + string(access.GetUID())},
		"spec": map[string]any{
			"bucketName": bucket.GetName(), "authenticationType": "Key", "protocols": []string{access.text("spec", "protocol")},
			"secretS3": map[string]string{
				"endpoint": keys["endpoint"], "region": keys["region"],
				"accessKeyID": keys["accessKeyID"], "accessSecretKey": keys["accessSecretKey"],
			},
		},
	})
	if err != nil {
		return err
	}
	secret := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "v1",
		"kind":       "Secret",
		"metadata": map[string]any{
			"name":       access.text("spec", "credentialsSecretName"),
			"finalizers": []any{secretFinalizer},
		},
		"stringData": map[string]any{"BucketInfo": string(info)},
	}}
	if _, err := s.secrets(access).
		Create(ctx, secret, metav1.CreateOptions{}); err != nil &&
		!apierrors.IsAlreadyExists(err) {
		return err
	}
	return nil
}

// deleteSecret deletes the Secret of an access. If there is none, it fails, and so the access stays. One that somebody
// has deleted before is gone without its finalizer.
func (s *standIn) deleteSecret(ctx context.Context, access *object) error {
	name := access.text("spec", "credentialsSecretName")
	secret, err := s.secrets(access).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	secret.SetFinalizers(nil)
	if _, err := s.secrets(access).Update(ctx, secret, metav1.UpdateOptions{}); err != nil {
		return err
	}
	return s.secrets(access).Delete(ctx, name, metav1.DeleteOptions{})
}

// finish adds a finalizer to an object, unless it is empty, and sets its status.
func (s *standIn) finish(
	ctx context.Context,
	resource string,
	o *object,
	finalizer string,
	state map[string]any,
) error {
	client, current := s.cosi(resource, o.GetNamespace()), &o.Unstructured
	if finalizer != "" && !slices.Contains(o.GetFinalizers(), finalizer) {
		o.SetFinalizers(append(o.GetFinalizers(), finalizer))
		updated, err := client.Update(ctx, current, metav1.UpdateOptions{})
		if err != nil {
			return err
		}
		current = updated
	}
	current.Object["status"] = state
	_, err := client.UpdateStatus(ctx, current, metav1.UpdateOptions{})
	return err
}

// release removes a finalizer.
func (s *standIn) release(ctx context.Context, resource string, o *object, finalizer string) error {
	o.SetFinalizers(slices.DeleteFunc(o.GetFinalizers(), func(f string) bool { return f == finalizer }))
	_, err := s.cosi(resource, o.GetNamespace()).Update(ctx, &o.Unstructured, metav1.UpdateOptions{})
	return ignoreNotFound(err)
}

func (s *standIn) get(ctx context.Context, resource, namespace, name string) (*object, error) {
	found, err := s.cosi(resource, namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	return &object{*found}, nil
}

func (s *standIn) cosi(resource, namespace string) dynamic.ResourceInterface {
	client := s.api.Resource(
		schema.GroupVersionResource{Group: "objectstorage.k8s.io", Version: "v1alpha1", Resource: resource},
	)
	if namespace == "" {
		return client
	}
	return client.Namespace(namespace)
}

func (s *standIn) secrets(access *object) dynamic.ResourceInterface {
	return s.api.Resource(schema.GroupVersionResource{Version: "v1", Resource: "secrets"}).Namespace(access.GetNamespace())
}

func ignoreNotFound(err error) error {
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// object is an object of the API server.
type object struct{ unstructured.Unstructured }

func (o *object) deleted() bool { return o.GetDeletionTimestamp() != nil }

func (o *object) text(path ...string) string {
	text, _, _ := unstructured.NestedString(o.Object, path...)
	return text
}

func (o *object) texts(path ...string) map[string]string {
	texts, _, _ := unstructured.NestedStringMap(o.Object, path...)
	return texts
}

func (o *object) is(path ...string) bool {
	value, _, _ := unstructured.NestedBool(o.Object, path...)
	return value
}
