// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Command client is a workload with a bucket, in a test. It reads the Secret of a BucketAccess as a file, and the
// certificate of the authority:
//
//	client wait            does nothing
//	client put KEY TEXT    writes an object
//	client get KEY         prints an object
//	client delete KEY      deletes an object
package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"
)

// Files of the pod.
const (
	infoFile      = "/bucket/BucketInfo"
	authorityFile = "/authority/ca.crt"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintf(os.Stderr, "client: %v\n", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) == 1 && args[0] == "wait" {
		for {
			time.Sleep(time.Hour)
		}
	}
	if len(args) < 2 || args[0] == "put" && len(args) < 3 {
		return errors.New("use put KEY TEXT, get KEY or delete KEY")
	}
	client, bucket, err := connect()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	switch key := aws.String(args[1]); args[0] {
	case "put":
		_, err = client.PutObject(ctx, &s3.PutObjectInput{Bucket: &bucket, Key: key, Body: strings.NewReader(args[2])})
	case "delete":
		_, err = client.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: &bucket, Key: key})
	case "get":
		var object *s3.GetObjectOutput
		if object, err = client.GetObject(ctx, &s3.GetObjectInput{Bucket: &bucket, Key: key}); err == nil {
			_, err = io.Copy(os.Stdout, object.Body)
		}
	default:
		err = fmt.Errorf("%q is no command", args[0])
	}
	return err
}

// connect returns a client for the bucket of the Secret.
func connect() (*s3.Client, string, error) {
	text, err := os.ReadFile(infoFile)
	if err != nil {
		return nil, "", err
	}
	var info struct {
		Spec struct {
			BucketName string
			SecretS3   struct{ Endpoint, Region, AccessKeyID, AccessSecretKey string }
		}
	}
	if err := json.Unmarshal(text, &info); err != nil {
		return nil, "", err
	}
	authority, err := os.ReadFile(authorityFile)
	if err != nil {
		return nil, "", err
	}
	authorities := x509.NewCertPool()
	if !authorities.AppendCertsFromPEM(authority) {
		return nil, "", errors.New("the authority's file has no certificate")
	}
	keys := info.Spec.SecretS3
	return s3.New(s3.Options{
		BaseEndpoint: &keys.Endpoint, Region: keys.Region, UsePathStyle: true, Retryer: aws.NopRetryer{},
		Credentials: credentials.NewStaticCredentialsProvider(keys.AccessKeyID, keys.AccessSecretKey, ""),
		HTTPClient:  &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: authorities}}},
	}), info.Spec.BucketName, nil
}
