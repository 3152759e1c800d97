// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Command demo shows the life of a bucket: it starts a gateway on a new folder and the COSI driver, makes a bucket and
// an access, writes and reads an object with the granted keys, revokes the access, and deletes everything. It needs
// neither root nor Kubernetes: it plays COSI's sidecar itself.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	cosi "sigs.k8s.io/container-object-storage-interface/proto"

	"github.com/oxidecomputer/oxide-csi-plugin/core/buckets"
	"github.com/oxidecomputer/oxide-csi-plugin/test/buckets/buckettest"
)

func main() {
	program := flag.String("program", "bin/oxide-cosi", "the driver")
	flag.Parse()
	// No signal may end the process before everything is removed.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, *program)
	stop()
	if err != nil {
		fmt.Fprintf(os.Stderr, "demo: %v\n", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, program string) (err error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	dir, err := os.MkdirTemp("", "buckets")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()

	gateway, err := buckettest.NewGateway(dir, false)
	if err != nil {
		return err
	}
	if err := gateway.Start(ctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, gateway.Kill()) }()
	say("a gateway serves S3 at %s, its data is in %s", gateway.Endpoint, dir)

	driver, err := buckettest.NewDriver(program, dir, "demo", buckettest.Store{
		Name: "main", Endpoint: gateway.Endpoint, AccessKey: gateway.AccessKey, SecretKey: gateway.SecretKey,
	})
	if err != nil {
		return err
	}
	if err := driver.Start(ctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, driver.Stop()) }()
	if err := tell(ctx, driver, gateway); err != nil {
		return err
	}
	say("nothing is left")
	return nil
}

// tell is the story. The requests are those that COSI's sidecar sends.
func tell(ctx context.Context, driver *buckettest.Driver, gateway *buckettest.Gateway) error {
	info, err := driver.DriverGetInfo(ctx, &cosi.DriverGetInfoRequest{})
	if err != nil {
		return err
	}
	say("the driver %s answers on its socket", info.GetName())
	const bucket = "demo-4d1f"
	created, err := driver.DriverCreateBucket(ctx, &cosi.DriverCreateBucketRequest{Name: bucket})
	if err != nil {
		return err
	}
	say("DriverCreateBucket made the bucket %s", created.GetBucketId())
	granted, err := driver.DriverGrantBucketAccess(ctx, &cosi.DriverGrantBucketAccessRequest{
		BucketId: created.GetBucketId(), Name: "backup", AuthenticationType: cosi.AuthenticationType_Key,
		Parameters: map[string]string{buckets.ParameterAccess: buckets.ReadWrite},
	})
	if err != nil {
		return err
	}
	secrets := granted.GetCredentials()["s3"].GetSecrets()
	say("DriverGrantBucketAccess made the account %s", granted.GetAccountId())
	client := buckettest.Client(secrets["endpoint"], secrets["accessKeyID"], secrets["accessSecretKey"])
	if err := useObject(ctx, client, bucket); err != nil {
		return err
	}
	if _, err := driver.DriverRevokeBucketAccess(ctx, &cosi.DriverRevokeBucketAccessRequest{
		BucketId: created.GetBucketId(), AccountId: granted.GetAccountId(),
	}); err != nil {
		return err
	}
	if _, err := client.ListObjectsV2(ctx, &s3.ListObjectsV2Input{Bucket: aws.String(bucket)}); err == nil {
		return errors.New("the revoked keys still work")
	}
	say("DriverRevokeBucketAccess: the gateway refuses the keys now")
	if _, err := driver.DriverDeleteBucket(
		ctx,
		&cosi.DriverDeleteBucketRequest{BucketId: created.GetBucketId()},
	); err != nil {
		return err
	}
	left, err := gateway.Root().ListBuckets(ctx, &s3.ListBucketsInput{})
	if err != nil {
		return err
	}
	if len(left.Buckets) > 0 {
		return fmt.Errorf("%d buckets are left", len(left.Buckets))
	}
	say("DriverDeleteBucket deleted the bucket")
	return nil
}

// useObject writes, reads and deletes an object with the granted keys.
func useObject(ctx context.Context, client *s3.Client, bucket string) error {
	const key, text = "backups/monday", "all the data"
	if _, err := client.PutObject(ctx, &s3.PutObjectInput{
		Bucket: aws.String(bucket), Key: aws.String(key), Body: strings.NewReader(text),
	}); err != nil {
		return err
	}
	object, err := client.GetObject(ctx, &s3.GetObjectInput{Bucket: aws.String(bucket), Key: aws.String(key)})
	if err != nil {
		return err
	}
	read, err := io.ReadAll(object.Body)
	if err := errors.Join(err, object.Body.Close()); err != nil {
		return err
	}
	if string(read) != text {
		return fmt.Errorf("read %q, want %q", read, text)
	}
	say("with its keys an object was written and read: %q", read)
	if _, err := client.DeleteObject(
		ctx,
		&s3.DeleteObjectInput{Bucket: aws.String(bucket), Key: aws.String(key)},
	); err != nil {
		return err
	}
	return nil
}

func say(format string, args ...any) { fmt.Printf("  "+format+"\n", args...) }
