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
// driver for each store: see [LockKey].
package buckets
