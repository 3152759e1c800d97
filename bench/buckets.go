// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"golang.org/x/sync/errgroup"

	"github.com/oxidecomputer/oxide-csi-plugin/test/buckets/buckettest"
)

// bucketsPrefix begins the names of the rows of -buckets.
const bucketsPrefix = "buckets/"

const (
	bucketRounds  = 5
	bucketWorkers = 4
	storeGiB      = 4
)

// medium is where objects are: a folder, or a bucket of a gateway on the same filesystem.
type medium struct {
	name      string
	put       func(ctx context.Context, key string, content []byte) error
	get       func(ctx context.Context, key string) error
	removeAll func(ctx context.Context, keys []string) error
}

// bucketThroughput writes and reads objects through a gateway, and files on the filesystem below it, alternating. The
// plugin mounts the volume. It does so with and without the mount option sync, with which nothing is acknowledged
// before it is on the disk.
func bucketThroughput(ctx context.Context, b *bench) (rows []row, err error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("run it as root: it mounts a filesystem")
	}
	s, err := b.newStagingRig()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.stop()) }()
	for _, options := range []string{"sync", "defaults"} {
		made, err := s.mountedBuckets(ctx, options)
		if err != nil {
			return nil, fmt.Errorf("mount option %s: %w", options, err)
		}
		rows = append(rows, made...)
	}
	return rows, nil
}

func (s *stagingRig) mountedBuckets(ctx context.Context, options string) (rows []row, err error) {
	v, err := s.newVolume(ctx, "store-"+options, "xfs", storeGiB)
	if err != nil {
		return nil, err
	}
	v.capability.GetMount().MountFlags = []string{options}
	if err := s.attachVolume(ctx, v); err != nil {
		return nil, err
	}
	if err := s.stage(ctx, v); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.unstage(ctx, v), s.remove(ctx, v)) }()
	gateway, err := buckettest.NewGateway(v.staging, false)
	if err != nil {
		return nil, err
	}
	if err := gateway.Start(ctx); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, gateway.Kill()) }()
	bucket, err := newBucket(ctx, gateway)
	if err != nil {
		return nil, err
	}
	folder := filepath.Join(v.staging, "files")
	if err := os.Mkdir(folder, 0o755); err != nil {
		return nil, err
	}
	for _, size := range []struct {
		name           string
		bytes, objects int
	}{{"4 KiB", 4 << 10, 400}, {"1 MiB", 1 << 20, 64}, {"32 MiB", 32 << 20, 8}} {
		made, err := compare(ctx, size.name, options, size.bytes, size.objects, []medium{newFolder(folder), bucket})
		if err != nil {
			return nil, err
		}
		rows = append(rows, made...)
	}
	return rows, nil
}

// compare writes and reads objects of one size in each medium.
func compare(
	ctx context.Context, size, options string, bytesEach, objects int, media []medium,
) (rows []row, err error) {
	content := bytes.Repeat([]byte("content "), bytesEach/8)
	var keys []string
	for n := range objects {
		keys = append(keys, fmt.Sprintf("object-%d", n))
	}
	mibPerSecond := func(each func(context.Context, string) error) (float64, error) {
		group, ctx := errgroup.WithContext(ctx)
		group.SetLimit(bucketWorkers)
		start := time.Now()
		for _, key := range keys {
			group.Go(func() error { return each(ctx, key) })
		}
		err := group.Wait()
		return float64(bytesEach) * float64(objects) / (1 << 20) / time.Since(start).Seconds(), err
	}
	writes, reads := map[string][]float64{}, map[string][]float64{}
	for range bucketRounds {
		for _, m := range media {
			wrote, err := mibPerSecond(func(ctx context.Context, key string) error { return m.put(ctx, key, content) })
			if err != nil {
				return nil, fmt.Errorf("write to the %s: %w", m.name, err)
			}
			read, err := mibPerSecond(m.get)
			if err != nil {
				return nil, fmt.Errorf("read from the %s: %w", m.name, err)
			}
			writes[m.name], reads[m.name] = append(writes[m.name], wrote), append(reads[m.name], read)
			if err := m.removeAll(ctx, keys); err != nil {
				return nil, err
			}
		}
	}
	for _, m := range media {
		rows = append(rows,
			median(fmt.Sprintf("%s%s/write/%s/%s", bucketsPrefix, options, size, m.name), "MiB/s", writes[m.name]),
			median(fmt.Sprintf("%s%s/read/%s/%s", bucketsPrefix, options, size, m.name), "MiB/s", reads[m.name]))
	}
	return rows, nil
}

func newFolder(folder string) medium {
	path := func(key string) string { return filepath.Join(folder, key) }
	return medium{
		name: "filesystem",
		put: func(_ context.Context, key string, content []byte) error {
			return os.WriteFile(path(key), content, 0o600)
		},
		get: func(_ context.Context, key string) error { _, err := os.ReadFile(path(key)); return err },
		removeAll: func(_ context.Context, keys []string) error {
			var errs []error
			for _, key := range keys {
				errs = append(errs, os.Remove(path(key)))
			}
			return errors.Join(errs...)
		},
	}
}

func newBucket(ctx context.Context, gateway *buckettest.Gateway) (medium, error) {
	client, name := gateway.Root(), aws.String("bucket")
	if _, err := client.CreateBucket(ctx, &s3.CreateBucketInput{Bucket: name}); err != nil {
		return medium{}, err
	}
	return medium{
		name: "gateway",
		put: func(ctx context.Context, key string, content []byte) error {
			_, err := client.PutObject(ctx, &s3.PutObjectInput{Bucket: name, Key: &key, Body: bytes.NewReader(content)})
			return err
		},
		get: func(ctx context.Context, key string) error {
			answer, err := client.GetObject(ctx, &s3.GetObjectInput{Bucket: name, Key: &key})
			if err != nil {
				return err
			}
			_, err = io.Copy(io.Discard, answer.Body)
			return errors.Join(err, answer.Body.Close())
		},
		removeAll: func(ctx context.Context, keys []string) error {
			for _, key := range keys {
				if _, err := client.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: name, Key: &key}); err != nil {
					return err
				}
			}
			return nil
		},
	}, nil
}
