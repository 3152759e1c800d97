// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package core_test

import (
	"context"
	"fmt"
	"io/fs"
	"log/slog"
	"math"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/oxidecomputer/oxide-csi-plugin/core"
	"github.com/oxidecomputer/oxide-csi-plugin/core/controller"
	"github.com/oxidecomputer/oxide-csi-plugin/core/device/devicetest"
	"github.com/oxidecomputer/oxide-csi-plugin/core/node"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/static"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
)

// The cases of this test are made from the specification: the fields from its descriptors, the requirements from the
// comments in its csi.proto. A new required field of a later version therefore gets its cases without a change here,
// and the test fails until validate.go checks the field.

// Limits of the specification, "Size Limits" and the comments of NodeGetInfoResponse.node_id and mount_flags, in bytes.
const (
	stringLimit = 128
	mapLimit    = 4 << 10
	nodeIDLimit = 256
	pathLimit   = 4095 // Linux: PATH_MAX without its final zero byte
	nameLimit   = 255  // Linux: NAME_MAX
)

// services are the services of this plugin.
var services = []string{"Identity", "Controller", "Node"}

// badInputRPC is an RPC that this plugin serves.
type badInputRPC struct {
	// valid is a request with all fields that this plugin accepts, and want is its code.
	valid func(*everything) proto.Message
	want  codes.Code
	// unknownID is the code for a volume ID that is not a UUID.
	unknownID codes.Code
}

var badInputRPCs = map[string]badInputRPC{
	"GetPluginInfo":         {valid: func(*everything) proto.Message { return &csi.GetPluginInfoRequest{} }},
	"GetPluginCapabilities": {valid: func(*everything) proto.Message { return &csi.GetPluginCapabilitiesRequest{} }},
	"Probe":                 {valid: func(*everything) proto.Message { return &csi.ProbeRequest{} }},
	"ControllerGetCapabilities": {
		valid: func(*everything) proto.Message { return &csi.ControllerGetCapabilitiesRequest{} },
	},
	"NodeGetCapabilities": {valid: func(*everything) proto.Message { return &csi.NodeGetCapabilitiesRequest{} }},
	"NodeGetInfo":         {valid: func(*everything) proto.Message { return &csi.NodeGetInfoRequest{} }},
	"CreateVolume": {valid: func(*everything) proto.Message {
		return &csi.CreateVolumeRequest{
			Name:                      "new",
			CapacityRange:             &csi.CapacityRange{RequiredBytes: coretest.GiB, LimitBytes: 2 * coretest.GiB},
			VolumeCapabilities:        []*csi.VolumeCapability{fullCapability(), fullCapability()},
			Parameters:                map[string]string{rpc.KeyBlockSize: "4096"},
			Secrets:                   map[string]string{"key": "secret"},
			AccessibilityRequirements: coretest.RequireRacks("default"),
		}
	}},
	"CreateSnapshot": {want: codes.NotFound, valid: func(*everything) proto.Message {
		return &csi.CreateSnapshotRequest{
			Name:                      "new",
			SourceVolumeId:            coretest.NoVolumeID,
			Parameters:                map[string]string{rpc.ParameterPrefixCO + "anything": "s"},
			Secrets:                   map[string]string{"key": "secret"},
			AccessibilityRequirements: coretest.RequireRacks("default"),
		}
	}},
	"DeleteSnapshot": {valid: func(*everything) proto.Message {
		return &csi.DeleteSnapshotRequest{SnapshotId: coretest.NoVolumeID, Secrets: map[string]string{"key": "secret"}}
	}},
	"GetSnapshot": {want: codes.NotFound, valid: func(*everything) proto.Message {
		return &csi.GetSnapshotRequest{SnapshotId: coretest.NoVolumeID, Secrets: map[string]string{"key": "secret"}}
	}},
	"ListSnapshots": {valid: func(*everything) proto.Message {
		return &csi.ListSnapshotsRequest{
			MaxEntries:     1,
			SourceVolumeId: coretest.NoVolumeID,
			SnapshotId:     coretest.NoVolumeID,
			Secrets:        map[string]string{"key": "secret"},
		}
	}},
	"ListVolumes": {valid: func(*everything) proto.Message { return &csi.ListVolumesRequest{MaxEntries: 1} }},
	"ControllerGetVolume": {unknownID: codes.NotFound, valid: func(e *everything) proto.Message {
		return &csi.ControllerGetVolumeRequest{VolumeId: e.volumeID}
	}},
	"ControllerGetVolumeHealth": {unknownID: codes.NotFound, valid: func(e *everything) proto.Message {
		return &csi.ControllerGetVolumeHealthRequest{VolumeId: e.volumeID, Secrets: map[string]string{"key": "secret"}}
	}},
	"ControllerListVolumeHealth": {valid: func(*everything) proto.Message {
		return &csi.ControllerListVolumeHealthRequest{MaxEntries: 1, Secrets: map[string]string{"key": "secret"}}
	}},
	"GetCapacity": {valid: func(*everything) proto.Message {
		return &csi.GetCapacityRequest{
			VolumeCapabilities: []*csi.VolumeCapability{fullCapability(), fullCapability()},
			Parameters: map[string]string{
				rpc.KeyBlockSize: "4096",
			},
			AccessibleTopology: coretest.RequireRacks("default").GetRequisite()[0],
		}
	}},
	"ControllerExpandVolume": {unknownID: codes.NotFound, valid: func(e *everything) proto.Message {
		return &csi.ControllerExpandVolumeRequest{
			VolumeId:         e.volumeID,
			CapacityRange:    &csi.CapacityRange{RequiredBytes: coretest.GiB, LimitBytes: 2 * coretest.GiB},
			Secrets:          map[string]string{"key": "secret"},
			VolumeCapability: fullCapability(),
		}
	}},
	"DeleteVolume": {valid: func(e *everything) proto.Message {
		return &csi.DeleteVolumeRequest{VolumeId: e.volumeID, Secrets: map[string]string{"key": "secret"}}
	}},
	"ControllerModifyVolume": {unknownID: codes.NotFound, valid: func(e *everything) proto.Message {
		return &csi.ControllerModifyVolumeRequest{
			VolumeId: e.volumeID, MutableParameters: map[string]string{rpc.KeyAdoptFromCluster: "gone"},
			Secrets: map[string]string{"key": "secret"},
		}
	}},
	"ControllerPublishVolume": {unknownID: codes.NotFound, valid: func(e *everything) proto.Message {
		return &csi.ControllerPublishVolumeRequest{
			VolumeId: e.volumeID, NodeId: e.nodeID, VolumeCapability: fullCapability(),
			Secrets: map[string]string{"key": "secret"}, VolumeContext: map[string]string{"users": "own"},
		}
	}},
	"ControllerUnpublishVolume": {valid: func(e *everything) proto.Message {
		return &csi.ControllerUnpublishVolumeRequest{
			VolumeId: e.volumeID,
			NodeId:   e.nodeID,
			Secrets:  map[string]string{"key": "secret"},
		}
	}},
	"ValidateVolumeCapabilities": {unknownID: codes.NotFound, valid: func(e *everything) proto.Message {
		return &csi.ValidateVolumeCapabilitiesRequest{
			VolumeId: e.volumeID, VolumeContext: map[string]string{"users": "own"},
			VolumeCapabilities: []*csi.VolumeCapability{fullCapability(), fullCapability()},
			Parameters:         map[string]string{rpc.KeyBlockSize: "4096"}, Secrets: map[string]string{"key": "secret"},
		}
	}},
	// The disk is in no guest, so these two RPCs fail when they look for its device.
	"NodeStageVolume": {
		want:      codes.FailedPrecondition,
		unknownID: codes.NotFound,
		valid: func(e *everything) proto.Message {
			return &csi.NodeStageVolumeRequest{
				VolumeId:          e.volumeID,
				PublishContext:    map[string]string{rpc.KeyDiskName: "d"},
				StagingTargetPath: e.path("no-such-folder/staging"),
				VolumeCapability:  fullCapability(),
				Secrets:           map[string]string{"key": "secret"},
				VolumeContext:     map[string]string{"users": "own"},
			}
		},
	},
	"NodePublishVolume": {
		want:      codes.FailedPrecondition,
		unknownID: codes.NotFound,
		valid: func(e *everything) proto.Message {
			return &csi.NodePublishVolumeRequest{
				VolumeId:          e.volumeID,
				PublishContext:    map[string]string{rpc.KeyDiskName: "d"},
				StagingTargetPath: e.path("staging"),
				TargetPath:        e.path("no-such-folder/target"),
				VolumeCapability:  fullCapability(),
				Secrets:           map[string]string{"key": "secret"},
				VolumeContext:     map[string]string{"users": "own"},
			}
		},
	},
	"NodeUnstageVolume": {valid: func(e *everything) proto.Message {
		return &csi.NodeUnstageVolumeRequest{VolumeId: e.volumeID, StagingTargetPath: e.path("staged")}
	}},
	"NodeUnpublishVolume": {valid: func(e *everything) proto.Message {
		return &csi.NodeUnpublishVolumeRequest{VolumeId: e.volumeID, TargetPath: e.path("target")}
	}},
	"NodeGetVolumeStats": {want: codes.NotFound, unknownID: codes.NotFound, valid: func(e *everything) proto.Message {
		return &csi.NodeGetVolumeStatsRequest{
			VolumeId:          e.volumeID,
			VolumePath:        e.path("target"),
			StagingTargetPath: e.path("staging"),
		}
	}},
	"NodeGetVolumeHealth": {unknownID: codes.NotFound, valid: func(e *everything) proto.Message {
		return &csi.NodeGetVolumeHealthRequest{
			VolumeId:          e.volumeID,
			VolumePublishPath: e.path("target"),
			StagingTargetPath: e.path("staging"),
		}
	}},
	"NodeGetStorageHealth": {valid: func(*everything) proto.Message {
		return &csi.NodeGetStorageHealthRequest{Secrets: map[string]string{"key": "secret"}}
	}},
}

