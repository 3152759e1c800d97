// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package buckets

import (
	"context"
	"crypto/rand"
	"encoding/base64"

	cosi "sigs.k8s.io/container-object-storage-interface/proto"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// Keys of the credentials. COSI's sidecar reads them, and writes them to the Secret of the workload.
// Source: container-object-storage-interface v0.2.2, sidecar/pkg/bucketaccess/bucketaccess_controller.go.
const (
	credentialsS3      = "s3"
	secretEndpoint     = "endpoint"
	secretRegion       = "region"
	secretAccessKeyID  = "accessKeyID"
	secretAccessSecret = "accessSecretKey"
)

// DriverGrantBucketAccess makes a user with rights on one bucket alone. A repetition returns the same account and keys,
// one with another kind of access FAILED_PRECONDITION. The bucket may be one that the driver did not make.
func (d *Driver) DriverGrantBucketAccess(
	ctx context.Context,
	req *cosi.DriverGrantBucketAccessRequest,
) (*cosi.DriverGrantBucketAccessResponse, error) {
	name, bucket, err := splitBucketID(req.GetBucketId())
	if err != nil {
		return nil, err
	}
	access, err := checkGrant(req)
	if err != nil {
		return nil, err
	}
	store, err := d.store(name)
	if err != nil {
		return nil, err
	}
	account := accountOf(d.cluster, req.GetBucketId(), req.GetName())
	granted, err := store.grant(ctx, bucket, account, access)
	if err != nil {
		return nil, err
	}
	return &cosi.DriverGrantBucketAccessResponse{
		AccountId: account,
		Credentials: map[string]*cosi.CredentialDetails{credentialsS3: {Secrets: map[string]string{
			secretEndpoint:     store.workloadEndpoint,
			secretRegion:       store.region,
			secretAccessKeyID:  granted.Access,
			secretAccessSecret: granted.Secret,
		}}},
	}, nil
}

func checkGrant(req *cosi.DriverGrantBucketAccessRequest) (access string, err error) {
	if err := rpc.FirstError(
		rpc.CheckRequired("name", req.GetName()), rpc.CheckLength("name", req.GetName(), rpc.MaxStringBytes),
	); err != nil {
		return "", err
	}
	switch req.GetAuthenticationType() {
	case cosi.AuthenticationType_Key:
	case cosi.AuthenticationType_UnknownAuthenticationType:
		return "", rpc.InvalidArgument("authentication_type is missing: use Key")
	default:
		return "", rpc.InvalidArgument("authentication_type %s is not supported: use Key", req.GetAuthenticationType())
	}
	return parseAccess(req.GetParameters())
}

// grant makes the user if it is missing, and then gives it the rights.
func (s *Store) grant(ctx context.Context, bucket, account, access string) (user, error) {
	rights, exists, err := s.readPolicy(ctx, bucket)
	if err != nil {
		return user{}, err
	}
	if !exists {
		return user{}, rpc.NotFound("bucket %q does not exist in store %q: create it first", bucket, s.name)
	}
	users, err := s.admin.users(ctx)
	if err != nil {
		return user{}, s.failed("list users", err)
	}
	isUser := func(account string) bool { _, is := users[account]; return is }
	granted, made := users[account]
	if now := rights.access(account); made && now != "" && now != access {
		// COSI's sidecar v0.2.2 takes ALREADY_EXISTS for success, reads the keys of the missing answer, and crashes.
		return user{}, rpc.FailedPrecondition(
			"account %s has %s access to bucket %q, not %s: revoke it first",
			account,
			now,
			bucket,
			access,
		)
	}
	if !made {
		if granted, err = s.createUser(ctx, account); err != nil {
			return user{}, err
		}
	}
	if granted.Role != roleUser {
		return user{}, rpc.FailedPrecondition(
			"user %s of store %q has the role %q: delete it manually",
			account,
			s.name,
			granted.Role,
		)
	}
	// The gateway refuses a policy that names a user whom an operator deleted.
	changed := rights.keep(isUser)
	if rights.access(account) == "" {
		rights.accounts[access] = append(rights.accounts[access], account)
		changed = true
	}
	if changed {
		return granted, s.writePolicy(ctx, bucket, rights)
	}
	return granted, nil
}

// createUser makes a user with new random keys.
func (s *Store) createUser(ctx context.Context, account string) (user, error) {
	random := make([]byte, 30)
	if _, err := rand.Read(random); err != nil {
		return user{}, err
	}
	created := user{Access: account, Secret: base64.RawURLEncoding.EncodeToString(random), Role: roleUser}
	err := s.admin.createUser(ctx, created)
	if err == nil {
		return created, nil
	}
	if !hasCode(err, codeUserExists) {
		return user{}, s.failed("create user "+account, err)
	}
	// The answer of an earlier attempt was lost.
	users, err := s.admin.users(ctx)
	if err != nil {
		return user{}, s.failed("list users", err)
	}
	found, exists := users[account]
	if !exists {
		return user{}, rpc.Aborted("user %s was deleted while it was made: retry", account)
	}
	return found, nil
}

// DriverRevokeBucketAccess deletes the user of an access. When it succeeds, the keys are refused. It succeeds if there
// is no such user, also without the bucket.
func (d *Driver) DriverRevokeBucketAccess(
	ctx context.Context,
	req *cosi.DriverRevokeBucketAccessRequest,
) (*cosi.DriverRevokeBucketAccessResponse, error) {
	name, bucket, err := splitBucketID(req.GetBucketId())
	if err != nil {
		return nil, err
	}
	if err := rpc.FirstError(
		checkAccount(d.cluster, req.GetBucketId(), req.GetAccountId()),
		rpc.CheckMap("revoke_access_context", req.GetRevokeAccessContext()),
	); err != nil {
		return nil, err
	}
	store, err := d.store(name)
	if err != nil {
		return nil, err
	}
	if err := store.revoke(ctx, bucket, req.GetAccountId()); err != nil {
		return nil, err
	}
	return &cosi.DriverRevokeBucketAccessResponse{}, nil
}

// revoke takes the rights from the user first: the gateway refuses a policy that names an unknown user.
func (s *Store) revoke(ctx context.Context, bucket, account string) error {
	rights, exists, err := s.readPolicy(ctx, bucket)
	if err != nil {
		return err
	}
	users, err := s.admin.users(ctx)
	if err != nil {
		return s.failed("list users", err)
	}
	stays := func(other string) bool { _, is := users[other]; return is && other != account }
	if exists && rights.keep(stays) {
		if err := s.writePolicy(ctx, bucket, rights); err != nil {
			return err
		}
	}
	if _, is := users[account]; !is {
		return nil
	}
	if err := s.admin.deleteUser(ctx, account); err != nil {
		return s.failed("delete user "+account, err)
	}
	if users, err = s.admin.users(ctx); err != nil {
		return s.failed("list users", err)
	}
	if _, is := users[account]; is {
		return rpc.Unavailable("store %q still has the user %s after its deletion: retry", s.name, account)
	}
	return nil
}
