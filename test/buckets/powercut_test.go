// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package buckets_test shows what a power cut takes from a store.
package buckets_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"golang.org/x/sys/unix"
	cosi "sigs.k8s.io/container-object-storage-interface/proto"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device/devicetest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/buckets/buckettest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/writecache"
)

func TestMain(m *testing.M) {
	writecache.Main()
	devicetest.Main(m)
}

const bucket, objects, grants = "class-1", 40, 10

// TestPowerCut cuts the power after a store acknowledged objects and keys. The gateway calls no fsync. With the mount
// option sync, which the class of the manifests has, nothing may be lost. Without it the rig must lose something, or
// else it would prove nothing.
func TestPowerCut(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: loop devices and mounts")
	}
	if _, err := buckettest.GatewayProgram(); err != nil {
		t.Skip(err)
	}
	program := filepath.Join(t.TempDir(), "oxide-cosi")
	if output, err := exec.Command("go", "build", "-o", program, "../../cmd/oxide-cosi").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, output)
	}
	for _, options := range []string{"sync", "defaults"} {
		t.Run(options, func(t *testing.T) {
			guest, backing, target := devicetest.New(t), filepath.Join(t.TempDir(), "disk"), t.TempDir()
			must(t, os.WriteFile(backing, nil, 0o600))
			must(t, os.Truncate(backing, 400<<20))
			devicetest.Run(t, "mkfs.xfs", "-q", backing)
			cache := writecache.New(t, backing)
			devicetest.Run(t, "mount", "-o", options, guest.Plug("csi-beforethecut", cache.Path).Loop, target)
			gateway, err := buckettest.NewGateway(target, false)
			must(t, err)
			must(t, gateway.Start(t.Context()))
			keys := fill(t, program, gateway)
			// Another program flushes another file, and with it the names in all folders, but not what is in the files.
			other, err := os.Create(filepath.Join(target, "other"))
			must(t, err)
			must(t, errors.Join(other.Sync(), other.Close()))
			cache.Cut(0)
			must(t, gateway.Kill())
			must(t, unix.Unmount(target, unix.MNT_DETACH))

			devicetest.Run(t, "mount", guest.Plug("csi-afterthecut", backing).Loop, target)
			defer devicetest.Unmount(t, target)
			lost := "everything: the gateway does not start"
			if _, err := os.Stat(gateway.Folder(bucket)); err != nil {
				lost = "the bucket"
			} else if gateway.Start(t.Context()) == nil {
				lost = missing(t.Context(), gateway, keys)
				must(t, gateway.Kill())
			}
			t.Logf("lost: %q", lost)
			if (lost == "") != (options == "sync") {
				t.Errorf("with the mount option %s is lost: %q", options, lost)
			}
		})
	}
}

// fill makes a bucket, keys and objects, and returns the keys.
func fill(t *testing.T, program string, gateway *buckettest.Gateway) (keys []*s3.Client) {
	t.Helper()
	dir, err := os.MkdirTemp("", "cosi") // a short path, for the socket
	must(t, err)
	defer func() { must(t, os.RemoveAll(dir)) }()
	driver, err := buckettest.NewDriver(program, dir, "east", buckettest.Store{
		Name: "main", Endpoint: gateway.Endpoint, AccessKey: gateway.AccessKey, SecretKey: gateway.SecretKey,
	})
	must(t, err)
	must(t, driver.Start(t.Context()))
	defer func() { must(t, driver.Stop()) }()
	made, err := driver.DriverCreateBucket(t.Context(), &cosi.DriverCreateBucketRequest{Name: bucket})
	must(t, err)
	for n := range grants {
		granted, err := driver.DriverGrantBucketAccess(t.Context(), &cosi.DriverGrantBucketAccessRequest{
			BucketId: made.GetBucketId(), Name: fmt.Sprint("access-", n), AuthenticationType: cosi.AuthenticationType_Key,
		})
		must(t, err)
		secrets := granted.GetCredentials()["s3"].GetSecrets()
		keys = append(keys, buckettest.Client(gateway.Endpoint, secrets["accessKeyID"], secrets["accessSecretKey"]))
	}
	for n := range objects {
		_, err := keys[n%grants].PutObject(t.Context(), &s3.PutObjectInput{
			Bucket: aws.String(bucket), Key: aws.String(key(n)), Body: strings.NewReader(text(n)),
		})
		must(t, err)
	}
	return keys
}

func key(n int) string  { return fmt.Sprintf("folder-%d/object-%d", n%4, n) }
func text(n int) string { return strings.Repeat(fmt.Sprintf("object %d ", n), 400) }

// missing says which keys and objects are lost.
func missing(ctx context.Context, gateway *buckettest.Gateway, keys []*s3.Client) string {
	var lost []string
	dead := 0
	for _, client := range keys {
		if _, err := client.ListObjectsV2(ctx, &s3.ListObjectsV2Input{Bucket: aws.String(bucket)}); err != nil {
			dead++
		}
	}
	if dead > 0 {
		lost = append(lost, fmt.Sprintf("%d of %d keys", dead, len(keys)))
	}
	gone := 0
	for n := range objects {
		if got, err := read(ctx, gateway.Root(), key(n)); err != nil || got != text(n) {
			gone++
		}
	}
	if gone > 0 {
		lost = append(lost, fmt.Sprintf("%d of %d objects", gone, objects))
	}
	return strings.Join(lost, ", ")
}

func read(ctx context.Context, client *s3.Client, key string) (string, error) {
	answer, err := client.GetObject(ctx, &s3.GetObjectInput{Bucket: aws.String(bucket), Key: &key})
	if err != nil {
		return "", err
	}
	content, err := io.ReadAll(answer.Body)
	return string(content), errors.Join(err, answer.Body.Close())
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