func fullCapability() *csi.VolumeCapability {
	capability := coretest.MountWriter()
	capability.GetMount().FsType = "ext4"
	capability.GetMount().MountFlags = []string{"noatime"}
	return capability
}

// unsupportedFields are the fields that this plugin rejects if set, and their names in the message.
var unsupportedFields = map[protoreflect.Name]string{
	"mutable_parameters": "mutable_parameters",
	"volume_mount_group": "volume_mount_group",
}

// badInputAnswers are the cases whose answer is not INVALID_ARGUMENT with the name of the field. The keys are RPC,
// field and defect.
var badInputAnswers = map[string]struct {
	code     codes.Code
	mentions string
}{
	// A newer orchestrator may know more modes. A mode that this plugin does not support is an answer, not an error.
	"ValidateVolumeCapabilities mode undefined": {codes.OK, "access_mode"},
	"NodePublishVolume staging_target_path missing": {
		codes.FailedPrecondition,
		"staging_target_path",
	}, // as the spec demands
	// The volume is not at this path, as at any other path without a volume.
	"NodeGetVolumeStats volume_path relative":                  {codes.NotFound, "relative/path"},
	"NodeGetVolumeStats volume_path zero byte":                 {codes.NotFound, "is not at"},
	"NodeGetVolumeStats volume_path name of 256 bytes":         {codes.NotFound, "is not at"},
	"NodeGetVolumeStats volume_path root folder":               {codes.NotFound, "is not at"},
	"NodeGetVolumeStats staging_target_path relative":          {codes.NotFound, "is not at"},
	"NodeGetVolumeStats staging_target_path zero byte":         {codes.NotFound, "is not at"},
	"NodeGetVolumeStats staging_target_path name of 256 bytes": {codes.NotFound, "is not at"},
	"NodeGetVolumeStats staging_target_path root folder":       {codes.NotFound, "is not at"},
}

