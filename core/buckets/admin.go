// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package buckets

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/xml"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	v4 "github.com/aws/aws-sdk-go-v2/aws/signer/v4"
	"github.com/aws/smithy-go"
	"github.com/hashicorp/go-retryablehttp"
)

// admin is the client of versitygw's admin API: a PATCH for each action, signed as S3 requests are, with XML bodies.
// Source: github.com/versity/versitygw v1.8.0, s3api/controllers/admin.go and auth/iam.go.
type admin struct {
	endpoint, region string
	keys             aws.CredentialsProvider
	signer           *v4.Signer
	client           *retryablehttp.Client
}

func newAdmin(endpoint, region string, keys aws.CredentialsProvider, client *http.Client) *admin {
	retrying := retryablehttp.NewClient()
	retrying.HTTPClient = client
	retrying.RetryMax = attempts - 1
	retrying.RetryWaitMin, retrying.RetryWaitMax = 100*time.Millisecond, longestBackoff
	retrying.Logger = nil // the RPC's error says it once
	// The last answer has the reason.
	retrying.ErrorHandler = retryablehttp.PassthroughErrorHandler
	return &admin{endpoint, region, keys, v4.NewSigner(), retrying}
}

// roleUser is the role of users who have only the rights that policies give them. They cannot make buckets.
const roleUser = "user"

// user is a user of a gateway.
type user struct {
	XMLName xml.Name `xml:"Account"`
	Access  string   `xml:"Access"`
	Secret  string   `xml:"Secret"`
	Role    string   `xml:"Role"`
}

// String keeps the secret out of logs.
func (u user) String() string { return u.Access }

// users returns all users of the gateway by access key, without root.
func (a *admin) users(ctx context.Context) (map[string]user, error) {
	body, err := a.do(ctx, "/list-users", nil, nil)
	if err != nil {
		return nil, err
	}
	var answer struct {
		Accounts []struct {
			Access, Secret, Role string
		} `xml:"Accounts"`
	}
	if err := xml.Unmarshal(body, &answer); err != nil {
		// The body has secrets, and an error of package xml may quote it.
		return nil, &answerError{status: http.StatusInternalServerError, GenericAPIError: smithy.GenericAPIError{
			Code: "InvalidAnswer", Message: "the list of users is no XML of the known form",
		}}
	}
	users := map[string]user{}
	for _, account := range answer.Accounts {
		users[account.Access] = user{Access: account.Access, Secret: account.Secret, Role: account.Role}
	}
	return users, nil
}

func (a *admin) createUser(ctx context.Context, created user) error {
	body, err := xml.Marshal(created)
	if err != nil {
		return err
	}
	_, err = a.do(ctx, "/create-user", nil, body)
	return err
}

// deleteUser succeeds also if there is no such user.
func (a *admin) deleteUser(ctx context.Context, access string) error {
	_, err := a.do(ctx, "/delete-user", url.Values{"access": {access}}, nil)
	return err
}

// maxAnswerBytes bounds the answer of the admin API: some 100,000 users.
const maxAnswerBytes = 32 << 20

// do sends one request and returns the body of the answer. A refusal is an error of type [answerError].
func (a *admin) do(ctx context.Context, path string, query url.Values, body []byte) ([]byte, error) {
	target := a.endpoint + path
	if len(query) > 0 {
		target += "?" + query.Encode()
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPatch, target, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	hash := sha256.Sum256(body)
	payload := hex.EncodeToString(hash[:])
	req.Header.Set("X-Amz-Content-Sha256", payload)
	keys, err := a.keys.Retrieve(ctx)
	if err != nil {
		return nil, err
	}
	if err := a.signer.SignHTTP(ctx, keys, req, payload, "s3", a.region, time.Now()); err != nil {
		return nil, fmt.Errorf("sign the request: %w", err)
	}
	retried, err := retryablehttp.FromRequest(req)
	if err != nil {
		return nil, err
	}
	resp, err := a.client.Do(retried)
	if err != nil {
		return nil, err
	}
	answer, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswerBytes))
	if closeErr := resp.Body.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		return nil, err
	}
	if resp.StatusCode >= 300 {
		return nil, refusal(resp.StatusCode, answer)
	}
	return answer, nil
}

// refusal reads the error of the admin API.
func refusal(status int, body []byte) error {
	var answer struct {
		Code, Message string
	}
	if err := xml.Unmarshal(body, &answer); err != nil || answer.Code == "" {
		answer.Code, answer.Message = fmt.Sprintf("HTTP%d", status), http.StatusText(status)
	}
	return &answerError{smithy.GenericAPIError{Code: answer.Code, Message: answer.Message}, status}
}
