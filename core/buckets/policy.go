// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package buckets

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// The statements of the driver in the policy of a bucket. Each lists the users of one kind of access: an extended
// attribute holds the policy, and one statement for each user would fill it with few users. The IDs are permanent.
const (
	statementRead  = "OxideCosiReadOnly"
	statementWrite = "OxideCosiReadWrite"
)

// maxPolicyBytes is the size that S3 allows. Some 750 accesses of a bucket fit.
const maxPolicyBytes = 20 << 10

// Actions of the accesses. They include no action on the policy, the tags or the settings of the bucket.
var (
	readActions = []string{
		"s3:GetBucketLocation", "s3:GetBucketVersioning", "s3:GetBucketObjectLockConfiguration",
		"s3:ListBucket", "s3:ListBucketVersions",
		"s3:GetObject", "s3:GetObjectVersion", "s3:GetObjectAttributes", "s3:GetObjectVersionAttributes",
		"s3:GetObjectTagging", "s3:GetObjectVersionTagging", "s3:GetObjectRetention", "s3:GetObjectLegalHold",
	}
	writeActions = slices.Concat(readActions, []string{
		"s3:ListBucketMultipartUploads", "s3:ListMultipartUploadParts", "s3:AbortMultipartUpload",
		"s3:PutObject", "s3:DeleteObject", "s3:DeleteObjectVersion",
		"s3:PutObjectTagging", "s3:DeleteObjectTagging", "s3:PutObjectVersionTagging", "s3:DeleteObjectVersionTagging",
		"s3:PutObjectRetention", "s3:PutObjectLegalHold",
	})
)

// policy is the policy of a bucket. Statements that are not the driver's are kept as they are.
type policy struct {
	version string
	foreign []json.RawMessage
	// accounts are the access keys by access, [ReadOnly] or [ReadWrite].
	accounts map[string][]string
}

type statement struct {
	SID       string    `json:"Sid"`
	Effect    string    `json:"Effect"`
	Principal principal `json:"Principal"`
	Action    []string  `json:"Action"`
	Resource  []string  `json:"Resource"`
}

type principal struct {
	AWS keyList `json:"AWS"`
}

// keyList is a list of access keys. A list of one may be a plain string.
type keyList []string

func (l *keyList) UnmarshalJSON(data []byte) error {
	if bytes.HasPrefix(data, []byte(`"`)) {
		*l = make(keyList, 1)
		return json.Unmarshal(data, &(*l)[0])
	}
	return json.Unmarshal(data, (*[]string)(l))
}

func parsePolicy(text string) (*policy, error) {
	parsed := &policy{version: "2012-10-17", accounts: map[string][]string{}}
	if text == "" {
		return parsed, nil
	}
	var document struct {
		Version   string
		Statement []json.RawMessage
	}
	if err := json.Unmarshal([]byte(text), &document); err != nil {
		return nil, err
	}
	if document.Version != "" {
		parsed.version = document.Version
	}
	for _, raw := range document.Statement {
		var id struct{ Sid string }
		if err := json.Unmarshal(raw, &id); err != nil {
			return nil, err
		}
		access := map[string]string{statementRead: ReadOnly, statementWrite: ReadWrite}[id.Sid]
		if access == "" {
			parsed.foreign = append(parsed.foreign, raw)
			continue
		}
		var own statement
		if err := json.Unmarshal(raw, &own); err != nil {
			return nil, fmt.Errorf("statement %s: %w", id.Sid, err)
		}
		parsed.accounts[access] = append(parsed.accounts[access], own.Principal.AWS...)
	}
	return parsed, nil
}

// text returns the policy for a bucket. It is empty if there is no statement.
func (p *policy) text(bucket string) (string, error) {
	statements := slices.Clone(p.foreign)
	for _, kind := range []struct {
		sid, access string
		actions     []string
	}{{statementRead, ReadOnly, readActions}, {statementWrite, ReadWrite, writeActions}} {
		if len(p.accounts[kind.access]) == 0 {
			continue
		}
		raw, err := json.Marshal(statement{
			SID: kind.sid, Effect: "Allow", Principal: principal{p.accounts[kind.access]}, Action: kind.actions,
			Resource: []string{"arn:aws:s3:::" + bucket, "arn:aws:s3:::" + bucket + "/*"},
		})
		if err != nil {
			return "", err
		}
		statements = append(statements, raw)
	}
	if len(statements) == 0 {
		return "", nil
	}
	text, err := json.Marshal(struct {
		Version   string
		Statement []json.RawMessage
	}{p.version, statements})
	return string(text), err
}

// access returns what an account may do: [ReadOnly], [ReadWrite], or nothing.
func (p *policy) access(account string) string {
	for _, access := range []string{ReadOnly, ReadWrite} {
		if slices.Contains(p.accounts[access], account) {
			return access
		}
	}
	return ""
}

// keep removes the accounts for which keep returns false, and reports whether there were any.
func (p *policy) keep(keep func(account string) bool) (changed bool) {
	for access, accounts := range p.accounts {
		left := slices.DeleteFunc(slices.Clone(accounts), func(account string) bool { return !keep(account) })
		changed = changed || len(left) < len(accounts)
		p.accounts[access] = left
	}
	return changed
}

// errPolicyForm means that a policy was edited by hand into a form that the driver does not know.
var errPolicyForm = errors.New("unknown form")

// readPolicy returns the policy of a bucket, and false if there is no such bucket. It returns [errPolicyForm] if it
// cannot parse the policy.
func (s *Store) readPolicy(ctx context.Context, bucket string) (*policy, bool, error) {
	answer, err := s.s3.GetBucketPolicy(ctx, &s3.GetBucketPolicyInput{Bucket: &bucket})
	switch {
	case hasCode(err, codeNoSuchBucket):
		return nil, false, nil
	case hasCode(err, codeNoPolicy):
		answer = &s3.GetBucketPolicyOutput{}
	case err != nil:
		return nil, false, s.failed("read the policy of bucket "+bucket, err)
	}
	parsed, err := parsePolicy(aws.ToString(answer.Policy))
	if err != nil {
		return nil, false, rpc.FailedPrecondition(
			"the policy of bucket %q in store %q has an %w: %w: correct or remove it manually",
			bucket, s.name, errPolicyForm, err)
	}
	return parsed, true, nil
}

func (s *Store) writePolicy(ctx context.Context, bucket string, changed *policy) error {
	text, err := changed.text(bucket)
	if err != nil {
		return err
	}
	if len(text) > maxPolicyBytes {
		return rpc.ResourceExhausted(
			"the policy of bucket %q has no room for another access in its %d bytes: revoke one first",
			bucket,
			maxPolicyBytes,
		)
	}
	if text == "" {
		_, err = s.s3.DeleteBucketPolicy(ctx, &s3.DeleteBucketPolicyInput{Bucket: &bucket})
	} else {
		_, err = s.s3.PutBucketPolicy(ctx, &s3.PutBucketPolicyInput{Bucket: &bucket, Policy: &text})
	}
	if err != nil {
		return s.failed("write the policy of bucket "+bucket, err)
	}
	return nil
}