// badInputMentions are the names that messages use for nested fields.
var badInputMentions = map[protoreflect.Name]string{
	"mode":     "access_mode",
	"segments": "accessib", // accessibility_requirements or accessible_topology
}

// badRow is a valid request with one defect.
type badRow struct {
	name   string
	change func(protoreflect.Message)
	code   codes.Code
	// mentions is a text in the error, or with code OK in the message of ValidateVolumeCapabilities.
	mentions string
}

func TestBadInput(t *testing.T) {
	spec := readSpecification(t)
	eachRPC(t, func(t *testing.T, method protoreflect.MethodDescriptor, served badInputRPC) {
		e := newEverything(t)
		valid := served.valid(e)
		rows := slices.Concat(
			rowsOf(t, spec, method, valid.ProtoReflect()),
			capacityRows(method),
			modeRows(method),
			parameterRows(method),
			contextRows(method),
			pathRows(method),
		)
		seen := map[string]bool{}
		before, disks := e.files(t), e.Volumes(t)
		for _, row := range rows {
			if seen[row.name] {
				t.Fatalf("two cases have the name %q", row.name)
			}
			seen[row.name] = true
			t.Run(row.name, func(t *testing.T) {
				request := proto.Clone(valid)
				row.change(request.ProtoReflect())
				if proto.Equal(request, valid) {
					t.Fatal("the case changes nothing")
				}
				e.ClearCalls(t)
				response, err := e.invoke(t.Context(), method, request)
				if row.code == codes.OK {
					e.Must(t, err)
					validated := response.(*csi.ValidateVolumeCapabilitiesResponse)
					if validated.GetConfirmed() != nil || !strings.Contains(validated.GetMessage(), row.mentions) {
						t.Errorf("answer %v: want no confirmation, and a message with %q", validated, row.mentions)
					}
				} else {
					coretest.WantCode(t, err, row.code, row.mentions)
				}
				for operation, n := range e.Calls(t) {
					// The rack checks sizes, so the create of a volume goes on until then. An answer about a volume needs a
					// look-up of the volume.
					create := operation == "disk_create" || operation == "anti_affinity_group_view"
					if operation != "disk_view" && (!create || row.code != codes.OutOfRange) {
						t.Errorf("the rack got %s %d times", operation, n)
					}
				}
			})
		}
		if diff := cmp.Diff(before, e.files(t)); diff != "" {
			t.Errorf("files (-before +after):\n%s", diff)
		}
		if diff := cmp.Diff(disks, e.Volumes(t)); diff != "" {
			t.Errorf("disks (-before +after):\n%s", diff)
		}
	})
}

// rowsOf returns the cases of an RPC that follow from the fields in the specification.
func rowsOf(
	t *testing.T,
	spec specification,
	method protoreflect.MethodDescriptor,
	valid protoreflect.Message,
) []badRow {
	t.Helper()
	var rows []badRow
	var walk func(message protoreflect.Message, path []protoreflect.FieldDescriptor)
	walk = func(message protoreflect.Message, path []protoreflect.FieldDescriptor) {
		add := func(field protoreflect.FieldDescriptor, what string, change func(protoreflect.Message)) {
			code, mentions := codes.InvalidArgument, string(field.Name())
			if other, has := badInputMentions[field.Name()]; has {
				mentions = other
			}
			if other, has := badInputAnswers[fmt.Sprintf("%s %s %s", method.Name(), field.Name(), what)]; has {
				code, mentions = other.code, other.mentions
			}
			rows = append(rows, badRow{name: fmt.Sprintf("%s/%s", pathText(path, field), what), code: code, mentions: mentions,
				change: func(root protoreflect.Message) { change(descend(root, path)) }})
		}
		oneofs := message.Descriptor().Oneofs()
		for i := range oneofs.Len() {
			oneof := oneofs.Get(i)
			if !strings.Contains(spec.comment(t, oneof.FullName()), "MUST be specified") {
				t.Errorf("%s: csi.proto does not say whether it is required", oneof.FullName())
			}
			rows = append(rows, badRow{
				name: fmt.Sprintf(
					"%s/none of %s",
					pathText(path, nil),
					oneof.Name(),
				),
				code:     codes.InvalidArgument,
				mentions: string(oneof.Name()),
				change:   func(root protoreflect.Message) { parent := descend(root, path); parent.Clear(parent.WhichOneof(oneof)) },
			})
		}
		fields := message.Descriptor().Fields()
		for i := range fields.Len() {
			field := fields.Get(i)
			for what, change := range changes(t, spec, field) {
				add(field, what, change)
			}
			if _, is := unsupportedFields[field.Name()]; is {
				rows = append(rows, unsupportedRows(method, path, field)...)
				continue
			}
			switch {
			case field.Name() == "volume_content_source": // TestContentSource has its rows
			case field.Message() == nil || field.IsMap():
			case !message.Has(field) && field.Message().Fields().Len() == 0: // the other member of a oneof
			case !message.Has(field):
				t.Errorf("%s is not set in the valid request, so its fields have no cases", field.FullName())
			case field.IsList():
				walk(message.Get(field).List().Get(0).Message(), append(slices.Clone(path), field))
			default:
				walk(message.Get(field).Message(), append(slices.Clone(path), field))
			}
		}
	}
	walk(valid, nil)
	return rows
}

