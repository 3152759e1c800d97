// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/smithy-go"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	// answerTime is how long a call may take until its final answer, with all repetitions.
	answerTime = 90 * time.Second
	// callTime is the deadline of one call.
	callTime = 10 * time.Second
	// pause is the time between two repetitions.
	pause = 20 * time.Millisecond
)

// until repeats a call as a CO does, until it has the wanted code. Any other code that does not ask for a repetition is
// a violation. All answers must be the same. It returns false after a violation.
func (w *world) until(
	ctx context.Context, random *rand.Rand, what string, want codes.Code, call func(context.Context) (string, error),
) (string, bool) {
	w.count(what)
	var mu sync.Mutex
	answer, answered, failed := "", false, false
	var last error // the last answer that asks for a repetition
	once := func(deadline time.Duration) {
		ctx, cancel := context.WithTimeout(ctx, deadline)
		defer cancel()
		text, err := call(ctx)
		mu.Lock()
		defer mu.Unlock()
		switch code := status.Code(err); {
		case code == want && answered && text != answer:
			failed = true
			w.violation("%s: a repeated call answered differently", what)
		case code == want:
			answer, answered = text, true
		case code == codes.Unavailable || code == codes.DeadlineExceeded || code == codes.Aborted || code == codes.Canceled:
			last = err
		default:
			failed = true
			w.violation("%s: %v, want %s", what, err, want)
		}
	}
	for begun := time.Now(); ctx.Err() == nil; time.Sleep(pause) {
		deadline := callTime
		if random.IntN(8) == 0 {
			deadline = time.Duration(random.IntN(int(300 * time.Millisecond)))
		}
		var group sync.WaitGroup
		if random.IntN(8) == 0 {
			w.count("calls twice at once")
			group.Go(func() { once(callTime) })
		}
		group.Go(func() { once(deadline) })
		group.Wait()
		switch {
		case failed:
			return answer, false
		case answered:
			return answer, true
		case time.Since(begun) > answerTime:
			w.violation("%s: no final answer in %s, the last was: %v", what, answerTime, last)
			return "", false
		}
		w.count("repeated calls")
	}
	return "", false
}

// ask repeats a request of a workload until the gateway answers it. It returns the gateway's refusal, if any.
func ask(ctx context.Context, request func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	for {
		err := request(ctx)
		var answered smithy.APIError
		var status interface{ HTTPStatusCode() int }
		if err == nil || errors.As(err, &answered) && errors.As(err, &status) && status.HTTPStatusCode() < 500 {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(pause):
		}
	}
}

// code returns the code of the gateway's refusal.
func code(err error) string {
	var answered smithy.APIError
	if errors.As(err, &answered) {
		return answered.ErrorCode()
	}
	return ""
}

// refused reports whether the gateway refused a request for want of rights, or of known keys.
func refused(err error) bool { return code(err) == "AccessDenied" || code(err) == "InvalidAccessKeyId" }

func put(ctx context.Context, client *s3.Client, bucket, key, text string) error {
	return ask(ctx, func(ctx context.Context) error {
		_, err := client.PutObject(ctx, &s3.PutObjectInput{Bucket: &bucket, Key: &key, Body: strings.NewReader(text)})
		return err
	})
}

func get(ctx context.Context, client *s3.Client, bucket, key string) (text string, err error) {
	err = ask(ctx, func(ctx context.Context) error {
		answer, err := client.GetObject(ctx, &s3.GetObjectInput{Bucket: &bucket, Key: &key})
		if err != nil {
			return err
		}
		read, err := io.ReadAll(answer.Body)
		text = string(read)
		return errors.Join(err, answer.Body.Close())
	})
	return text, err
}

func list(ctx context.Context, client *s3.Client, bucket string) error {
	return ask(ctx, func(ctx context.Context) error {
		_, err := client.ListObjectsV2(ctx, &s3.ListObjectsV2Input{Bucket: &bucket})
		return err
	})
}

func remove(ctx context.Context, client *s3.Client, bucket, key string) error {
	return ask(ctx, func(ctx context.Context) error {
		_, err := client.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: &bucket, Key: &key})
		return err
	})
}
