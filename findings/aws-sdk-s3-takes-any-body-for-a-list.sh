#!/usr/bin/env bash
# The S3 client of the AWS SDK for Go takes any page with status 200 for an empty list.
#
# Version: github.com/aws/aws-sdk-go-v2/service/s3 v1.114.10
# Guess:   a body that is not the XML document that S3 sends is a deserialization error, as a body that is cut off is.
# Seen:    ListBuckets and ListObjectsV2 return empty lists and no error for an HTML page, for JSON, for plain text and
#          for nothing. The name of the root element does not count: a list in an element "page" is read. Only XML that
#          is cut off is an error.
# Why:     the login page of a proxy, or a wrong port, looks like a store without buckets. "The list is empty" is what a
#          program checks before it deletes a bucket, or after it deleted its objects.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
cat >go.mod <<'END'
module finding

go 1.26

require (
	github.com/aws/aws-sdk-go-v2 v1.48.0
	github.com/aws/aws-sdk-go-v2/credentials v1.21.0
	github.com/aws/aws-sdk-go-v2/service/s3 v1.114.10
)
END
cat >main.go <<'END'
package main

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"
)

func main() {
	ctx := context.Background()
	for _, body := range []string{
		"<html><title>Please log in</title></html>",
		`{"message": "not found"}`,
		"not found",
		"",
		"<page><Contents><Key>k</Key></Contents><Buckets><Bucket><Name>b</Name></Bucket></Buckets></page>",
		"<ListBucketResult><Contents>",
	} {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprint(w, body)
		}))
		client := s3.New(s3.Options{
			Region: "r", BaseEndpoint: &server.URL, UsePathStyle: true,
			Credentials: credentials.NewStaticCredentialsProvider("key", "secret", ""),
		})
		fmt.Printf("%q:", body)
		if buckets, err := client.ListBuckets(ctx, nil); err != nil {
			fmt.Print(" error")
		} else {
			fmt.Print(" ", len(buckets.Buckets))
		}
		if objects, err := client.ListObjectsV2(ctx, &s3.ListObjectsV2Input{Bucket: aws.String("bucket")}); err != nil {
			fmt.Println(" error")
		} else {
			fmt.Println("", len(objects.Contents))
		}
		server.Close()
	}
}
END
GOFLAGS=-mod=mod go run . >output 2>log || { cat log >&2; exit 1; }
diff - output <<'END' || { echo "changed: see above" >&2; exit 1; }
"<html><title>Please log in</title></html>": 0 0
"{\"message\": \"not found\"}": 0 0
"not found": 0 0
"": 0 0
"<page><Contents><Key>k</Key></Contents><Buckets><Bucket><Name>b</Name></Bucket></Buckets></page>": 1 1
"<ListBucketResult><Contents>": error error
END
echo "still so: any body is a list"
