// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package buckets is the logic of the COSI driver: it makes buckets and accesses on S3 gateways, the stores.
//
// A store is one versitygw, an S3 server whose data is on a volume. The driver uses two of its interfaces: S3 for
// buckets and their policies, and the admin API for users.
//
// # What is where
//
// The driver keeps no state. What it made is in the store:
//
//   - A bucket that the driver made has tags: the ID of the cluster, and the parameters of its class. They are written
//     in the call that makes the bucket.
//   - An access is a user of the store. Its name, which is the access key, is computed from the cluster, the bucket and
//     the name of the access. So a repeated grant finds the same user.
//   - The rights of all users on a bucket are in the policy of the bucket: one statement for those who read, one for
//     those who also write.
//
// A bucket ID is store/bucket. An access has the access key as its account ID.
//
// # Order of changes
//
// A grant makes the user first and then adds it to the policy. A revocation removes the user from the policy first and
// then deletes it. A gateway refuses a policy that names an unknown user, and a user without a statement has no rights.
// After a crash in between, the repeated call completes the change.
//
// A policy is read, changed and written back. The caller must run one operation at a time for each bucket, and one
// driver for each store: see [LockKey]. An operation that its caller gave up must end before the next one begins,
// because the store may carry out its last request late. For the same reason a driver waits a moment after another one
// was killed. This leaves one gap: a store that hangs for longer may carry out an old policy after a new one.
//
// # What COSI's sidecar sends
//
// Read in the source of COSI v0.2.2, which has not been run against this driver:
//
//   - It calls DriverGetInfo at its start, over a unix socket, without deadlines and keepalive: the driver bounds each
//     call itself. Up to 40 workers call at once.
//   - Create has the name of the Bucket object, bucket-UID, and the class's parameters. The sidecar reads only the
//     bucket ID of the answer. For ALREADY_EXISTS it finds no answer, makes no event, and asks again.
//   - Delete has the bucket ID, and the same parameters as delete context. NOT_FOUND counts as success; the driver
//     never answers it there.
//   - Grant has the name ba-UID, the type Key and the class's parameters. The sidecar reads one entry "s3" with
//     endpoint, region, accessKeyID and accessSecretKey.
//   - Revoke has the bucket ID and the account ID. After a deleted claim it may never come, so the deletion of a bucket
//     also deletes the users of its accesses. For an access that was deleted before it had a status, the account ID is
//     empty, and the answer INVALID_ARGUMENT lets the access hang: delete its finalizer.
package buckets
