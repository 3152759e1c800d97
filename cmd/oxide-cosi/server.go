// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cosi "sigs.k8s.io/container-object-storage-interface/proto"

	"github.com/oxidecomputer/oxide-csi-plugin/core/buckets"
	"github.com/oxidecomputer/oxide-csi-plugin/core/keylock"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

const (
	// handshakeTimeout bounds the time from a client's connect to the end of its HTTP/2 handshake.
	handshakeTimeout = 5 * time.Second
	// callTimeout bounds an RPC whose caller sets no deadline, and the work of each RPC that changes a bucket.
	callTimeout = 2 * time.Minute
	// maxCalls is how many RPCs a connection has at once; gRPC clients wait with others.
	// COSI's sidecar v0.2.2 has 40 workers.
	maxCalls = 100
)

// newServer returns a server that does not listen yet. It changes nothing before the time settled.
func newServer(driver *buckets.Driver, settled time.Time, log *slog.Logger) *grpc.Server {
	i := &interceptors{log: log, settled: settled, locks: keylock.New()}
	server := grpc.NewServer(
		grpc.ChainUnaryInterceptor(i.answer, i.recoverPanic, i.serialize),
		grpc.ConnectionTimeout(handshakeTimeout),
		grpc.MaxConcurrentStreams(maxCalls),
	)
	cosi.RegisterIdentityServer(server, driver)
	cosi.RegisterProvisionerServer(server, driver)
	return server
}

// interceptors are the steps of every RPC. They are not those of the plugin's server: the codes are those of S3, an
// operation outlives its caller, a new process waits before it changes anything, and no request has secrets to strip.
type interceptors struct {
	log     *slog.Logger
	settled time.Time
	locks   *keylock.Locks
	// requests counts the RPCs; its values are the request IDs in the log.
	requests atomic.Uint64
}

// answer bounds an RPC, gives it an ID and its error a gRPC code, and logs the result. It logs IDs only: the answer to
// a grant has keys.
func (i *interceptors) answer(
	ctx context.Context,
	req any,
	info *grpc.UnaryServerInfo,
	handler grpc.UnaryHandler,
) (any, error) {
	if _, bounded := ctx.Deadline(); !bounded {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, callTimeout)
		defer cancel()
	}
	log := i.log.With("method", method(info), "request_id", i.requests.Add(1))
	start := time.Now()
	resp, err := handler(ctx, req)
	result := statusOf(ctx, err)
	attrs := append(identifiers(req),
		slog.String("code", result.Code().String()), slog.Duration("duration", time.Since(start)))
	level := slog.LevelInfo
	if err != nil {
		level = rpc.LogLevel(err)
		attrs = append(attrs, slog.String("error", result.Message()))
	}
	log.LogAttrs(ctx, level, "responded", attrs...)
	if err != nil {
		return nil, result.Err()
	}
	return resp, nil
}

// recoverPanic turns a panic into INTERNAL: a defect in one RPC must not stop the process.
func (i *interceptors) recoverPanic(
	ctx context.Context,
	req any,
	info *grpc.UnaryServerInfo,
	handler grpc.UnaryHandler,
) (resp any, err error) {
	defer func() {
		if reason := recover(); reason != nil {
			rpc.LogPanic(i.log, slog.String("method", method(info)), reason)
			resp, err = nil, rpc.Internal("%s failed because of a defect in the driver: see the stack in its log", method(info))
		}
	}()
	return handler(ctx, req)
}

// serialize runs one operation at a time for each bucket: a bucket's policy is read, changed and written back. The
// operation outlives its caller: a store may carry out a request late, and would then undo the next operation.
func (i *interceptors) serialize(
	ctx context.Context,
	req any,
	_ *grpc.UnaryServerInfo,
	handler grpc.UnaryHandler,
) (any, error) {
	key := buckets.LockKey(req)
	if key == "" {
		return handler(ctx, req)
	}
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-time.After(time.Until(i.settled)):
	}
	release, ok := i.locks.Acquire(ctx, key, rpc.WaitBudget(ctx))
	if !ok {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		return nil, rpc.Aborted("another operation on %s is still under way: retry", key)
	}
	defer release()
	work, cancel := context.WithTimeout(context.WithoutCancel(ctx), callTimeout)
	defer cancel()
	return handler(work, req)
}

// statusOf returns the gRPC status for the error of an RPC. If the caller's context has ended, the code is that of the
// context: the store's client reports the same as no answer.
func statusOf(ctx context.Context, err error) *status.Status {
	if err == nil {
		return nil
	}
	text := rpc.Printable(err.Error())
	switch ctxErr := ctx.Err(); {
	case errors.Is(ctxErr, context.DeadlineExceeded):
		return status.New(codes.DeadlineExceeded, text)
	case ctxErr != nil:
		return status.New(codes.Canceled, text)
	}
	var coded *rpc.Error
	if errors.As(err, &coded) {
		return status.New(coded.Code(), text)
	}
	return status.New(codes.Internal, text)
}

// identifiers are the ID fields of a request, for the log.
func identifiers(req any) []slog.Attr {
	var attrs []slog.Attr
	if r, ok := req.(interface{ GetName() string }); ok {
		attrs = append(attrs, slog.String("name", r.GetName()))
	}
	if r, ok := req.(interface{ GetBucketId() string }); ok {
		attrs = append(attrs, slog.String("bucket_id", r.GetBucketId()))
	}
	if r, ok := req.(interface{ GetAccountId() string }); ok {
		attrs = append(attrs, slog.String("account_id", r.GetAccountId()))
	}
	return attrs
}

// method returns the name of an RPC as in the specification.
func method(info *grpc.UnaryServerInfo) string {
	return info.FullMethod[strings.LastIndexByte(info.FullMethod, '/')+1:]
}