// changes returns the defects that a field of this type can have.
func changes(
	t *testing.T,
	spec specification,
	field protoreflect.FieldDescriptor,
) map[string]func(protoreflect.Message) {
	t.Helper()
	comment := spec.comment(t, field.FullName())
	set := func(value any) func(protoreflect.Message) {
		return func(m protoreflect.Message) { m.Set(field, protoreflect.ValueOf(value)) }
	}
	bad := map[string]func(protoreflect.Message){}
	if spec.required(t, field) && field.Kind() != protoreflect.BoolKind { // a missing bool is false
		bad["missing"] = func(m protoreflect.Message) { m.Clear(field) }
	}
	switch {
	case field.IsMap():
		bad["4 KiB and one byte"] = fillMap(field, mapLimit+1)
	case field.IsList() && field.Kind() == protoreflect.StringKind:
		bad["4 KiB and one byte"] = func(m protoreflect.Message) {
			m.Mutable(field).List().Append(protoreflect.ValueOfString("x-" + strings.Repeat("y", mapLimit)))
		}
	case field.Kind() == protoreflect.StringKind:
		limit := limitOf(t, spec, field)
		bad[fmt.Sprintf("%d bytes", limit+1)] = set(text(field, limit+1))
		if isPath(field) {
			bad["relative"] = set("relative/path")
			bad["zero byte"] = set("/path\x00/more")
			bad["name of 256 bytes"] = set("/path/" + strings.Repeat("n", nameLimit+1) + "/more")
			bad["root folder"] = set("/path/..")
		}
		if strings.Contains(comment, "banned characters") {
			for _, banned := range []rune{0, 8, 0x0b, 0x0c, 0x0e, 0x1f, 0x7f, 0x9f} {
				bad[fmt.Sprintf("character U+%04X", banned)] = set("a" + string(banned) + "b")
			}
		}
	case field.Kind() == protoreflect.EnumKind:
		bad["undefined"] = set(protoreflect.EnumNumber(9999))
	case field.Kind() == protoreflect.Int64Kind:
		if !strings.Contains(comment, "MUST NOT be negative") {
			t.Errorf("%s: csi.proto does not say whether it may be negative", field.FullName())
		}
		bad["negative"] = set(int64(-1))
	}
	return bad
}

// unsupportedRows set a field that this plugin does not support, at each place where the request has the field.
func unsupportedRows(
	method protoreflect.MethodDescriptor,
	path []protoreflect.FieldDescriptor,
	field protoreflect.FieldDescriptor,
) []badRow {
	code := codes.InvalidArgument
	if method.Name() == "ValidateVolumeCapabilities" {
		code = codes.OK
	}
	row := func(what string, set func(protoreflect.Message)) badRow {
		return badRow{
			name:     fmt.Sprintf("%s/%s", pathText(path, field), what),
			code:     code,
			mentions: unsupportedFields[field.Name()],
			change:   func(root protoreflect.Message) { set(descend(root, path)) },
		}
	}
	switch {
	case field.IsMap():
		return []badRow{row("set", fillMap(field, 100))}
	case field.Kind() == protoreflect.StringKind:
		return []badRow{row("set", func(m protoreflect.Message) { m.Set(field, protoreflect.ValueOfString("100")) })}
	}
	rows := []badRow{row("empty", func(m protoreflect.Message) { m.Mutable(field) })}
	for i := range field.Message().Fields().Len() {
		member := field.Message().Fields().Get(i)
		rows = append(rows,
			row("empty "+string(member.Name()), func(m protoreflect.Message) { m.Mutable(field).Message().Mutable(member) }),
			row("with "+string(member.Name()), func(m protoreflect.Message) {
				id := member.Message().Fields().Get(0)
				m.Mutable(field).
					Message().
					Mutable(member).
					Message().
					Set(id, protoreflect.ValueOfString("c0ffee00-0000-4000-8000-000000000000"))
			}))
	}
	return rows
}

// capacityRows are the capacity ranges that are contradictory, or that no rack can make.
func capacityRows(method protoreflect.MethodDescriptor) []badRow {
	if method.Name() != "CreateVolume" {
		return nil
	}
	row := func(name string, required, limit int64, mentions string) badRow {
		return badRow{
			name:     "capacity_range/" + name,
			code:     codes.OutOfRange,
			mentions: mentions,
			change: func(m protoreflect.Message) {
				m.Interface().(*csi.CreateVolumeRequest).CapacityRange = &csi.CapacityRange{
					RequiredBytes: required,
					LimitBytes:    limit,
				}
			},
		}
	}
	return []badRow{
		row("limit below required", 2*coretest.GiB, coretest.GiB, "limit_bytes"),
		row("no whole GiB between required and limit", coretest.GiB+1, coretest.GiB+2, "limit_bytes"),
		row("limit below the smallest disk", 0, 1, "limit_bytes"),
		row("more than 2^62", 1<<62+1, 0, "capacity_range"),
		row("more than 2^62, exactly", 1<<62+coretest.GiB, 1<<62+coretest.GiB, "capacity_range"),
		row("the largest number", math.MaxInt64, 0, "required_bytes"),
		row("the largest number, exactly", math.MaxInt64, math.MaxInt64, "required_bytes"),
	}
}

// modes are the supported access modes. A rack attaches a disk to one instance at a time.
var modes = []csi.VolumeCapability_AccessMode_Mode{
	csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER,
	csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY,
	csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER,
	csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER,
}

