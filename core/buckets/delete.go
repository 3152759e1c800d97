// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package buckets

import (
	"context"
	"errors"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
	cosi "sigs.k8s.io/container-object-storage-interface/proto"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// LeftVersions says in an error where a killed gateway left a version that no list shows.
const LeftVersions = `below "versions"`

// DriverDeleteBucket deletes a bucket that this cluster's driver made, and the users of its accesses. It succeeds if
// the bucket is gone. A bucket with objects is deleted only if its class says deleteContents: in the tags of the
// bucket, or in the delete context.
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
			"bucket %q in store %q was not made by this cluster's driver: set the deletion policy Retain, or delete it manually",
			bucket, store.name)
	}
	rights, exists, err := store.readPolicy(ctx, bucket)
	switch {
	case errors.Is(err, errPolicyForm):
		rights = &policy{} // it names no users, so they are left, without rights
	case err != nil:
		return nil, err
	case !exists: // it was deleted meanwhile
		return &cosi.DriverDeleteBucketResponse{}, nil
	}
	if err := store.deleteBucket(ctx, bucket, tags, req.GetDeleteContext()); err != nil {
		return nil, err
	}
	if err := d.deleteUsers(ctx, store, req.GetBucketId(), rights); err != nil {
		return nil, err
	}
	return &cosi.DriverDeleteBucketResponse{}, nil
}

// deleteBucket deletes a bucket with these tags, and before that its objects if its class says so.
func (s *Store) deleteBucket(ctx context.Context, bucket string, tags, deleteContext map[string]string) error {
	contents := tags[tagDeleteContents] == "true" || deleteContext[ParameterDeleteContents] == "true"
	versioned := tags[tagVersioning] == "true"
	if contents {
		if err := s.empty(ctx, bucket, versioned); err != nil {
			return err
		}
	}
	full, err := s.remove(ctx, bucket)
	switch {
	case err != nil:
		return err
	case full && contents && versioned:
		return rpc.Aborted(
			"bucket %q in store %q is not empty after its objects were deleted: revoke its accesses and retry, "+
				"or remove its directory %s, which a killed gateway left", bucket, s.name, LeftVersions)
	case full && contents:
		return rpc.Aborted(
			"bucket %q in store %q is not empty after its objects were deleted: revoke its accesses and retry, "+
				"or remove the directories that a killed gateway left in it", bucket, s.name)
	case full:
		return rpc.FailedPrecondition(
			"bucket %q in store %q is not empty: delete its objects (a class with %s does so for new buckets)",
			bucket, s.name, ParameterDeleteContents)
	}
	return nil
}

// deleteUsers deletes the users of the accesses of a deleted bucket: COSI's sidecar v0.2.2 may never revoke them. A
// user that is left by a failure has no rights.
func (d *Driver) deleteUsers(ctx context.Context, store *Store, bucketID string, rights *policy) error {
	for _, access := range []string{ReadOnly, ReadWrite} {
		for _, account := range rights.accounts[access] {
			if checkAccount(d.cluster, bucketID, account) != nil {
				continue // an operator added it
			}
			if err := store.admin.deleteUser(ctx, account); err != nil {
				return store.failed("delete user "+account, err)
			}
		}
	}
	return nil
}

// remove deletes a bucket, unless it is full. It succeeds if there is no such bucket.
func (s *Store) remove(ctx context.Context, bucket string) (full bool, err error) {
	input := &s3.DeleteBucketInput{Bucket: &bucket}
	_, err = s.s3.DeleteBucket(ctx, input)
	if hasCode(err, codeNotEmpty) {
		objects, listErr := s.listObjects(ctx, bucket)
		if listErr != nil {
			return false, s.failed("list the objects of bucket "+bucket, listErr)
		}
		if len(objects) == 0 {
			if err := s.removeFolders(ctx, bucket, ""); err != nil {
				return false, err
			}
			_, err = s.s3.DeleteBucket(ctx, input)
		}
	}
	switch {
	case err == nil, hasCode(err, codeNoSuchBucket):
		return false, nil
	case hasCode(err, codeNotEmpty):
		return true, nil
	}
	return false, s.failed("delete bucket "+bucket, err)
}

// removeFolders removes the empty folders below a prefix. A gateway that is killed while it writes or deletes an object
// leaves the folders of its key. To the gateway the bucket is then not empty, although it lists no object. The gateway
// removes a folder only if it is empty. The bucket must have no objects: the key of an object can end as a folder's
// name.
func (s *Store) removeFolders(ctx context.Context, bucket, prefix string) error {
	pages := s3.NewListObjectsV2Paginator(s.s3, &s3.ListObjectsV2Input{
		Bucket: &bucket, Prefix: &prefix, Delimiter: aws.String("/"),
	})
	for pages.HasMorePages() {
		page, err := pages.NextPage(ctx)
		if err != nil {
			return s.failed("list the directories of bucket "+bucket, err)
		}
		for _, folder := range page.CommonPrefixes {
			if err := s.removeFolders(ctx, bucket, aws.ToString(folder.Prefix)); err != nil {
				return err
			}
			_, err := s.s3.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: &bucket, Key: folder.Prefix})
			if err != nil && !hasCode(err, codeFolderNotEmpty) {
				return s.failed("remove a directory of bucket "+bucket, err)
			}
		}
	}
	return nil
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
		if err := s.notDeleted(bucket, deleted.Errors); err != nil {
			return err
		}
	}
}

// notDeleted returns the error for objects that the gateway did not delete. A lock is a refusal. Anything else can
// pass: a gateway that still carries out the request of a killed driver lists versions that it does not know any more.
func (s *Store) notDeleted(bucket string, objects []types.Error) error {
	if len(objects) == 0 {
		return nil
	}
	first := objects[0]
	words := aws.ToString(first.Code) + " (" + aws.ToString(first.Message) + ")"
	if aws.ToString(first.Code) == codeLocked {
		return rpc.FailedPrecondition("%d objects of bucket %q in store %q cannot be deleted: remove their locks: %s",
			len(objects), bucket, s.name, words)
	}
	return rpc.Unavailable("%d objects of bucket %q in store %q were not deleted: see the log of its gateway: %s",
		len(objects), bucket, s.name, words)
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

// listVersions returns the first versions and delete markers of a bucket, at most 1000. The latest ones of all objects
// are the last: the gateway replaces a deleted latest version by an older one,
// and hides the older one if it is killed then.
func (s *Store) listVersions(ctx context.Context, bucket string) ([]types.ObjectIdentifier, error) {
	page, err := s.s3.ListObjectVersions(ctx, &s3.ListObjectVersionsInput{Bucket: &bucket})
	if err != nil {
		return nil, err
	}
	var old, latest []types.ObjectIdentifier
	add := func(isLatest *bool, key, version *string) {
		list := &old
		if aws.ToBool(isLatest) {
			list = &latest
		}
		*list = append(*list, types.ObjectIdentifier{Key: key, VersionId: version})
	}
	for _, version := range page.Versions {
		add(version.IsLatest, version.Key, version.VersionId)
	}
	for _, marker := range page.DeleteMarkers {
		add(marker.IsLatest, marker.Key, marker.VersionId)
	}
	return append(old, latest...), nil
}
