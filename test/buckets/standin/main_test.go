// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"context"
	"encoding/json"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	cosi "sigs.k8s.io/container-object-storage-interface/proto"
)

type fields = map[string]any

// driver is a COSI driver whose buckets have objects.
type driver struct {
	cosi.ProvisionerClient
	revoked []string
}

func (*driver) DriverCreateBucket(
	_ context.Context, in *cosi.DriverCreateBucketRequest, _ ...grpc.CallOption,
) (*cosi.DriverCreateBucketResponse, error) {
	return &cosi.DriverCreateBucketResponse{BucketId: in.GetName()}, nil
}

func (*driver) DriverDeleteBucket(
	context.Context, *cosi.DriverDeleteBucketRequest, ...grpc.CallOption,
) (*cosi.DriverDeleteBucketResponse, error) {
	return nil, status.Error(codes.FailedPrecondition, "it has objects")
}

func (*driver) DriverGrantBucketAccess(
	_ context.Context, in *cosi.DriverGrantBucketAccessRequest, _ ...grpc.CallOption,
) (*cosi.DriverGrantBucketAccessResponse, error) {
	keys := &cosi.CredentialDetails{Secrets: map[string]string{"accessKeyID": in.GetName()}}
	return &cosi.DriverGrantBucketAccessResponse{
		AccountId: in.GetName(), Credentials: map[string]*cosi.CredentialDetails{"s3": keys},
	}, nil
}

func (d *driver) DriverRevokeBucketAccess(
	_ context.Context, in *cosi.DriverRevokeBucketAccessRequest, _ ...grpc.CallOption,
) (*cosi.DriverRevokeBucketAccessResponse, error) {
	d.revoked = append(d.revoked, in.GetAccountId())
	return &cosi.DriverRevokeBucketAccessResponse{}, nil
}

// apiServer is the API server of Kubernetes: objects by resource, namespace and name. One that is deleted stays until
// it has no finalizer.
type apiServer struct{ objects map[string]fields }

