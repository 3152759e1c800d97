// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package buckets

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/aws/retry"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
)

// StoreOptions describe one store: a versitygw that serves S3 and its admin API at one address.
type StoreOptions struct {
	// Name is the name by which bucket classes choose the store.
	Name string
	// Endpoint is the URL at which the driver reaches the gateway.
	Endpoint string
	// WorkloadEndpoint is the URL that workloads get with their keys. If empty, it is Endpoint.
	WorkloadEndpoint string
	// Region is the gateway's region, by which S3 requests are signed.
	Region string
	// CA has PEM certificates of the authorities to trust; nil trusts those of the system.
	CA []byte
	// AccessKey and SecretKey are the gateway's root keys.
	AccessKey, SecretKey string
}

const (
	// attempts is how often a request is sent at most. For longer trouble the CO repeats the RPC.
	attempts = 3
	// longestBackoff is the longest wait between two attempts.
	longestBackoff = 500 * time.Millisecond
	// requestTimeout bounds one attempt, with the wait for one of maxRequests.
	requestTimeout = 20 * time.Second
	// maxRequests is how many requests a store gets at once. COSI's sidecar v0.2.2 has 40 workers.
	maxRequests = 16
)

// Store is the client of one store. Its methods are safe for concurrent use.
type Store struct {
	name, workloadEndpoint, region string

	s3    *s3.Client
	admin *admin
}

// newStore returns a client. It does not connect.
func newStore(opts StoreOptions) (*Store, error) {
	if !storeName.MatchString(opts.Name) {
		return nil, fmt.Errorf("store %q: use a name of at most 32 lower-case letters, digits and hyphens", opts.Name)
	}
	for _, endpoint := range []string{opts.Endpoint, opts.WorkloadEndpoint} {
		if parsed, err := url.Parse(endpoint); endpoint != "" &&
			(err != nil || parsed.Host == "" || parsed.User != nil || parsed.Path != "" || strings.ContainsAny(endpoint, "?#") ||
				parsed.Scheme != "http" && parsed.Scheme != "https") {
			return nil, fmt.Errorf("store %q: an endpoint is no URL of the form https://HOST:PORT", opts.Name)
		}
	}
	if opts.Endpoint == "" || opts.Region == "" || opts.AccessKey == "" || opts.SecretKey == "" {
		return nil, fmt.Errorf("store %q: endpoint, region and both root keys are needed", opts.Name)
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.MaxConnsPerHost, transport.MaxIdleConnsPerHost = maxRequests, maxRequests
	if opts.CA != nil {
		authorities := x509.NewCertPool()
		if !authorities.AppendCertsFromPEM(opts.CA) {
			return nil, fmt.Errorf("store %q: the CA file has no PEM certificate", opts.Name)
		}
		transport.TLSClientConfig = &tls.Config{RootCAs: authorities, MinVersion: tls.VersionTLS12}
	}
	client := &http.Client{Transport: transport, Timeout: requestTimeout}
	keys := credentials.NewStaticCredentialsProvider(opts.AccessKey, opts.SecretKey, "")
	store := &Store{name: opts.Name, workloadEndpoint: opts.WorkloadEndpoint, region: opts.Region}
	if store.workloadEndpoint == "" {
		store.workloadEndpoint = opts.Endpoint
	}
	store.s3 = s3.New(s3.Options{
		BaseEndpoint: aws.String(opts.Endpoint),
		Region:       opts.Region,
		Credentials:  keys,
		HTTPClient:   client,
		UsePathStyle: true, // a gateway has no host name for each bucket
		Retryer: retry.NewStandard(func(o *retry.StandardOptions) {
			o.MaxAttempts, o.MaxBackoff = attempts, longestBackoff
		}),
	})
	store.admin = newAdmin(opts.Endpoint, opts.Region, keys, client)
	return store, nil
}

// lookUp returns the tags of a bucket, and false if there is no such bucket.
func (s *Store) lookUp(ctx context.Context, bucket string) (tags map[string]string, exists bool, err error) {
	answer, err := s.s3.GetBucketTagging(ctx, &s3.GetBucketTaggingInput{Bucket: &bucket})
	switch {
	case hasCode(err, codeNoSuchBucket):
		return nil, false, nil
	case hasCode(err, codeNoTags):
		return nil, true, nil
	case err != nil:
		return nil, false, s.failed("look up bucket "+bucket, err)
	}
	tags = map[string]string{}
	for _, tag := range answer.TagSet {
		tags[aws.ToString(tag.Key)] = aws.ToString(tag.Value)
	}
	return tags, true, nil
}

// create makes a bucket with its tags in one call, so that no bucket of the driver is without them.
func (s *Store) create(ctx context.Context, bucket string, tags map[string]string, objectLock bool) error {
	input := &s3.CreateBucketInput{
		Bucket:                     &bucket,
		ObjectLockEnabledForBucket: &objectLock,
		CreateBucketConfiguration:  &types.CreateBucketConfiguration{},
	}
	for key, value := range tags {
		input.CreateBucketConfiguration.Tags = append(input.CreateBucketConfiguration.Tags,
			types.Tag{Key: &key, Value: &value})
	}
	_, err := s.s3.CreateBucket(ctx, input)
	// An earlier attempt without an answer, or another client, made the bucket. The caller looks at its tags.
	if err == nil || hasCode(err, codeAlreadyOwned, codeAlreadyExists) {
		return nil
	}
	return s.failed("create bucket "+bucket, err)
}

// hasObjectLock reports whether objects of a bucket can be locked.
func (s *Store) hasObjectLock(ctx context.Context, bucket string) (bool, error) {
	answer, err := s.s3.GetObjectLockConfiguration(ctx, &s3.GetObjectLockConfigurationInput{Bucket: &bucket})
	switch {
	case hasCode(err, codeNoObjectLock):
		return false, nil
	case err != nil:
		return false, s.failed("read the object lock of bucket "+bucket, err)
	}
	return answer.ObjectLockConfiguration != nil &&
		answer.ObjectLockConfiguration.ObjectLockEnabled == types.ObjectLockEnabledEnabled, nil
}

// enableVersioning returns the store's own error: the caller tells a refusal from no answer.
func (s *Store) enableVersioning(ctx context.Context, bucket string) error {
	_, err := s.s3.PutBucketVersioning(ctx, &s3.PutBucketVersioningInput{
		Bucket:                  &bucket,
		VersioningConfiguration: &types.VersioningConfiguration{Status: types.BucketVersioningStatusEnabled},
	})
	return err
}
