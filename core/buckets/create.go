// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package buckets

import (
	"context"
	"net/http"
	"time"

	"golang.org/x/sync/errgroup"
	cosi "sigs.k8s.io/container-object-storage-interface/proto"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// DriverCreateBucket makes a bucket. A repeated call with the same parameters returns the same bucket. With other
// parameters, or if the driver did not make the bucket of this name, it returns ALREADY_EXISTS.
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

// otherStoresTimeout is how long the stores that were not chosen may take to answer, together.
const otherStoresTimeout = 5 * time.Second

// rejectElsewhere returns ALREADY_EXISTS if this cluster has a bucket of the name in another store. A store that does
// not answer in time is left out: a store that is down must not stop the others, and a repeated call names the same
// store, because a bucket's class does not change.
func (d *Driver) rejectElsewhere(ctx context.Context, bucket string, chosen *Store) error {
	ctx, cancel := context.WithTimeout(ctx, otherStoresTimeout)
	defer cancel()
	var asked errgroup.Group
	for _, other := range d.stores {
		if other == chosen {
			continue
		}
		asked.Go(func() error {
			tags, exists, err := other.lookUp(ctx, bucket)
			if err != nil {
				d.log.Warn("another store could not say whether it has a bucket of this name",
					"store", other.name, "bucket", bucket, "error", err)
			}
			if exists && tags[tagCluster] == d.cluster {
				return rpc.AlreadyExists(
					"bucket %q exists in store %q: name that store in the BucketClass, or make another claim",
					bucket,
					other.name,
				)
			}
			return nil
		})
	}
	return asked.Wait()
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
			"bucket %q exists in store %q, and this cluster did not make it: make another claim, or use it as a static bucket",
			bucket,
			store.name,
		)
	}
	for key, value := range want.tags(d.cluster) {
		if tags[key] != value {
			return rpc.AlreadyExists("bucket %q exists with %s %q, not %q: set its BucketClass back, or make another claim",
				bucket, key, tags[key], value)
		}
	}
	return d.settle(ctx, store, bucket, want, made)
}

// settle gives a bucket the properties that its tags promise. If the store refuses versions, it deletes a bucket that
// this call made: the CO does not know it.
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
	if status := statusOf(
		err,
	); outcomeUnknown(err) || status == http.StatusUnauthorized ||
		status == http.StatusForbidden {
		return store.failed("enable versioning of bucket "+bucket, err)
	}
	refused := rpc.FailedPrecondition(
		"bucket %q: its class asks for versions, and store %q keeps none: start its gateway with --versioning-dir",
		bucket, store.name)
	if made {
		if _, err := store.remove(ctx, bucket); err != nil {
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
