// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main_test

import (
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
	"google.golang.org/grpc/codes"
	cosi "sigs.k8s.io/container-object-storage-interface/proto"

	"github.com/oxidecomputer/oxide-csi-plugin/core/buckets"
	"github.com/oxidecomputer/oxide-csi-plugin/test/buckets/buckettest"
)

// TestBucketLife takes a bucket and its accesses from the first call to the last, and repeats each call.
func TestBucketLife(t *testing.T) {
	r := newRig(t, false)
	ctx := t.Context()
	info, err := r.DriverGetInfo(ctx, &cosi.DriverGetInfoRequest{})
	must(t, err)
	if info.GetName() != "cosi.oxide.computer" {
		t.Errorf("the driver's name is %q", info.GetName())
	}

	const bucket, other = "class-1", "class-2"
	answer, err := r.DriverCreateBucket(ctx, &cosi.DriverCreateBucketRequest{Name: bucket})
	must(t, err)
	if answer.GetBucketId() != "main/class-1" || answer.GetBucketInfo().GetS3().GetRegion() != buckettest.Region ||
		answer.GetBucketInfo().GetS3().GetSignatureVersion() != cosi.S3SignatureVersion_S3V4 {
		t.Errorf("the bucket is %v", answer)
	}
	id := answer.GetBucketId()
	if again := r.mustCreate(t, bucket, map[string]string{"store": store}); again != id {
		t.Errorf("the repeated call made %q, want %q", again, id)
	}
	_, err = r.create(t, bucket, map[string]string{"deleteContents": "true"})
	wantCode(t, err, codes.AlreadyExists, "delete-contents")
	otherID := r.mustCreate(t, other, nil)

	writer := r.mustGrant(t, id, "writer", buckets.ReadWrite)
	reader := r.mustGrant(t, id, "reader", buckets.ReadOnly)
	if again := r.mustGrant(
		t,
		id,
		"writer",
		buckets.ReadWrite,
	); again.accessKey != writer.accessKey ||
		again.secretKey != writer.secretKey {
		t.Error("the repeated grant returned other keys")
	}
	_, err = r.grant(t, id, "writer", buckets.ReadOnly)
	wantCode(t, err, codes.AlreadyExists, "revoke it first")

	must(t, put(ctx, writer.client, bucket, "folder/object", "text"))
	for name, g := range map[string]grant{"writer": writer, "reader": reader} {
		if text, err := get(ctx, g.client, bucket, "folder/object"); err != nil || text != "text" {
			t.Errorf("%s read %q, %v", name, text, err)
		}
	}
	wantLimits(t, bucket, other, writer, reader)

	wantCode(t, r.remove(t, id), codes.FailedPrecondition, "not empty", "deleteContents")
	must(t, r.revoke(t, id, writer.account))
	_, err = get(ctx, writer.client, bucket, "folder/object")
	wantRefused(t, "revoked keys", err)
	if text, err := get(ctx, reader.client, bucket, "folder/object"); err != nil || text != "text" {
		t.Errorf("the other access read %q, %v after the revocation", text, err)
	}
	must(t, r.revoke(t, id, writer.account))
	must(t, r.revoke(t, id, reader.account))
	if users := r.users(t); strings.Contains(users, writer.account) || strings.Contains(users, reader.account) {
		t.Errorf("users are left: %s", users)
	}
	_, err = r.root.GetBucketPolicy(ctx, &s3.GetBucketPolicyInput{Bucket: aws.String(bucket)})
	if err == nil {
		t.Error("a policy is left")
	}

	_, err = r.root.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: aws.String(bucket), Key: aws.String("folder/object")})
	must(t, err)
	must(t, r.remove(t, id))
	must(t, r.remove(t, id))
	must(t, r.remove(t, otherID))
	if names := r.bucketNames(t); len(names) > 0 {
		t.Errorf("buckets are left: %v", names)
	}
}