// modeRows request each unsupported access mode, alone and after a supported one.
func modeRows(method protoreflect.MethodDescriptor) []badRow {
	capability := capabilityField(method)
	if capability == nil {
		return nil
	}
	code := codes.InvalidArgument
	if method.Name() == "ValidateVolumeCapabilities" {
		code = codes.OK
	}
	var rows []badRow
	values := csi.VolumeCapability_AccessMode_UNKNOWN.Descriptor().Values()
	for i := range values.Len() {
		mode := csi.VolumeCapability_AccessMode_Mode(values.Get(i).Number())
		if mode == csi.VolumeCapability_AccessMode_UNKNOWN || slices.Contains(modes, mode) {
			continue
		}
		change := func(which int) func(protoreflect.Message) {
			return func(m protoreflect.Message) { capabilityOf(m, capability, which).AccessMode.Mode = mode }
		}
		rows = append(rows, badRow{name: "mode " + mode.String(), code: code, mentions: mode.String(), change: change(0)})
		if capability.IsList() {
			rows = append(
				rows,
				badRow{name: "second mode " + mode.String(), code: code, mentions: mode.String(), change: change(1)},
			)
		}
	}
	if capability.IsList() {
		rows = append(
			rows,
			badRow{
				name:     "second capability empty",
				code:     codes.InvalidArgument,
				mentions: "access_mode",
				change: func(m protoreflect.Message) {
					*capabilityOf(m, capability, 1) = csi.VolumeCapability{}
				},
			},
		)
	}
	return rows
}

// parameterRows are unknown parameters of CreateVolume, and known ones with a wrong value.
func parameterRows(method protoreflect.MethodDescriptor) []badRow {
	code := codes.InvalidArgument
	switch method.Name() {
	default:
		return nil
	case "CreateVolume":
	case "ValidateVolumeCapabilities":
		code = codes.OK
	}
	var rows []badRow
	for _, parameter := range [][2]string{
		{"speed", "11"}, {"blocksize", "512"}, {"", "x"}, {"csi.storage.k8s.io", "x"},
		{rpc.KeyBlockSize, "1024"}, {rpc.KeyBlockSize, ""}, {rpc.ParameterDiskType, "ssd"}, {rpc.KeyReadOnly, "yes"}, {rpc.KeyReadOnly, "true"},
		{rpc.KeyMkfsOptions, "-J device=/dev/sda"}, {rpc.KeyRootUID, "-1"}, {rpc.KeyRootUID, "root"}, {rpc.KeyRootGID, "4294967295"}, {rpc.KeyRootMode, "0888"},
	} {
		rows = append(
			rows,
			badRow{
				name:     "parameter " + parameter[0] + "=" + parameter[1],
				code:     code,
				mentions: parameter[0],
				change: func(m protoreflect.Message) {
					m.Set(m.Descriptor().Fields().ByName("parameters"), m.NewField(m.Descriptor().Fields().ByName("parameters")))
					m.Mutable(m.Descriptor().Fields().ByName("parameters")).
						Map().
						Set(protoreflect.ValueOf(parameter[0]).MapKey(), protoreflect.ValueOf(parameter[1]))
				},
			},
		)
	}
	return rows
}

// contextRows are values of contexts that no controller writes, such as names that no rack has for a disk
// (docs/reference/rack.md §1).
func contextRows(method protoreflect.MethodDescriptor) []badRow {
	if field := method.Input().Fields().ByName("publish_context"); field == nil {
		return nil
	}
	var rows []badRow
	for _, key := range []protoreflect.Name{"publish_context", "volume_context"} {
		for _, name := range []string{
			" ", "D", "disk_1", "disk-", "-disk", "1disk", "disk\n", "a/b", "a\x00b", strings.Repeat("d", 64), coretest.NoVolumeID,
		} {
			rows = append(rows, badRow{
				name:     fmt.Sprintf("disk name %.20q in %s", name, key),
				code:     codes.InvalidArgument,
				mentions: rpc.KeyDiskName,
				change: func(m protoreflect.Message) {
					fields := m.Descriptor().Fields()
					m.Clear(fields.ByName("publish_context"))
					m.Mutable(fields.ByName(key)).Map().Set(protoreflect.ValueOf(rpc.KeyDiskName).MapKey(), protoreflect.ValueOf(name))
				},
			})
		}
	}
	for _, key := range []protoreflect.Name{"publish_context", "volume_context"} {
		rows = append(rows, badRow{
			name: fmt.Sprintf("raw block in %s", key), code: codes.InvalidArgument, mentions: rpc.KeyRawBlock,
			change: func(m protoreflect.Message) {
				field := m.Descriptor().Fields().ByName(key)
				m.Mutable(field).Map().Set(protoreflect.ValueOf(rpc.KeyRawBlock).MapKey(), protoreflect.ValueOf("yes"))
			},
		})
	}
	return rows
}

// pathRows are pairs of paths where one would hide the other, and a staging path below which the device node of a
// raw block volume does not fit.
func pathRows(method protoreflect.MethodDescriptor) []badRow {
	fields := method.Input().Fields()
	staging, target := fields.ByName("staging_target_path"), fields.ByName("target_path")
	capability := fields.ByName("volume_capability")
	var rows []badRow
	if staging != nil && capability != nil {
		rows = append(rows, badRow{
			name:     "staging_target_path of 4059 bytes for raw block",
			code:     codes.InvalidArgument,
			mentions: "staging_target_path",
			change: func(m protoreflect.Message) {
				m.Set(staging, protoreflect.ValueOf(text(staging, pathLimit-len("/"+coretest.NoVolumeID)+1)))
				capabilityOf(m, capability, 0).AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
			},
		})
	}
	if staging == nil || target == nil {
		return rows
	}
	for name, paths := range map[string][2]string{
		"target is the staging path":             {"/a/staging", "/a/staging"},
		"target is the staging path, not clean":  {"/a/staging/", "/a//b/../staging/."},
		"target inside the staging path":         {"/a/staging", "/a/staging/target"},
		"target deep inside the staging path":    {"/a/staging", "/a/staging/b/c/target"},
		"staging path inside the target":         {"/a/target/staging", "/a/target"},
		"target is the device's file in staging": {"/a/staging", "/a/staging/" + coretest.NoVolumeID},
	} {
		rows = append(rows, badRow{name: name, code: codes.InvalidArgument, mentions: "target_path",
			change: func(m protoreflect.Message) {
				m.Set(staging, protoreflect.ValueOf(paths[0]))
				m.Set(target, protoreflect.ValueOf(paths[1]))
			}})
	}
	return rows
}

