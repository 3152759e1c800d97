// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package buckets

import (
	"context"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
	cosi "sigs.k8s.io/container-object-storage-interface/proto"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// DriverDeleteBucket deletes a bucket that this cluster's driver made. It succeeds if the bucket is gone. A bucket with
// objects is deleted only if its class says deleteContents: in the tags of the bucket, or in the delete context.
func (d *Driver) DriverDeleteBucket(
	ctx context.Context,
	req *cosi.DriverDeleteBucketRequest,
) (*cosi.DriverDeleteBucketResponse, error) {
	name, bucket, err := splitBucketID(req.GetBucketId())
	if err != nil {
		return nil, err
	}
	if err := rpc.CheckMap("delete_context", req.GetDeleteContext()); err != nil {
		return nil, err
	}
	store, err := d.store(name)
	if err != nil {
		return nil, err
	}
	tags, exists, err := store.lookUp(ctx, bucket)
	if err != nil {
		return nil, err
	}
	if !exists {
		return &cosi.DriverDeleteBucketResponse{}, nil
	}
	if tags[tagCluster] != d.cluster {
		return nil, rpc.FailedPrecondition(
			"bucket %q in store %q was not made by this cluster's driver: set the deletion policy Retain, or delete it by hand",
			bucket, store.name)
	}
	contents := tags[tagDeleteContents] == "true" || req.GetDeleteContext()[ParameterDeleteContents] == "true"
	if contents {
		if err := store.empty(ctx, bucket, tags[tagVersioning] == "true"); err != nil {
			return nil, err
		}
	}
	if err := store.remove(ctx, bucket); err != nil {
		return nil, err
	}
	return &cosi.DriverDeleteBucketResponse{}, nil
}

// remove deletes an empty bucket. It succeeds if there is no such bucket.
func (s *Store) remove(ctx context.Context, bucket string) error {
	_, err := s.s3.DeleteBucket(ctx, &s3.DeleteBucketInput{Bucket: &bucket})
	switch {
	case err == nil, hasCode(err, codeNoSuchBucket):
		return nil
	case hasCode(err, codeNotEmpty, codeVersionsRemain):
		return rpc.FailedPrecondition("bucket %q in store %q is not empty: delete its objects, or set %s in its class",
			bucket, s.name, ParameterDeleteContents)
	}
	return s.failed("delete bucket "+bucket, err)
}

// empty deletes all objects of a bucket, with all versions if it has versions.
func (s *Store) empty(ctx context.Context, bucket string, versioned bool) error {
	list := s.listObjects
	if versioned {
		list = s.listVersions
	}
	for {
		objects, err := list(ctx, bucket)
		if hasCode(err, codeNoSuchBucket) {
			return nil
		}
		if err != nil {
			return s.failed("list the objects of bucket "+bucket, err)
		}
		if len(objects) == 0 {
			return nil
		}
		deleted, err := s.s3.DeleteObjects(ctx, &s3.DeleteObjectsInput{
			Bucket: &bucket,
			Delete: &types.Delete{Objects: objects, Quiet: aws.Bool(true)},
		})
		if err != nil {
			return s.failed("delete the objects of bucket "+bucket, err)
		}
		if len(deleted.Errors) > 0 {
			first := deleted.Errors[0]
			return rpc.FailedPrecondition("%d objects of bucket %q cannot be deleted: remove their locks first: %s: %s",
				len(deleted.Errors), bucket, aws.ToString(first.Code), aws.ToString(first.Message))
		}
	}
}

// listObjects returns the first objects of a bucket, at most 1000.
func (s *Store) listObjects(ctx context.Context, bucket string) ([]types.ObjectIdentifier, error) {
	page, err := s.s3.ListObjectsV2(ctx, &s3.ListObjectsV2Input{Bucket: &bucket})
	if err != nil {
		return nil, err
	}
	var objects []types.ObjectIdentifier
	for _, object := range page.Contents {
		objects = append(objects, types.ObjectIdentifier{Key: object.Key})
	}
	return objects, nil
}

// listVersions returns the first versions and delete markers of a bucket, at most 1000.
func (s *Store) listVersions(ctx context.Context, bucket string) ([]types.ObjectIdentifier, error) {
	page, err := s.s3.ListObjectVersions(ctx, &s3.ListObjectVersionsInput{Bucket: &bucket})
	if err != nil {
		return nil, err
	}
	var objects []types.ObjectIdentifier
	for _, version := range page.Versions {
		objects = append(objects, types.ObjectIdentifier{Key: version.Key, VersionId: version.VersionId})
	}
	for _, marker := range page.DeleteMarkers {
		objects = append(objects, types.ObjectIdentifier{Key: marker.Key, VersionId: marker.VersionId})
	}
	return objects, nil
}