// wantLimits checks that no access is wider than granted.
func wantLimits(t *testing.T, bucket, other string, writer, reader grant) {
	t.Helper()
	ctx := t.Context()
	wantRefused(t, "write with read-only keys", put(ctx, reader.client, bucket, "x", ""))
	_, err := reader.client.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: &bucket, Key: aws.String("folder/object")})
	wantRefused(t, "delete with read-only keys", err)
	for _, g := range []grant{writer, reader} {
		wantRefused(t, "write to another bucket", put(ctx, g.client, other, "x", ""))
		_, err = g.client.ListObjectsV2(ctx, &s3.ListObjectsV2Input{Bucket: &other})
		wantRefused(t, "list another bucket", err)
		_, err = g.client.CreateBucket(ctx, &s3.CreateBucketInput{Bucket: aws.String("own-bucket")})
		wantRefused(t, "create a bucket", err)
		_, err = g.client.DeleteBucket(ctx, &s3.DeleteBucketInput{Bucket: &bucket})
		wantRefused(t, "delete the bucket", err)
		_, err = g.client.PutBucketTagging(
			ctx,
			&s3.PutBucketTaggingInput{Bucket: &bucket, Tagging: &types.Tagging{TagSet: []types.Tag{}}},
		)
		wantRefused(t, "change the tags", err)
		_, err = g.client.PutBucketPolicy(ctx, &s3.PutBucketPolicyInput{Bucket: &bucket, Policy: aws.String(
			`{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Principal":"*","Action":"s3:*","Resource":"arn:aws:s3:::` + bucket + `/*"}]}`,
		)})
		wantRefused(t, "change the policy", err)
	}
}

// TestRejectedRequests checks the requests that no store is asked about.
func TestRejectedRequests(t *testing.T) {
	r := newRig(t, false)
	id := r.mustCreate(t, "class-1", nil)
	create := func(name string, parameters map[string]string) func() error {
		return func() error { _, err := r.create(t, name, parameters); return err }
	}
	grantWith := func(change func(*cosi.DriverGrantBucketAccessRequest)) func() error {
		return func() error {
			req := &cosi.DriverGrantBucketAccessRequest{
				BucketId:           id,
				Name:               "access",
				AuthenticationType: cosi.AuthenticationType_Key,
			}
			change(req)
			_, err := r.DriverGrantBucketAccess(t.Context(), req)
			return err
		}
	}
	for _, test := range []struct {
		name    string
		call    func() error
		code    codes.Code
		mention string
	}{
		{"create without a name", create("", nil), codes.InvalidArgument, "name is missing"},
		{"create with a long name", create(strings.Repeat("a", 64), nil), codes.InvalidArgument, "27 characters"},
		{"create with capitals", create("Class-1", nil), codes.InvalidArgument, "lower-case"},
		{"create with an address as name", create("10.0.0.1", nil), codes.InvalidArgument, "S3 bucket name"},
		{"create with a path as name", create("../users", nil), codes.InvalidArgument, "S3 bucket name"},
		{"create with an unknown parameter", create("b-1", map[string]string{"quota": "1Gi"}), codes.InvalidArgument, `"quota"`},
		{"create with an unknown store", create("b-1", map[string]string{"store": "x"}), codes.InvalidArgument, `"x"`},
		{"create with a bad value", create("b-1", map[string]string{"versioning": "on"}), codes.InvalidArgument, `"on"`},
		{"create with a large parameter", create("b-1", map[string]string{"store": strings.Repeat("x", 5000)}), codes.InvalidArgument, "parameters"},
		{"create with versions, which the store has not", create("b-1", map[string]string{"versioning": "true"}), codes.FailedPrecondition, "--versioning-dir"},
		{"create with locks, which the store has not", create("b-1", map[string]string{"objectLock": "true"}), codes.FailedPrecondition, "--versioning-dir"},
		{"delete without an ID", func() error { return r.remove(t, "") }, codes.InvalidArgument, "bucket_id is missing"},
		{"delete without a store", func() error { return r.remove(t, "class-1") }, codes.InvalidArgument, "STORE/BUCKET"},
		{"delete of a path", func() error { return r.remove(t, "main/../users") }, codes.InvalidArgument, "S3 bucket name"},
		{"grant without a name", grantWith(func(q *cosi.DriverGrantBucketAccessRequest) { q.Name = "" }), codes.InvalidArgument, "name"},
		{"grant by IAM", grantWith(func(q *cosi.DriverGrantBucketAccessRequest) {
			q.AuthenticationType = cosi.AuthenticationType_IAM
		}), codes.InvalidArgument, "IAM"},
		{"grant without a type", grantWith(func(q *cosi.DriverGrantBucketAccessRequest) {
			q.AuthenticationType = cosi.AuthenticationType_UnknownAuthenticationType
		}), codes.InvalidArgument, "authentication_type is missing"},
		{"grant with a bad access", grantWith(func(q *cosi.DriverGrantBucketAccessRequest) {
			q.Parameters = map[string]string{"access": "admin"}
		}), codes.InvalidArgument, `"admin"`},
		{"grant with an unknown parameter", grantWith(func(q *cosi.DriverGrantBucketAccessRequest) {
			q.Parameters = map[string]string{"role": "admin"}
		}), codes.InvalidArgument, `"role"`},
		{"grant on no bucket", grantWith(func(q *cosi.DriverGrantBucketAccessRequest) { q.BucketId = "main/absent" }), codes.NotFound, "absent"},
		{"revoke without an account", func() error { return r.revoke(t, id, "") }, codes.InvalidArgument, "account_id is missing"},
		{"revoke of root", func() error { return r.revoke(t, id, r.gateway.AccessKey) }, codes.InvalidArgument, "granted"},
	} {
		t.Run(test.name, func(t *testing.T) { wantCode(t, test.call(), test.code, test.mention) })
	}
	if names := r.bucketNames(t); len(names) != 1 {
		t.Errorf("the buckets are %v, want class-1 only", names)
	}
	if users := r.users(t); strings.Contains(users, "OX") {
		t.Errorf("a refused grant left a user: %s", users)
	}
}