func (a *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	path := strings.TrimPrefix(strings.TrimPrefix(r.URL.Path, "/apis/objectstorage.k8s.io/v1alpha1/"), "/api/v1/")
	parts, namespace := strings.Split(path, "/"), ""
	if parts[0] == "namespaces" {
		namespace, parts = parts[1], parts[2:]
	}
	var sent fields
	_ = json.NewDecoder(r.Body).Decode(&sent) // the other requests have none
	resource, name := parts[0], ""
	if len(parts) > 1 {
		name = parts[1]
	} else if r.Method == http.MethodPost {
		name = (&unstructured.Unstructured{Object: sent}).GetName()
	}
	code, answer := a.answer(r.Method, resource, namespace, name, len(parts) > 2, sent)
	if code >= http.StatusBadRequest {
		reason := map[int]string{http.StatusNotFound: "NotFound", http.StatusConflict: "AlreadyExists"}[code]
		answer = fields{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code}
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(answer)
}

func (a *apiServer) answer(method, resource, namespace, name string, status bool, sent fields) (int, fields) {
	key := resource + "/" + namespace + "/" + name
	have, is := a.objects[key]
	switch {
	case name == "":
		items := []fields{}
		for _, key := range slices.Sorted(maps.Keys(a.objects)) {
			if strings.HasPrefix(key, resource+"/"+namespace) {
				items = append(items, a.objects[key])
			}
		}
		return http.StatusOK, fields{"kind": "List", "apiVersion": "v1", "items": items}
	case method == http.MethodPost && is:
		return http.StatusConflict, nil
	case method != http.MethodPost && !is:
		return http.StatusNotFound, nil
	case method == http.MethodPost, method == http.MethodPut && !status:
		if is {
			sent["status"] = have["status"]
		}
		have = sent
	case method == http.MethodPut:
		have["status"] = sent["status"]
	case method == http.MethodDelete:
		now := metav1.Now()
		(&unstructured.Unstructured{Object: have}).SetDeletionTimestamp(&now)
	}
	a.objects[key] = have
	if o := (&unstructured.Unstructured{Object: have}); o.GetDeletionTimestamp() != nil && len(o.GetFinalizers()) == 0 {
		delete(a.objects, key)
	}
	return http.StatusOK, have
}

// newStandIn makes one whose cluster has two classes and the claim shop/data.
func newStandIn(t *testing.T) (*standIn, *driver) {
	t.Helper()
	server := httptest.NewServer(&apiServer{map[string]fields{}})
	t.Cleanup(server.Close)
	api, err := dynamic.NewForConfig(&rest.Config{Host: server.URL, QPS: 1000, Burst: 1000})
	if err != nil {
		t.Fatal(err)
	}
	d := &driver{}
	s := &standIn{api: api, driver: d, name: "cosi.example"}
	s.put(t, "bucketclasses", "BucketClass", "", "main", fields{"driverName": "cosi.example", "deletionPolicy": "Delete"})
	s.put(t, "bucketaccessclasses", "BucketAccessClass", "", "main", fields{"authenticationType": "Key"})
	s.put(t, "bucketclaims", "BucketClaim", "shop", "data", fields{"spec": fields{"bucketClassName": "main"}})
	return s, d
}

func (s *standIn) put(t *testing.T, resource, kind, namespace, name string, of fields) {
	t.Helper()
	o := &unstructured.Unstructured{Object: of}
	o.SetAPIVersion("objectstorage.k8s.io/v1alpha1")
	o.SetKind(kind)
	o.SetNamespace(namespace)
	o.SetName(name)
	o.SetUID(types.UID("uid-" + name))
	if _, err := s.cosi(resource, namespace).Create(t.Context(), o, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// grants makes an access to shop/data whose keys are in the Secret keys.
func (s *standIn) grants(t *testing.T, name string) {
	t.Helper()
	s.put(t, "bucketaccesses", "BucketAccess", "shop", name, fields{"spec": fields{
		"bucketClaimName": "data", "bucketAccessClassName": "main", "credentialsSecretName": "keys",
	}})
}

// look returns an object, or nil.
func (s *standIn) look(t *testing.T, resource, namespace, name string) *object {
	t.Helper()
	o, err := s.get(t.Context(), resource, namespace, name)
	if ignoreNotFound(err) != nil {
		t.Fatal(err)
	}
	return o
}

// ends deletes an object, which stays while it has finalizers.
func (s *standIn) ends(t *testing.T, resource, namespace, name string) {
	t.Helper()
	if err := s.cosi(resource, namespace).Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
}

// released reports whether an object is gone.
func (s *standIn) released(t *testing.T, resource, namespace, name string) bool {
	t.Helper()
	return s.look(t, resource, namespace, name) == nil
}

// events are the kinds of the objects that have an event.
func (s *standIn) events(t *testing.T) (kinds []string) {
	t.Helper()
	list, err := s.api.Resource(schema.GroupVersionResource{Version: "v1", Resource: "events"}).
		List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for i := range list.Items {
		kinds = append(kinds, (&object{list.Items[i]}).text("involvedObject", "kind"))
	}
	return kinds
}

// The controller's old status stays over the sidecar's, however often both look again.
func TestAnOldStatusStays(t *testing.T) {
	for _, stale := range []int{0, 1} {
		s, _ := newStandIn(t)
		s.stale = stale
		for range 4 {
			if err := s.pass(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		claim := s.look(t, "bucketclaims", "shop", "data")
		bucket := s.look(t, "buckets", "", claim.text("status", "bucketName"))
		if claim.is("status", "bucketReady") != (stale == 0) || bucket == nil || !bucket.is("status", "bucketReady") {
			t.Errorf("stale %d: claim %v, bucket %v", stale, claim.Object["status"], bucket)
		}
	}
}

// staysWithoutSecret ends an access whose Secret is gone. It stays, and no event says so, until somebody makes such a
// Secret.
func (s *standIn) staysWithoutSecret(t *testing.T, name string) {
	t.Helper()
	s.ends(t, "bucketaccesses", "shop", name)
	if err := s.pass(t.Context()); err == nil || s.released(t, "bucketaccesses", "shop", name) || len(s.events(t)) > 0 {
		t.Fatalf("the access: %v, events of %v", err, s.events(t))
	}
	secret := &unstructured.Unstructured{Object: fields{
		"apiVersion": "v1", "kind": "Secret", "metadata": fields{"name": "keys", "namespace": "shop"},
	}}
	access := s.look(t, "bucketaccesses", "shop", name)
	if _, err := s.secrets(access).Create(t.Context(), secret, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := s.pass(t.Context()); err != nil || !s.released(t, "bucketaccesses", "shop", name) {
		t.Errorf("with a Secret the access stays: %v", err)
	}
}

// A Secret that is deleted before its access stays with its finalizer until the access ends. It then takes the end of
// the access along.
func TestASecretDeletedFirst(t *testing.T) {
	s, d := newStandIn(t)
	s.grants(t, "one")
	for range 2 {
		if err := s.pass(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	secrets := s.secrets(s.look(t, "bucketaccesses", "shop", "one"))
	if err := secrets.Delete(t.Context(), "keys", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if secret, err := secrets.Get(
		t.Context(),
		"keys",
		metav1.GetOptions{},
	); err != nil ||
		secret.GetDeletionTimestamp() == nil {
		t.Fatalf("the Secret: %v, %v", secret, err)
	}
	s.staysWithoutSecret(t, "one")
	if len(d.revoked) == 0 {
		t.Error("its keys are not revoked")
	}
}

// The first of two accesses with one Secret takes it along. The second one then stays.
func TestTwoAccessesWithOneSecret(t *testing.T) {
	s, d := newStandIn(t)
	s.grants(t, "one")
	s.grants(t, "two")
	for range 2 {
		if err := s.pass(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"one", "two"} {
		if !s.look(t, "bucketaccesses", "shop", name).is("status", "accessGranted") {
			t.Fatalf("access %s is not granted", name)
		}
	}
	s.ends(t, "bucketaccesses", "shop", "one")
	if err := s.pass(t.Context()); err != nil || !s.released(t, "bucketaccesses", "shop", "one") {
		t.Fatalf("the first access stays: %v", err)
	}
	s.staysWithoutSecret(t, "two")
	if len(d.revoked) < 2 {
		t.Errorf("revoked: %v", d.revoked)
	}
}

// A claim of a bucket that has objects takes all accesses along, and stays. Its owner's object has no event: the Bucket
// has it.
func TestAClaimRevokesAllKeysFirst(t *testing.T) {
	s, _ := newStandIn(t)
	s.grants(t, "one")
	for range 2 {
		if err := s.pass(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	name := s.look(t, "bucketclaims", "shop", "data").text("status", "bucketName")
	s.ends(t, "buckets", "", name)
	if err := s.pass(t.Context()); err == nil {
		t.Fatal("a bucket with objects was deleted")
	}
	if access := s.look(t, "bucketaccesses", "shop", "one"); access != nil && !access.deleted() {
		t.Errorf("the access stays: %v", access.Object)
	}
	if got := s.events(t); len(got) != 1 || got[0] != "Bucket" {
		t.Errorf("events of %v", got)
	}
}
