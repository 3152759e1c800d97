// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main_test

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
	"golang.org/x/net/http2"
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
	// Not ALREADY_EXISTS: COSI's sidecar v0.2.2 crashes on it, because it reads the answer then.
	wantCode(t, err, codes.FailedPrecondition, "revoke it first")

	must(t, put(ctx, writer.client, bucket, "folder/object", "text"))
	must(t, put(ctx, r.root, other, "folder/object", "another's"))
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
	_, err = r.root.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: aws.String(other), Key: aws.String("folder/object")})
	must(t, err)
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
		_, err = g.client.CopyObject(ctx, &s3.CopyObjectInput{
			Bucket: &bucket, Key: aws.String("copy"), CopySource: aws.String(other + "/folder/object"),
		})
		wantRefused(t, "copy from another bucket", err)
		// The buckets are folders side by side.
		if text, err := get(ctx, g.client, bucket, "../"+other+"/folder/object"); err == nil {
			t.Errorf("a path out of the bucket reads %q", text)
		}
		if err := put(ctx, g.client, bucket, "../"+other+"/x", ""); err == nil {
			t.Error("a path out of the bucket is written")
		}
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
		{"delete with an empty store", func() error { return r.remove(t, "/class-1") }, codes.InvalidArgument, "STORE/BUCKET"},
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

// TestLog checks that each RPC has one line in the log, with an ID of its own.
func TestLog(t *testing.T) {
	r := newRig(t, false)
	r.mustCreate(t, "class-1", nil)
	r.mustCreate(t, "class-1", nil)
	line := regexp.MustCompile(`responded method=DriverCreateBucket request_id=(\d+) name=class-1 code=OK`)
	var lines [][]string
	// The answer may come before its line.
	for end := time.Now().Add(10 * time.Second); len(lines) < 2 && time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		lines = line.FindAllStringSubmatch(r.log.String(), -1)
	}
	if len(lines) != 2 || lines[0][1] == lines[1][1] {
		t.Errorf("want two lines with different IDs: %s", r.log)
	}
}