// A legal request with unusual values gets the same code as the ordinary request.
func TestLegalExtremes(t *testing.T) {
	spec := readSpecification(t)
	eachRPC(t, func(t *testing.T, method protoreflect.MethodDescriptor, served badInputRPC) {
		type legalRow struct {
			name   string
			change func(protoreflect.Message)
			want   codes.Code
		}
		rows := []legalRow{{"unchanged", func(protoreflect.Message) {}, served.want}}
		var bare []func(protoreflect.Message)
		fields := method.Input().Fields()
		for i := range fields.Len() {
			field := fields.Get(i)
			name := string(field.Name())
			if _, is := unsupportedFields[field.Name()]; is {
				continue
			}
			if !spec.required(t, field) {
				clear := func(m protoreflect.Message) { m.Clear(field) }
				bare = append(bare, clear)
				want := served.want
				if name == "publish_context" { // the volume context does not have the disk's name either
					want = codes.FailedPrecondition
				}
				rows = append(rows, legalRow{name + " left out", clear, want})
			}
			switch {
			case name == "parameters":
				rows = append(rows, legalRow{name + " of 4 KiB", func(m protoreflect.Message) {
					key := rpc.ParameterPrefixCO + "anything"
					m.Mutable(field).Map().Clear(protoreflect.ValueOf(rpc.KeyBlockSize).MapKey())
					m.Mutable(field).
						Map().
						Set(protoreflect.ValueOf(key).MapKey(), protoreflect.ValueOf(strings.Repeat("v", mapLimit-len(key))))
				}, served.want})
			case field.IsMap():
				rows = append(rows, legalRow{name + " of 4 KiB", fillMap(field, mapLimit), served.want})
			case field.Kind() == protoreflect.StringKind:
				limit := limitOf(t, spec, field)
				want := served.want
				switch name {
				case "volume_id", "node_id":
					want = served.unknownID
				case "starting_token": // not a token of this plugin
					want = codes.Aborted
				}
				rows = append(rows, legalRow{fmt.Sprintf("%s of %d bytes", name, limit), func(m protoreflect.Message) {
					m.Set(field, protoreflect.ValueOf(text(field, limit)))
				}, want})
				if isPath(field) {
					rows = append(rows, legalRow{name + " with a name of 255 bytes", func(m protoreflect.Message) {
						m.Set(field, protoreflect.ValueOf("/path/"+strings.Repeat("n", nameLimit)))
					}, want})
				}
			}
		}
		rows = append(rows, legalRow{"only the required fields", func(m protoreflect.Message) {
			for _, clear := range bare {
				clear(m)
			}
		}, served.want})
		if capability := capabilityField(method); capability != nil {
			for _, mode := range modes {
				rows = append(
					rows,
					legalRow{
						"mode " + mode.String(),
						func(m protoreflect.Message) { capabilityOf(m, capability, 0).AccessMode.Mode = mode },
						served.want,
					},
				)
			}
			rows = append(rows,
				legalRow{"raw block", func(m protoreflect.Message) {
					capabilityOf(m, capability, 0).AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
				}, served.want},
				legalRow{"mount without its optional fields", func(m protoreflect.Message) {
					capabilityOf(m, capability, 0).AccessType = &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}}
				}, served.want},
				legalRow{"mount flags of 4 KiB", func(m protoreflect.Message) {
					capabilityOf(m, capability, 0).GetMount().MountFlags = []string{
						"noatime",
						strings.Repeat("ro,", (mapLimit-len("noatime"))/len("ro,")),
					}
				}, served.want})
		}
		if method.Name() == "CreateVolume" {
			for name, capacity := range map[string]*csi.CapacityRange{"empty": {}, "one byte": {RequiredBytes: 1}, "largest limit": {LimitBytes: math.MaxInt64}} {
				rows = append(rows, legalRow{"capacity_range " + name, func(m protoreflect.Message) {
					m.Interface().(*csi.CreateVolumeRequest).CapacityRange = capacity
				}, codes.OK})
			}
			for name, text := range map[string]string{"white space": "a b\tc\nd\re", "letters": "Größe/ボリューム 💾 ..", "slashes": "../../etc"} {
				rows = append(
					rows,
					legalRow{
						"name with " + name,
						func(m protoreflect.Message) { m.Interface().(*csi.CreateVolumeRequest).Name = text },
						codes.OK,
					},
				)
			}
		}
		e := newEverything(t)
		for i, row := range rows {
			t.Run(row.name, func(t *testing.T) {
				if e.volumeID == "" || method.Name() == "DeleteVolume" || method.Name() == "ControllerPublishVolume" {
					e.volumeID = e.Create(t, fmt.Sprint("legal ", i)) // the last case deleted or published the volume
				}
				request := served.valid(e)
				if create, is := request.(*csi.CreateVolumeRequest); is {
					create.Name = fmt.Sprint("new ", i)
				}
				row.change(request.ProtoReflect())
				_, err := e.invoke(t.Context(), method, request)
				coretest.WantCode(t, err, row.want)
				if method.Name() == "ControllerPublishVolume" && err == nil {
					e.Must(t, e.Unpublish(t, e.volumeID, e.nodeID))
				}
			})
		}
	})
}

// An empty capacity range means the default size, like no range.
func TestCreateVolumeWithoutSize(t *testing.T) {
	r := coretest.New(t)
	for name, capacity := range map[string]*csi.CapacityRange{"no range": nil, "empty range": {}, "largest limit": {LimitBytes: math.MaxInt64}} {
		t.Run(name, func(t *testing.T) {
			req := coretest.CreateRequest(name)
			req.CapacityRange = capacity
			resp, err := r.CreateVolume(t.Context(), req)
			r.Must(t, err)
			if got := resp.GetVolume().GetCapacityBytes(); got != 10*coretest.GiB {
				t.Errorf("%d bytes, want 10 GiB", got)
			}
		})
	}
}

