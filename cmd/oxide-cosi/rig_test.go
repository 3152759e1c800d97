// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/smithy-go"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cosi "sigs.k8s.io/container-object-storage-interface/proto"

	"github.com/oxidecomputer/oxide-csi-plugin/core/buckets"
	"github.com/oxidecomputer/oxide-csi-plugin/test/buckets/buckettest"
)

// program is the path of oxide-cosi, which TestMain builds.
var program string

func TestMain(m *testing.M) { os.Exit(buildAndRun(m)) }

func buildAndRun(m *testing.M) int {
	dir, err := os.MkdirTemp("", "oxide-cosi-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() { _ = os.RemoveAll(dir) }()
	program = filepath.Join(dir, "oxide-cosi")
	if output, err := exec.Command("go", "build", "-o", program, ".").CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "%v: %s", err, output)
		return 1
	}
	return m.Run()
}

// rig is the driver's binary and the real gateway, with a proxy between them.
type rig struct {
	*buckettest.Driver
	gateway *buckettest.Gateway
	proxy   *buckettest.Proxy
	root    *s3.Client
	log     *logBuffer
}

// store is the name of the rig's store.
const store = "main"

// newRig starts everything. It skips the test if the gateway is not built: make test builds it first.
func newRig(t *testing.T, versions bool) *rig {
	t.Helper()
	if _, err := buckettest.GatewayProgram(); err != nil {
		t.Skip(err)
	}
	gateway, err := buckettest.NewGateway(t.TempDir(), versions)
	must(t, err)
	must(t, gateway.Start(t.Context()))
	t.Cleanup(func() { must(t, gateway.Kill()) })
	proxy, err := buckettest.NewProxy(gateway.Endpoint)
	must(t, err)
	t.Cleanup(proxy.Close)
	r := &rig{gateway: gateway, proxy: proxy, root: gateway.Root(), log: &logBuffer{}}
	r.Driver = r.driver(t, "east", buckettest.Store{
		Name: store, Endpoint: proxy.Endpoint, AccessKey: gateway.AccessKey, SecretKey: gateway.SecretKey,
	})
	return r
}

// driver starts a driver, which ends with the test. At its end the log must have no secret.
func (r *rig) driver(t *testing.T, cluster string, stores ...buckettest.Store) *buckettest.Driver {
	t.Helper()
	driver, err := buckettest.NewDriver(program, shortDir(t), cluster, stores...)
	must(t, err)
	driver.Log = r.log
	must(t, driver.Start(t.Context()))
	t.Cleanup(func() {
		must(t, driver.Stop())
		r.wantNoSecrets(t)
	})
	return driver
}

// direct is the rig's store without the proxy.
func (r *rig) direct() buckettest.Store {
	return buckettest.Store{
		Name: store, Endpoint: r.gateway.Endpoint, AccessKey: r.gateway.AccessKey, SecretKey: r.gateway.SecretKey,
	}
}

func (r *rig) create(t *testing.T, name string, parameters map[string]string) (string, error) {
	t.Helper()
	answer, err := r.DriverCreateBucket(t.Context(), &cosi.DriverCreateBucketRequest{Name: name, Parameters: parameters})
	return answer.GetBucketId(), err
}

func (r *rig) mustCreate(t *testing.T, name string, parameters map[string]string) string {
	t.Helper()
	id, err := r.create(t, name, parameters)
	must(t, err)
	return id
}

// grant is a granted access.
type grant struct {
	account, accessKey, secretKey string
	client                        *s3.Client
}

func (r *rig) grant(t *testing.T, bucketID, name, access string) (grant, error) {
	t.Helper()
	answer, err := r.DriverGrantBucketAccess(t.Context(), &cosi.DriverGrantBucketAccessRequest{
		BucketId: bucketID, Name: name, AuthenticationType: cosi.AuthenticationType_Key,
		Parameters: map[string]string{buckets.ParameterAccess: access},
	})
	secrets := answer.GetCredentials()["s3"].GetSecrets()
	g := grant{account: answer.GetAccountId(), accessKey: secrets["accessKeyID"], secretKey: secrets["accessSecretKey"]}
	// Workloads reach the gateway without the proxy.
	r.log.secrets = append(r.log.secrets, g.secretKey)
	g.client = buckettest.Client(r.gateway.Endpoint, g.accessKey, g.secretKey)
	return g, err
}