// TestOtherBuckets checks that the driver deletes no bucket that it did not make, and grants access to it.
func TestOtherBuckets(t *testing.T) {
	r := newRig(t, false)
	ctx := t.Context()
	_, err := r.root.CreateBucket(ctx, &s3.CreateBucketInput{Bucket: aws.String("by-hand")})
	must(t, err)
	_, err = r.create(t, "by-hand", nil)
	wantCode(t, err, codes.AlreadyExists, "did not make it")
	wantCode(t, r.remove(t, "main/by-hand"), codes.FailedPrecondition, "by hand")

	// The statement of the operator outlives grants and revocations.
	const foreign = `{"Version":"2012-10-17","Statement":[{"Sid":"public","Effect":"Allow","Principal":"*","Action":"s3:GetObject","Resource":"arn:aws:s3:::by-hand/*"}]}`
	_, err = r.root.PutBucketPolicy(
		ctx,
		&s3.PutBucketPolicyInput{Bucket: aws.String("by-hand"), Policy: aws.String(foreign)},
	)
	must(t, err)
	g := r.mustGrant(t, "main/by-hand", "access", buckets.ReadWrite)
	must(t, put(ctx, g.client, "by-hand", "x", "text"))
	must(t, r.revoke(t, "main/by-hand", g.account))
	policy, err := r.root.GetBucketPolicy(ctx, &s3.GetBucketPolicyInput{Bucket: aws.String("by-hand")})
	must(t, err)
	if !strings.Contains(aws.ToString(policy.Policy), `"public"`) ||
		strings.Contains(aws.ToString(policy.Policy), g.account) {
		t.Errorf("the policy is %s", aws.ToString(policy.Policy))
	}

	west := *r
	west.Driver = r.driver(t, "west", r.direct())
	id := r.mustCreate(t, "class-1", nil)
	_, err = west.create(t, "class-1", nil)
	wantCode(t, err, codes.AlreadyExists, "this cluster did not make it")
	wantCode(t, west.remove(t, id), codes.FailedPrecondition, "this cluster's driver")
	east := r.mustGrant(t, id, "access", buckets.ReadWrite)
	wantCode(t, west.revoke(t, id, east.account), codes.InvalidArgument, "granted")
	second := r.mustCreate(t, "class-2", nil)
	wantCode(t, r.revoke(t, second, east.account), codes.InvalidArgument, "granted")
	must(t, put(ctx, east.client, "class-1", "x", "text"))
}

