// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package buckets

import (
	"crypto/sha256"
	"encoding/base32"
	"fmt"
	"regexp"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// driverName is the name under which COSI knows this driver. It is permanent: classes and buckets name it.
const driverName = "cosi.oxide.computer"

// The rules of S3 for bucket names, as far as a CO can break them.
var (
	bucketName = regexp.MustCompile(`^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$`)
	ipv4       = regexp.MustCompile(`^[0-9]+\.[0-9]+\.[0-9]+\.[0-9]+$`)
	storeName  = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$`)
	accountID  = regexp.MustCompile(`^OX[A-Z2-7]{20}$`)
	// clusterID is the plugin's rule, too.
	clusterID = regexp.MustCompile(`^[a-z0-9-]{1,63}$`)
)

// checkBucketName rejects a name that is not valid for a bucket. The name is used as it is: COSI's sidecar hands the
// name of the Bucket object to workloads as the name of the bucket. COSI's controller v0.2.2 names it bucket-UID. Older
// ones begin it with the class's name instead of "bucket-"; a UID has 36 characters.
func checkBucketName(field, name string) error {
	if err := rpc.CheckRequired(field, name); err != nil {
		return err
	}
	if len(name) > 63 {
		return rpc.InvalidArgument(
			"%s has %d characters, and S3 allows 63: give the bucket class a name of at most 27 characters",
			field,
			len(name),
		)
	}
	if !bucketName.MatchString(name) || ipv4.MatchString(name) || strings.Contains(name, "..") ||
		strings.HasPrefix(name, "xn--") || strings.HasSuffix(name, "-s3alias") {
		return rpc.InvalidArgument(
			"%s %q is no S3 bucket name: use 3 to 63 lower-case letters, digits, dots and hyphens, with a letter or digit at both ends",
			field,
			name,
		)
	}
	return nil
}

// bucketID names a bucket for the CO. It is permanent: COs record it.
func bucketID(store, bucket string) string { return store + "/" + bucket }

// splitBucketID is the inverse of [bucketID].
func splitBucketID(id string) (store, bucket string, err error) {
	if err := rpc.FirstError(
		rpc.CheckRequired("bucket_id", id),
		rpc.CheckLength("bucket_id", id, rpc.MaxStringBytes),
	); err != nil {
		return "", "", err
	}
	store, bucket, found := strings.Cut(id, "/")
	if !found || store == "" {
		return "", "", rpc.InvalidArgument("bucket_id %q names no store: use STORE/BUCKET", id)
	}
	return store, bucket, checkBucketName("bucket_id", bucket)
}

// accountOf computes the access key of an access: OX, 8 characters for cluster and bucket, 12 for the name. It is
// permanent: COs record it as the account ID.
func accountOf(cluster, bucketID, name string) string {
	return accountPrefix(cluster, bucketID) + hashText(12, cluster, bucketID, name)
}

func accountPrefix(cluster, bucketID string) string { return "OX" + hashText(8, cluster, bucketID) }

// hashText returns the first characters of a hash in base 32.
func hashText(length int, parts ...string) string {
	hash := sha256.New()
	for _, part := range parts {
		fmt.Fprintf(hash, "%d:%s", len(part), part) // with lengths, so that different parts are different texts
	}
	return base32.StdEncoding.EncodeToString(hash.Sum(nil))[:length]
}

// checkAccount rejects an account that this driver did not grant on this bucket. Otherwise a wrong request could delete
// a user of another bucket, or one that the operator made.
func checkAccount(cluster, bucketID, account string) error {
	if err := rpc.CheckRequired("account_id", account); err != nil {
		return err
	}
	if !accountID.MatchString(account) || !strings.HasPrefix(account, accountPrefix(cluster, bucketID)) {
		return rpc.InvalidArgument("account_id %q is no account that this driver granted on bucket %q: check both IDs",
			account, bucketID)
	}
	return nil
}