// everything is a rig whose server also has a Node service.
type everything struct {
	*coretest.Rig
	// gate is the way of the controller's requests to the rack.
	gate *coretest.Gate
	// dir has the folders of the orchestrator and of the node.
	dir              string
	volumeID, nodeID string
}

func newEverything(t *testing.T, logs ...*slog.Logger) *everything {
	t.Helper()
	log := coretest.DiscardLog()
	if len(logs) > 0 {
		log = logs[0]
	}
	r := coretest.New(t)
	e := &everything{Rig: r, gate: &coretest.Gate{}, dir: t.TempDir(), nodeID: r.Node(t, "node-a")}
	for _, folder := range []string{"staging", "staged", "state"} {
		r.Must(t, os.Mkdir(e.path(folder), 0o755))
	}
	r.Must(t, os.WriteFile(e.path("staged/precious"), []byte("data"), 0o600))
	client := coretest.RackClient(t, r, func(cfg *rack.Config) { cfg.HTTPClient = &http.Client{Transport: e.gate} })
	e.Conn, _ = coretest.Serve(t, core.NewServer(core.ServerOptions{
		Mode:     "all",
		Identity: core.NewIdentity("test", "", &core.Readiness{}),
		Controller: controller.New(controller.Options{
			Racks: []*rack.Client{client}, Cluster: coretest.Cluster, MaxDisks: 8, Log: log,
		}),
		Node: node.New(node.Options{
			Provider: static.New(
				static.Options{InstanceID: e.nodeID},
			),
			Rack:           "default",
			MaxDisks:       8,
			Devices:        devicetest.NewBare(t).Roots(),
			StateDir:       e.path("state"),
			BlankScanLimit: coretest.GiB,
			DeviceTimeout:  time.Millisecond,
			Log:            log,
		}),
		Log: log,
	}))
	e.volumeID = e.Create(t, "existing")
	return e
}

func (e *everything) path(name string) string { return filepath.Join(e.dir, name) }

// files describes all files and folders below dir.
func (e *everything) files(t *testing.T) map[string]string {
	t.Helper()
	files := map[string]string{}
	e.Must(t, filepath.WalkDir(e.dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := entry.Info()
		if err == nil {
			files[path] = fmt.Sprint(info.Mode(), info.Size(), info.ModTime())
		}
		return err
	}))
	return files
}

// invoke calls an RPC.
func (e *everything) invoke(
	ctx context.Context,
	method protoreflect.MethodDescriptor,
	request proto.Message,
) (proto.Message, error) {
	return invoke(ctx, e.Conn, method, request)
}

func invoke(
	ctx context.Context,
	conn *grpc.ClientConn,
	method protoreflect.MethodDescriptor,
	request proto.Message,
) (proto.Message, error) {
	kind, err := protoregistry.GlobalTypes.FindMessageByName(method.Output().FullName())
	if err != nil {
		return nil, err
	}
	response := kind.New().Interface()
	return response, conn.Invoke(ctx, fmt.Sprintf("/%s/%s", method.Parent().FullName(), method.Name()), request, response)
}

// eachRPC runs a test for each RPC in badInputRPCs, and checks that the plugin serves no other RPC.
func eachRPC(t *testing.T, test func(*testing.T, protoreflect.MethodDescriptor, badInputRPC)) {
	t.Helper()
	e := newEverything(t)
	for _, method := range rpcsOf(t, services...) {
		served, has := badInputRPCs[string(method.Name())]
		if !has {
			if _, err := e.invoke(t.Context(), method, newRequest(t, method)); status.Code(err) != codes.Unimplemented {
				t.Errorf("%s is served (%v) and has no cases here", method.Name(), err)
			}
			continue
		}
		t.Run(string(method.Name()), func(t *testing.T) { test(t, method, served) })
	}
}

// rpcsOf returns the RPCs of these CSI services.
func rpcsOf(t *testing.T, names ...string) []protoreflect.MethodDescriptor {
	t.Helper()
	var rpcs []protoreflect.MethodDescriptor
	for _, name := range names {
		service := csi.File_csi_proto.Services().ByName(protoreflect.Name(name))
		if service == nil {
			t.Fatalf("CSI has no service %s", name)
		}
		for i := range service.Methods().Len() {
			rpcs = append(rpcs, service.Methods().Get(i))
		}
	}
	return rpcs
}

func newRequest(t *testing.T, method protoreflect.MethodDescriptor) proto.Message {
	t.Helper()
	kind, err := protoregistry.GlobalTypes.FindMessageByName(method.Input().FullName())
	if err != nil {
		t.Fatal(err)
	}
	return kind.New().Interface()
}

// descend follows the fields of path from a request. In a list it takes the first entry.
func descend(m protoreflect.Message, path []protoreflect.FieldDescriptor) protoreflect.Message {
	for _, field := range path {
		if field.IsList() {
			m = m.Mutable(field).List().Get(0).Message()
		} else {
			m = m.Mutable(field).Message()
		}
	}
	return m
}

func pathText(path []protoreflect.FieldDescriptor, field protoreflect.FieldDescriptor) string {
	var names []string
	for _, f := range path {
		names = append(names, string(f.Name()))
	}
	if field != nil {
		names = append(names, string(field.Name()))
	}
	return strings.Join(names, ".")
}

// capabilityField returns the field of an RPC that has the volume capability or capabilities.
func capabilityField(method protoreflect.MethodDescriptor) protoreflect.FieldDescriptor {
	for i := range method.Input().Fields().Len() {
		field := method.Input().Fields().Get(i)
		if !field.IsMap() && field.Message() != nil && field.Message().Name() == "VolumeCapability" {
			return field
		}
	}
	return nil
}