// TestCallsAreBounded checks that the driver tells its clients how many RPCs a connection may have at once.
func TestCallsAreBounded(t *testing.T) {
	r := newRig(t, false)
	conn, err := net.Dial("unix", r.Socket())
	must(t, err)
	defer conn.Close()
	_, err = io.WriteString(conn, http2.ClientPreface)
	must(t, err)
	framer := http2.NewFramer(conn, conn)
	must(t, framer.WriteSettings())
	frame, err := framer.ReadFrame()
	must(t, err)
	settings, ok := frame.(*http2.SettingsFrame)
	if !ok {
		t.Fatalf("the first frame is %v", frame)
	}
	if limit, _ := settings.Value(http2.SettingMaxConcurrentStreams); limit != 100 {
		t.Errorf("the limit is %d, want 100", limit)
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
	wantCode(t, r.remove(t, "main/by-hand"), codes.FailedPrecondition, "manually")

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

// TestPolicyEditedByHand checks that a policy that the driver cannot parse keeps accesses from being changed, and not
// the bucket from being deleted.
func TestPolicyEditedByHand(t *testing.T) {
	r := newRig(t, false)
	id := r.mustCreate(t, "class-1", nil)
	const edited = `{"Version":"2012-10-17","Statement":[{"Sid":"OxideCosiReadOnly","Effect":"Allow","Principal":"*",` +
		`"Action":"s3:GetObject","Resource":"arn:aws:s3:::class-1/*"}]}`
	_, err := r.root.PutBucketPolicy(
		t.Context(), &s3.PutBucketPolicyInput{Bucket: aws.String("class-1"), Policy: aws.String(edited)})
	must(t, err)
	_, err = r.grant(t, id, "access", buckets.ReadWrite)
	wantCode(t, err, codes.FailedPrecondition, "unknown form", "manually")
	must(t, r.remove(t, id))
	if names := r.bucketNames(t); len(names) > 0 {
		t.Errorf("buckets are left: %v", names)
	}
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
			// COSI's sidecar may revoke the access later.
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

// TestAccessesEndWithTheirBucket checks that a deleted bucket leaves no keys, and that those of others stay. COSI's
// sidecar v0.2.2 deletes the bucket of a deleted claim before its accesses are revoked, and may then never revoke them.
func TestAccessesEndWithTheirBucket(t *testing.T) {
	r := newRig(t, false)
	id, other := r.mustCreate(t, "class-1", nil), r.mustCreate(t, "class-2", nil)
	writer, reader := r.mustGrant(t, id, "writer", buckets.ReadWrite), r.mustGrant(t, id, "reader", buckets.ReadOnly)
	stays := r.mustGrant(t, other, "writer", buckets.ReadWrite)
	must(t, put(t.Context(), writer.client, "class-1", "x", "text"))
	wantCode(t, r.remove(t, id), codes.FailedPrecondition, "not empty")
	_, err := writer.client.DeleteObject(
		t.Context(),
		&s3.DeleteObjectInput{Bucket: aws.String("class-1"), Key: aws.String("x")},
	)
	must(t, err) // the refused deletion left the access
	must(t, r.remove(t, id))
	if users := r.users(t); strings.Contains(users, writer.account) || strings.Contains(users, reader.account) {
		t.Errorf("users are left: %s", users)
	}
	must(t, put(t.Context(), stays.client, "class-2", "x", "text"))
	must(t, r.revoke(t, id, writer.account))
}

// TestWriteWhileEmptied checks that an object which comes while the driver empties its bucket is no refusal: the
// repeated call deletes it.
func TestWriteWhileEmptied(t *testing.T) {
	r := newRig(t, false)
	id := r.mustCreate(t, "class-1", map[string]string{"deleteContents": "true"})
	r.proxy.SetFault(func(req *http.Request) buckettest.Fault {
		if req.Method == http.MethodDelete {
			if err := put(t.Context(), r.root, "class-1", "late", "text"); err != nil {
				t.Error(err)
			}
		}
		return buckettest.Pass
	})
	wantCode(t, r.remove(t, id), codes.Aborted, "revoke its accesses")
	r.proxy.SetFault(nil)
	must(t, r.remove(t, id))
}

// TestOldVersionsFirst checks that old versions are deleted before the latest. A gateway that is killed while it
// deletes the latest one hides the others: no list has them, and the bucket can never be deleted.
func TestOldVersionsFirst(t *testing.T) {
	r := newRig(t, true)
	id := r.mustCreate(t, "class-1", map[string]string{"deleteContents": "true", "versioning": "true"})
	latest := ""
	for n := range 3 {
		answer, err := r.root.PutObject(t.Context(), &s3.PutObjectInput{
			Bucket: aws.String("class-1"), Key: aws.String("key"), Body: strings.NewReader(fmt.Sprint(n)),
		})
		must(t, err)
		latest = aws.ToString(answer.VersionId)
	}
	var deleted string
	r.proxy.SetFault(func(req *http.Request) buckettest.Fault {
		if req.URL.Query().Has("delete") {
			body, err := io.ReadAll(req.Body)
			if err != nil {
				t.Error(err)
			}
			deleted += string(body)
			req.Body = io.NopCloser(strings.NewReader(string(body)))
		}
		return buckettest.Pass
	})
	must(t, r.remove(t, id))
	if versions := strings.Split(deleted, "<VersionId>"); len(versions) != 4 || !strings.HasPrefix(versions[3], latest) {
		t.Errorf("the latest version, %s, is not the last one in %s", latest, deleted)
	}
}

// TestLockedContents checks that a locked object keeps its bucket, also with deleteContents.
func TestLockedContents(t *testing.T) {
	r := newRig(t, true)
	ctx, bucket := t.Context(), "locks"
	id := r.mustCreate(t, bucket, map[string]string{"deleteContents": "true", "objectLock": "true"})
	g := r.mustGrant(t, id, "access", buckets.ReadWrite)
	must(t, put(ctx, g.client, bucket, "object", "text"))
	hold := func(status types.ObjectLockLegalHoldStatus) {
		_, err := r.root.PutObjectLegalHold(ctx, &s3.PutObjectLegalHoldInput{
			Bucket: &bucket, Key: aws.String("object"), LegalHold: &types.ObjectLockLegalHold{Status: status},
		})
		must(t, err)
	}
	hold(types.ObjectLockLegalHoldStatusOn)
	wantCode(t, r.remove(t, id), codes.FailedPrecondition, "locks")
	if text, err := get(ctx, g.client, bucket, "object"); err != nil || text != "text" {
		t.Errorf("the locked object is %q, %v", text, err)
	}
	hold(types.ObjectLockLegalHoldStatusOff)
	must(t, r.remove(t, id))
}

// TestLeftFolders checks that a bucket without objects is deleted also if a killed gateway left folders in it. Folders
// of objects stay.
func TestLeftFolders(t *testing.T) {
	for _, versions := range []bool{false, true} {
		t.Run(fmt.Sprintf("versions %t", versions), func(t *testing.T) {
			r := newRig(t, versions)
			parameters := map[string]string{"versioning": strconv.FormatBool(versions)}
			for _, bucket := range []string{"empty", "full"} {
				id := r.mustCreate(t, bucket, parameters)
				for _, folder := range []string{"a/b/c", "a/d", "e"} {
					must(t, os.MkdirAll(r.gateway.Folder(bucket, folder), 0o700))
				}
				if bucket == "full" {
					for _, key := range []string{"e/object", "folder/"} { // the second is an object, too
						must(t, put(t.Context(), r.root, bucket, key, ""))
					}
					wantCode(t, r.remove(t, id), codes.FailedPrecondition, "not empty")
					for _, key := range []string{"e/object", "folder/"} {
						if _, err := get(t.Context(), r.root, bucket, key); err != nil {
							t.Errorf("object %s: %v", key, err)
						}
					}
					continue
				}
				must(t, r.remove(t, id))
			}
			if names := r.bucketNames(t); !slices.Equal(names, []string{"full"}) {
				t.Errorf("the buckets are %v", names)
			}
		})
	}
}

// TestLeftVersions checks what the driver answers if a killed gateway left a folder of versions: no list shows its key,
// so only a person can remove it.
func TestLeftVersions(t *testing.T) {
	r := newRig(t, true)
	id := r.mustCreate(t, "class-1", map[string]string{"deleteContents": "true", "versioning": "true"})
	versions := filepath.Join(filepath.Dir(r.gateway.Folder("class-1")), "..", "versions", "class-1")
	must(t, os.MkdirAll(filepath.Join(versions, "ba", "9c", "73", "ba9c73"), 0o700))
	wantCode(t, r.remove(t, id), codes.Aborted, buckets.LeftVersions)
	must(t, os.RemoveAll(versions))
	must(t, r.remove(t, id))
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

// Wrong settings have an exit code of their own, which no crash has.
func TestWrongSettings(t *testing.T) {
	for _, args := range [][]string{nil, {"--endpoint=tcp://x"}, {"--bogus"}, {"stray"}, {"--endpoint=/x.sock", "--stores=/none"}} {
		cmd := exec.CommandContext(t.Context(), program, args...)
		cmd.Env = []string{} // no setting of the test's own environment
		out, err := cmd.CombinedOutput()
		if code := cmd.ProcessState.ExitCode(); code != 78 {
			t.Errorf("%q: exit code %d, want 78: %v: %s", args, code, err, out)
		}
	}
}