func (r *rig) mustGrant(t *testing.T, bucketID, name, access string) grant {
	t.Helper()
	g, err := r.grant(t, bucketID, name, access)
	must(t, err)
	return g
}

func (r *rig) revoke(t *testing.T, bucketID, account string) error {
	t.Helper()
	_, err := r.DriverRevokeBucketAccess(
		t.Context(),
		&cosi.DriverRevokeBucketAccessRequest{BucketId: bucketID, AccountId: account},
	)
	return err
}

func (r *rig) remove(t *testing.T, bucketID string) error {
	t.Helper()
	_, err := r.DriverDeleteBucket(t.Context(), &cosi.DriverDeleteBucketRequest{BucketId: bucketID})
	return err
}

// bucketNames returns all buckets of the gateway.
func (r *rig) bucketNames(t *testing.T) []string {
	t.Helper()
	answer, err := r.root.ListBuckets(t.Context(), &s3.ListBucketsInput{})
	must(t, err)
	var names []string
	for _, bucket := range answer.Buckets {
		names = append(names, *bucket.Name)
	}
	return names
}

// users returns the file of the gateway's users.
func (r *rig) users(t *testing.T) string {
	t.Helper()
	text, err := r.gateway.Users()
	must(t, err)
	return text
}

// wantNoSecrets checks the log of all drivers.
func (r *rig) wantNoSecrets(t *testing.T) {
	t.Helper()
	text := r.log.String()
	if !strings.Contains(text, "serving") {
		t.Error("the log is empty")
	}
	for _, secret := range append(r.log.secrets, r.gateway.SecretKey) {
		if secret != "" && strings.Contains(text, secret) {
			t.Error("the driver's log has a secret key")
		}
	}
}

func put(ctx context.Context, client *s3.Client, bucket, key, text string) error {
	_, err := client.PutObject(ctx, &s3.PutObjectInput{Bucket: &bucket, Key: &key, Body: strings.NewReader(text)})
	return err
}

func get(ctx context.Context, client *s3.Client, bucket, key string) (string, error) {
	answer, err := client.GetObject(ctx, &s3.GetObjectInput{Bucket: &bucket, Key: &key})
	if err != nil {
		return "", err
	}
	text, err := io.ReadAll(answer.Body)
	return string(text), errors.Join(err, answer.Body.Close())
}

// wantRefused checks that the gateway refused a call for want of rights, or of known keys.
func wantRefused(t *testing.T, what string, err error) {
	t.Helper()
	var answered smithy.APIError
	if !errors.As(err, &answered) ||
		answered.ErrorCode() != "AccessDenied" && answered.ErrorCode() != "InvalidAccessKeyId" {
		t.Errorf("%s: %v, want a refusal", what, err)
	}
}

func wantCode(t *testing.T, err error, want codes.Code, mentions ...string) {
	t.Helper()
	if status.Code(err) != want {
		t.Fatalf("%v, want code %s", err, want)
	}
	for _, mention := range mentions {
		if !strings.Contains(err.Error(), mention) {
			t.Errorf("%v does not mention %q", err, mention)
		}
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// shortDir returns a folder whose path is short enough for a socket.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "cosi")
	must(t, err)
	t.Cleanup(func() { must(t, os.RemoveAll(dir)) })
	return dir
}

// logBuffer keeps the log of the drivers.
type logBuffer struct {
	mu      sync.Mutex
	buffer  bytes.Buffer
	secrets []string
}

func (b *logBuffer) Write(text []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buffer.Write(text)
}

func (b *logBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buffer.String()
}
