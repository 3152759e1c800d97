// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package buckets

import (
	"context"

	cosi "sigs.k8s.io/container-object-storage-interface/proto"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// DriverCreateBucket makes a bucket. A repetition with the same parameters returns the same bucket, one with others
// ALREADY_EXISTS. A bucket of this name that the driver did not make is ALREADY_EXISTS, too.
func (d *Driver) DriverCreateBucket(
	ctx context.Context,
	req *cosi.DriverCreateBucketRequest,
) (*cosi.DriverCreateBucketResponse, error) {
	if err := checkBucketName("name", req.GetName()); err != nil {
		return nil, err
	}
	name, want, err := parseBucket(req.GetParameters())
	if err != nil {
		return nil, err
	}
	store, err := d.store(name)
	if err != nil {
		return nil, err
	}
	if err := d.rejectElsewhere(ctx, req.GetName(), store); err != nil {
		return nil, err
	}
	if err := d.ensure(ctx, store, req.GetName(), want); err != nil {
		return nil, err
	}
	return &cosi.DriverCreateBucketResponse{
		BucketId:   bucketID(store.name, req.GetName()),
		BucketInfo: store.protocol(),
	}, nil
}

// rejectElsewhere returns ALREADY_EXISTS if this cluster has a bucket of the name in another store. A store that does
// not answer is left out: a bucket's class does not change, and one store must not stop the others.
func (d *Driver) rejectElsewhere(ctx context.Context, bucket string, chosen *Store) error {
	for _, other := range d.stores {
		if other == chosen {
			continue
		}
		tags, exists, err := other.lookUp(ctx, bucket)
		if err != nil {
			d.log.Warn(
				"a store was not asked for a bucket of the same name",
				"store",
				other.name,
				"bucket",
				bucket,
				"error",
				err,
			)
		}
		if exists && tags[tagCluster] == d.cluster {
			return rpc.AlreadyExists("bucket %q exists in store %q: use that store or another name", bucket, other.name)
		}
	}
	return nil
}

// ensure makes a bucket, or completes one that an earlier call left half made.
func (d *Driver) ensure(ctx context.Context, store *Store, bucket string, want properties) error {
	tags, exists, err := store.lookUp(ctx, bucket)
	if err != nil {
		return err
	}
	made := !exists
	if made {
		if err := store.create(ctx, bucket, want.tags(d.cluster), want.objectLock); err != nil {
			return err
		}
		if tags, exists, err = store.lookUp(ctx, bucket); err != nil {
			return err
		}
		if !exists {
			return rpc.Aborted("bucket %q was deleted while it was made: retry", bucket)
		}
	}
	if tags[tagCluster] != d.cluster {
		return rpc.AlreadyExists(
			"bucket %q exists in store %q, and this cluster did not make it: use another name, or a static bucket",
			bucket,
			store.name,
		)
	}
	for key, value := range want.tags(d.cluster) {
		if tags[key] != value {
			return rpc.AlreadyExists("bucket %q exists with other parameters: %s is %q, not %q", bucket, key, tags[key], value)
		}
	}
	return d.settle(ctx, store, bucket, want, made)
}

// settle gives a bucket the properties that its tags promise. If the store cannot, a bucket that this call made is
// removed again, because the CO does not know it.
func (d *Driver) settle(ctx context.Context, store *Store, bucket string, want properties, made bool) error {
	if want.objectLock {
		locks, err := store.hasObjectLock(ctx, bucket)
		if err != nil {
			return err
		}
		if !locks { // the gateway was killed while it made the bucket
			return rpc.FailedPrecondition(
				"bucket %q lacks the object lock that its tags promise: delete it in store %q and retry", bucket, store.name)
		}
	}
	if !want.versioning {
		return nil
	}
	err := store.enableVersioning(ctx, bucket)
	if err == nil {
		return nil
	}
	if outcomeUnknown(err) {
		return store.failed("enable versioning of bucket "+bucket, err)
	}
	refused := rpc.FailedPrecondition("store %q keeps no versions: start its gateway with --versioning-dir", store.name)
	if made {
		if err := store.remove(ctx, bucket); err != nil {
			d.log.Warn(
				"a bucket that could not be completed was not removed",
				"store",
				store.name,
				"bucket",
				bucket,
				"error",
				err,
			)
		}
	}
	return refused
}
