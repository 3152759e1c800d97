// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Command standin plays COSI's controller and sidecar in a test: the released ones cannot be built through the module
// proxy. It turns a BucketClaim into a Bucket, asks the driver for the bucket, and turns a BucketAccess into a Secret.
// It is written from the documentation of the objects and the source of COSI v0.2.2, whose names and order it keeps.
// It reports no events and knows no leader election.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
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
	flag.Parse()
	fmt.Fprintf(os.Stderr, "standin: %v\n", run(context.Background(), *address))
	os.Exit(1)
}

// run returns only if it cannot begin.
func run(ctx context.Context, address string) error {
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
	s := &standIn{api: api, driver: cosi.NewProvisionerClient(conn)}
	info, err := cosi.NewIdentityClient(conn).DriverGetInfo(ctx, &cosi.DriverGetInfoRequest{}, grpc.WaitForReady(true))
	if err != nil {
		return err
	}
	s.name = info.GetName()
	slog.Info("serving", "driver", s.name)
	for {
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
	return errors.Join(errs...)
}

// claim makes the Bucket of a claim, or deletes it.
func (s *standIn) claim(ctx context.Context, claim *object) error {
	buckets := s.cosi("buckets", "")
	name := claim.text("status", "bucketName")
	if claim.deleted() {
		return ignoreNotFound(buckets.Delete(ctx, name, metav1.DeleteOptions{}))
	}
	if name != "" {
		return nil
	}
	if name = claim.text("spec", "existingBucketName"); name != "" {
		return s.claimExisting(ctx, claim, name)
	}
	className := claim.text("spec", "bucketClassName")
	class, err := s.get(ctx, "bucketclasses", "", className)
	if err != nil || class.text("driverName") != s.name {
		return err
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
	return s.finish(ctx, "bucketclaims", claim, claimFinalizer, map[string]any{"bucketName": name, "bucketReady": false})
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
		if bucket.text("spec", "deletionPolicy") == "Delete" {
			if _, err := s.driver.DriverDeleteBucket(ctx, &cosi.DriverDeleteBucketRequest{
				BucketId: bucket.text("status", "bucketID"), DeleteContext: bucket.texts("spec", "parameters"),
			}); err != nil {
				return err
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
	if err != nil {
		return err
	}
	claim, err := s.get(ctx, "bucketclaims", namespace, claimName)
	if err != nil {
		return err
	}
	status := map[string]any{"bucketName": bucket.GetName(), "bucketReady": true}
	if err := s.finish(ctx, "bucketclaims", claim, claimFinalizer, status); err != nil {
		return err
	}
	status = map[string]any{"bucketReady": true, "bucketID": made.GetBucketId()}
	return s.finish(ctx, "buckets", bucket, bucketFinalizer, status)
}

// access asks the driver for keys and writes them to the Secret of a BucketAccess, or revokes them.
func (s *standIn) access(ctx context.Context, access *object) error {
	claim, err := s.get(ctx, "bucketclaims", access.GetNamespace(), access.text("spec", "bucketClaimName"))
	if err != nil || !claim.is("status", "bucketReady") {
		return err
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
			return err
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
		return err
	}
	if err := s.createSecret(ctx, access, bucket, granted.GetCredentials()["s3"].GetSecrets()); err != nil {
		return err
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

func (s *standIn) deleteSecret(ctx context.Context, access *object) error {
	name := access.text("spec", "credentialsSecretName")
	secret, err := s.secrets(access).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return ignoreNotFound(err)
	}
	secret.SetFinalizers(nil)
	if _, err := s.secrets(access).Update(ctx, secret, metav1.UpdateOptions{}); err != nil {
		return err
	}
	return ignoreNotFound(s.secrets(access).Delete(ctx, name, metav1.DeleteOptions{}))
}

// finish adds a finalizer to an object and sets its status.
func (s *standIn) finish(
	ctx context.Context,
	resource string,
	o *object,
	finalizer string,
	status map[string]any,
) error {
	client, current := s.cosi(resource, o.GetNamespace()), &o.Unstructured
	if !slices.Contains(o.GetFinalizers(), finalizer) {
		o.SetFinalizers(append(o.GetFinalizers(), finalizer))
		updated, err := client.Update(ctx, current, metav1.UpdateOptions{})
		if err != nil {
			return err
		}
		current = updated
	}
	current.Object["status"] = status
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