func capabilityOf(m protoreflect.Message, field protoreflect.FieldDescriptor, which int) *csi.VolumeCapability {
	value := m.Mutable(field)
	if field.IsList() {
		return value.List().Get(which).Message().Interface().(*csi.VolumeCapability)
	}
	return value.Message().Interface().(*csi.VolumeCapability)
}

// fillMap adds an entry that makes the map size bytes large.
func fillMap(field protoreflect.FieldDescriptor, size int) func(protoreflect.Message) {
	return func(m protoreflect.Message) {
		values, left := m.Mutable(field).Map(), size-len("filler")
		values.Range(func(key protoreflect.MapKey, value protoreflect.Value) bool {
			left -= len(key.String()) + len(value.String())
			return true
		})
		values.Set(protoreflect.ValueOf("filler").MapKey(), protoreflect.ValueOf(strings.Repeat("v", left)))
	}
}

func isPath(field protoreflect.FieldDescriptor) bool {
	return strings.HasSuffix(string(field.Name()), "_path")
}

// limitOf returns the maximum length of a string field in bytes.
func limitOf(t *testing.T, spec specification, field protoreflect.FieldDescriptor) int {
	t.Helper()
	switch overrides := strings.Contains(spec.comment(t, field.FullName()), "overrides the general CSI size limit"); {
	case overrides != isPath(field):
		t.Errorf("%s: this test does not know its limit", field.FullName())
	case overrides:
		return pathLimit
	case field.Name() == "node_id":
		// NodeGetInfo may return a node ID of this length.
		return nodeIDLimit
	}
	return stringLimit
}

// text returns a value for a string field. For a path the value is an absolute path of short names.
func text(field protoreflect.FieldDescriptor, length int) string {
	if isPath(field) {
		return strings.Repeat("/abcdefghi", length/10+1)[:length]
	}
	return strings.Repeat("n", length)
}

// specification maps the full name of each field and oneof to its comment in csi.proto, on one line.
type specification map[protoreflect.FullName]string

// readSpecification reads the csi.proto of the linked version of the specification.
func readSpecification(t *testing.T) specification {
	t.Helper()
	dir, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "github.com/container-storage-interface/spec").Output()
	if err != nil {
		t.Fatal(err)
	}
	proto, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(dir)), "csi.proto"))
	if err != nil {
		t.Fatal(err)
	}
	spec := specification{}
	var scope, comment []string // the open blocks, and the comment before this line
	note := func(name, comment string) {
		open := slices.DeleteFunc(
			slices.Concat([]string{"csi.v1"}, scope, []string{name}),
			func(s string) bool { return s == "" },
		)
		spec[protoreflect.FullName(strings.Join(open, "."))] = comment
	}
	for line := range strings.Lines(string(proto)) {
		line = strings.TrimSpace(line)
		if text, is := strings.CutPrefix(line, "//"); is {
			comment = append(comment, strings.Fields(text)...)
			continue
		}
		if line == "" {
			continue
		}
		text := strings.Join(comment, " ")
		comment = nil
		opened := opens.FindStringSubmatch(line)
		switch {
		case opened != nil && opened[1] == "oneof":
			note(opened[2], text)
			scope = append(scope, "") // the fields of a oneof belong to the message
		case opened != nil:
			scope = append(scope, opened[2])
		case strings.HasSuffix(line, "{"):
			scope = append(scope, "")
		default:
			if field := declares.FindStringSubmatch(line); field != nil {
				note(field[1], text)
			}
		}
		if strings.HasPrefix(line, "}") || opened != nil && strings.HasSuffix(line, "}") {
			scope = scope[:len(scope)-1]
		}
	}
	return spec
}

var (
	opens    = regexp.MustCompile(`^(message|enum|oneof|service) +(\w+) *\{`)
	declares = regexp.MustCompile(`^(?:repeated +)?(?:map<[^>]*>|[.\w]+) +(\w+) += +\d+`)

	saysRequired = regexp.MustCompile(`[Tt]his field is REQUIRED|[Tt]his is a REQUIRED field`)
	saysOptional = regexp.MustCompile(`[Tt]his field is OPTIONAL|[Tt]his is an OPTIONAL field`)
)

func (s specification) comment(t *testing.T, name protoreflect.FullName) string {
	t.Helper()
	comment, has := s[name]
	if !has {
		t.Fatalf("this test finds no %s in csi.proto", name)
	}
	return comment
}

// required reports whether a field must be set.
func (s specification) required(t *testing.T, field protoreflect.FieldDescriptor) bool {
	t.Helper()
	comment := s.comment(t, field.FullName())
	required, optional := saysRequired.MatchString(comment), saysOptional.MatchString(comment)
	if strings.Contains(comment, "It MUST be set if the Node Plugin implements the `STAGE_UNSTAGE_VOLUME`") {
		return true // this plugin implements it
	}
	if required == optional && field.ContainingOneof() == nil && field.Name() != "segments" {
		t.Errorf("%s: this test cannot tell whether it is required: %s", field.FullName(), comment)
	}
	return required
}

// readSpecification finds the same fields as the descriptors have.
func TestSpecificationIsReadWhole(t *testing.T) {
	spec := readSpecification(t)
	want := map[protoreflect.FullName]bool{}
	var collect func(protoreflect.MessageDescriptors)
	collect = func(messages protoreflect.MessageDescriptors) {
		for i := range messages.Len() {
			message := messages.Get(i)
			if message.IsMapEntry() {
				continue
			}
			for j := range message.Fields().Len() {
				want[message.Fields().Get(j).FullName()] = true
			}
			for j := range message.Oneofs().Len() {
				want[message.Oneofs().Get(j).FullName()] = true
			}
			collect(message.Messages())
		}
	}
	collect(csi.File_csi_proto.Messages())
	got := map[protoreflect.FullName]bool{}
	for name := range spec {
		if csi.File_csi_proto.Extensions().ByName(name.Name()) == nil {
			got[name] = true
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("fields (-descriptors +csi.proto):\n%s", diff)
	}
}
