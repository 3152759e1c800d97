// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package core

import (
	"context"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/kubernetes-csi/csi-lib-utils/protosanitizer"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// interceptors returns the interceptors of every RPC, the outermost first.
func (s *Server) interceptors() []grpc.UnaryServerInterceptor {
	return []grpc.UnaryServerInterceptor{s.logAndCount, s.recoverPanic, s.checkMode, s.serialize}
}

// logAndCount gives each RPC an ID, turns its error into a gRPC status, and logs and counts the result.
func (s *Server) logAndCount(
	ctx context.Context,
	req any,
	info *grpc.UnaryServerInfo,
	handler grpc.UnaryHandler,
) (any, error) {
	method := methodName(info.FullMethod)
	log := s.log.With("method", method, "request_id", strconv.FormatUint(s.requests.Add(1), 10))
	if log.Enabled(ctx, slog.LevelDebug) {
		log.Debug("request", "request", sanitized(req))
	}
	s.metrics.RPCStarted(info.FullMethod)
	start := time.Now()
	resp, err := handler(rpc.WithArrival(ctx), req)
	took := time.Since(start)

	result, word := statusOf(ctx, err), ""
	if row := fault.Of(err); row != nil {
		word = row.Word
	}
	s.metrics.RPCAnswered(info.FullMethod, result.Code().String(), word, took)
	attrs := append(identifiers(req), slog.String("code", result.Code().String()), slog.Duration("duration", took))
	level := slog.LevelInfo
	switch {
	case err != nil:
		level = rpc.LogLevel(err)
		attrs = append(attrs, slog.String("error", result.Message()))
		if requestID := rpc.RackRequestID(err); requestID != "" {
			attrs = append(attrs, slog.String("rack_request_id", requestID))
		}
	case isRoutine(method):
		level = slog.LevelDebug
	}
	log.LogAttrs(ctx, level, "responded", attrs...)
	if err != nil {
		return nil, result.Err()
	}
	return resp, nil
}

// isRoutine reports whether successes of an RPC are logged at debug level only. Orchestrators repeat these RPCs all the
// time.
func isRoutine(method string) bool {
	switch method {
	case "Probe", "GetPluginInfo", "GetPluginCapabilities", "ControllerGetCapabilities", "NodeGetCapabilities",
		"NodeGetVolumeStats", "NodeGetVolumeHealth", "NodeGetStorageHealth":
		return true
	}
	return false
}

// recoverPanic turns a panic into INTERNAL: a defect in one RPC must not stop the process, which serves all other
// volumes. After a create it is UNAVAILABLE: INTERNAL is final to a provisioner, and the disk may exist.
func (s *Server) recoverPanic(
	ctx context.Context,
	req any,
	info *grpc.UnaryServerInfo,
	handler grpc.UnaryHandler,
) (resp any, err error) {
	defer func() {
		if reason := recover(); reason != nil {
			s.metrics.RPCPanicked()
			rpc.LogPanic(s.log, slog.String("method", methodName(info.FullMethod)), reason)
			failed := rpc.Internal
			switch req.(type) {
			case *csi.CreateVolumeRequest, *csi.CreateSnapshotRequest:
				failed = rpc.Unavailable
			}
			resp, err = nil, failed(
				"%s failed because of a defect in the plugin: see the stack in its log",
				methodName(info.FullMethod),
			)
		}
	}()
	return handler(ctx, req)
}

// checkMode rejects the RPCs of a service that this process does not serve.
func (s *Server) checkMode(
	ctx context.Context,
	req any,
	info *grpc.UnaryServerInfo,
	handler grpc.UnaryHandler,
) (any, error) {
	service := strings.TrimPrefix(info.FullMethod, "/csi.v1.")
	service, _, _ = strings.Cut(service, "/")
	if (service == "Controller" && s.controller == nil) || (service == "Node" && s.node == nil) {
		return nil, status.Errorf(
			codes.Unimplemented,
			"the %s service is not served in mode %q",
			strings.ToLower(service),
			s.mode,
		)
	}
	return handler(ctx, req)
}

// serialize runs one operation at a time for each volume or snapshot. RPCs that only read run at any time.
func (s *Server) serialize(
	ctx context.Context,
	req any,
	info *grpc.UnaryServerInfo,
	handler grpc.UnaryHandler,
) (any, error) {
	key := lockKey(req)
	if key == "" {
		return handler(ctx, req)
	}
	release, ok := s.locks.Acquire(ctx, key, rpc.WaitBudget(ctx))
	if !ok {
		if err := ctx.Err(); err != nil {
			return nil, status.FromContextError(err).Err()
		}
		return nil, rpc.Aborted("another operation on %s is still under way: retry", key)
	}
	defer release()
	return handler(ctx, req)
}

// lockKey names the volume or snapshot that an RPC changes. It is empty if the RPC changes nothing.
func lockKey(req any) string {
	switch r := req.(type) {
	case *csi.CreateVolumeRequest:
		return "volume name " + strconv.Quote(r.GetName())
	case *csi.CreateSnapshotRequest:
		return "snapshot name " + strconv.Quote(r.GetName())
	case *csi.DeleteSnapshotRequest:
		return "snapshot " + strconv.Quote(strings.ToLower(r.GetSnapshotId()))
	case *csi.ControllerExpandVolumeRequest:
		// It has a lock of its own: a publish takes an expansion back, and does not wait for its end.
		return "expansion of volume " + strconv.Quote(strings.ToLower(r.GetVolumeId()))
	case *csi.DeleteVolumeRequest, *csi.ControllerPublishVolumeRequest, *csi.ControllerUnpublishVolumeRequest,
		*csi.ControllerModifyVolumeRequest,
		*csi.NodeStageVolumeRequest, *csi.NodeUnstageVolumeRequest, *csi.NodePublishVolumeRequest, *csi.NodeUnpublishVolumeRequest:
		return "volume " + strconv.Quote(strings.ToLower(r.(interface{ GetVolumeId() string }).GetVolumeId()))
	}
	return ""
}

// identifiers are the ID fields of a request, for the log. The other fields are not logged: parameters and contexts are
// long, and secrets would be readable.
func identifiers(req any) []slog.Attr {
	var attrs []slog.Attr
	add := func(key, value string) {
		if value != "" {
			attrs = append(attrs, slog.String(key, value))
		}
	}
	if r, ok := req.(interface{ GetVolumeId() string }); ok {
		add("volume_id", r.GetVolumeId())
	}
	if r, ok := req.(interface{ GetName() string }); ok {
		add("name", r.GetName())
	}
	if r, ok := req.(interface{ GetSourceVolumeId() string }); ok {
		add("source_volume_id", r.GetSourceVolumeId())
	}
	if r, ok := req.(interface{ GetSnapshotId() string }); ok {
		add("snapshot_id", r.GetSnapshotId())
	}
	if r, ok := req.(interface{ GetNodeId() string }); ok {
		add("node_id", r.GetNodeId())
	}
	if r, ok := req.(interface{ GetStagingTargetPath() string }); ok {
		add("staging_target_path", r.GetStagingTargetPath())
	}
	if r, ok := req.(interface{ GetTargetPath() string }); ok {
		add("target_path", r.GetTargetPath())
	}
	return attrs
}

// sanitized returns the text of a request for the log at debug level. It leaves out the fields that the specification
// marks csi_secret, and the mount flags, which can be sensitive according to the specification.
func sanitized(req any) string {
	message, ok := req.(proto.Message)
	if !ok {
		return fmt.Sprintf("%T", req)
	}
	message = proto.Clone(message)
	stripMountFlags(message.ProtoReflect())
	return protosanitizer.StripSecrets(message).String()
}

func stripMountFlags(message protoreflect.Message) {
	message.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		switch {
		case field.Name() == "mount_flags":
			message.Clear(field)
		case field.IsMap():
		case field.IsList() && field.Message() != nil:
			for i := range value.List().Len() {
				stripMountFlags(value.List().Get(i).Message())
			}
		case field.Message() != nil:
			stripMountFlags(value.Message())
		}
		return true
	})
}

// methodName returns the name of an RPC as in the specification.
func methodName(fullMethod string) string {
	return fullMethod[strings.LastIndexByte(fullMethod, '/')+1:]
}