// TestDeleteContents checks that a class with deleteContents deletes all objects and versions.
func TestDeleteContents(t *testing.T) {
	r := newRig(t, true)
	ctx := t.Context()
	for _, test := range []struct {
		name       string
		parameters map[string]string
	}{
		{"plain", map[string]string{"deleteContents": "true"}},
		{"versions", map[string]string{"deleteContents": "true", "versioning": "true"}},
		{"locks", map[string]string{"deleteContents": "true", "objectLock": "true"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			id := r.mustCreate(t, test.name, test.parameters)
			r.mustCreate(t, test.name, test.parameters)
			g := r.mustGrant(t, id, "access", buckets.ReadWrite)
			for n := range 30 {
				must(t, put(ctx, g.client, test.name, fmt.Sprintf("folder/%d", n%20), "text"))
			}
			_, err := g.client.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: &test.name, Key: aws.String("folder/0")})
			must(t, err)
			must(t, r.remove(t, id))
			// The access outlives its bucket until it is revoked.
			must(t, r.revoke(t, id, g.account))
			if users := r.users(t); strings.Contains(users, g.account) {
				t.Errorf("the user is left: %s", users)
			}
		})
	}
	if names := r.bucketNames(t); len(names) > 0 {
		t.Errorf("buckets are left: %v", names)
	}
}

// TestStores checks buckets in several stores by one driver.
func TestStores(t *testing.T) {
	r := newRig(t, false)
	second, err := buckettest.NewGateway(t.TempDir(), false)
	must(t, err)
	must(t, second.Start(t.Context()))
	t.Cleanup(func() { must(t, second.Kill()) })
	both := *r
	both.Driver = r.driver(t, "east", r.direct(), buckettest.Store{
		Name: "second", Endpoint: second.Endpoint, AccessKey: second.AccessKey, SecretKey: second.SecretKey,
	})
	_, err = both.create(t, "class-1", nil)
	wantCode(t, err, codes.InvalidArgument, "main, second")
	if id := both.mustCreate(t, "class-1", map[string]string{"store": "second"}); id != "second/class-1" {
		t.Errorf("the bucket is %q", id)
	}
	_, err = both.create(t, "class-1", map[string]string{"store": "main"})
	wantCode(t, err, codes.AlreadyExists, `"second"`)
	must(t, second.Kill())
	both.mustCreate(t, "class-2", map[string]string{"store": "main"})
	_, err = both.create(t, "class-3", map[string]string{"store": "second"})
	wantCode(t, err, codes.Unavailable, `"second"`)
}

// TestManyAccesses grants at once, and finds each in the policy.
func TestManyAccesses(t *testing.T) {
	r := newRig(t, false)
	id := r.mustCreate(t, "class-1", nil)
	const number = 40
	grants := make([]grant, number)
	errs := make([]error, number)
	var group sync.WaitGroup
	var mu sync.Mutex // the rig's list of secrets
	for n := range number {
		group.Go(func() {
			answer, err := r.DriverGrantBucketAccess(t.Context(), &cosi.DriverGrantBucketAccessRequest{
				BucketId: id, Name: fmt.Sprintf("access-%d", n), AuthenticationType: cosi.AuthenticationType_Key,
			})
			secrets := answer.GetCredentials()["s3"].GetSecrets()
			mu.Lock()
			defer mu.Unlock()
			errs[n] = err
			grants[n] = grant{account: answer.GetAccountId(), client: buckettest.Client(
				r.gateway.Endpoint, secrets["accessKeyID"], secrets["accessSecretKey"])}
		})
	}
	group.Wait()
	for n, g := range grants {
		must(t, errs[n])
		must(t, put(t.Context(), g.client, "class-1", fmt.Sprintf("object-%d", n), "text"))
	}
	for _, g := range grants[:number/2] {
		must(t, r.revoke(t, id, g.account))
	}
	for n, g := range grants {
		err := put(t.Context(), g.client, "class-1", fmt.Sprintf("object-%d", n), "text")
		if n < number/2 {
			wantRefused(t, "revoked keys", err)
		} else {
			must(t, err)
		}
	}
}
