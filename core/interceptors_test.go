// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package core_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/oxidecomputer/oxide-csi-plugin/core"
	"github.com/oxidecomputer/oxide-csi-plugin/core/controller"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// canary is a text that must not appear in messages or logs.
const canary = "canary-9c1f"

// A panic fails one call and is logged. Its value is neither in the message nor in the log, and the
// volume is unlocked.
func TestPanicFailsOneCall(t *testing.T) {
	for name, value := range map[string]any{
		"string": canary,
		"error":  fmt.Errorf("token %s", canary),
		"struct": struct{ secret string }{canary},
		"map":    map[string]string{"key": canary},
	} {
		t.Run(name, func(t *testing.T) {
			gate, log := &coretest.Gate{}, &simtest.Output{}
			r, conn, _ := gatedController(t, gate, func(o *core.ServerOptions) {
				o.Log = slog.New(slog.NewJSONHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug}))
			})
			client := csi.NewControllerClient(conn)
			gate.Panic("POST", "/v1/disks", value)
			_, err := client.CreateVolume(t.Context(), coretest.CreateRequest("v"))
			coretest.WantCode(t, err, codes.Unavailable, "CreateVolume", "log") // not final: the disk may exist
			if strings.Contains(err.Error(), canary) || strings.Contains(log.String(), canary) {
				t.Errorf("the message or the log has the panic's value: %v\n%s", err, log)
			}
			panics := records(t, log, "panic")
			if len(panics) != 1 || panics[0]["method"] != "CreateVolume" || panics[0]["type"] != fmt.Sprintf("%T", value) {
				t.Errorf("logged %v", panics)
			} else if stack := fmt.Sprint(panics[0]["stack"]); !strings.Contains(stack, "CreateVolume") || !strings.Contains(stack, "create.go:") {
				t.Errorf("the stack does not show the function: %s", stack)
			}
			// The minute is for a busy machine. On a volume that stays locked, the call ends with ABORTED.
			if _, err := client.CreateVolume(coretest.WithTimeout(t, time.Minute), coretest.CreateRequest("v")); err != nil {
				t.Errorf("the next call: %v", err)
			}
			if answered := records(t, log, "responded"); len(answered) != 2 {
				t.Errorf("%d calls logged, want 2", len(answered))
			}
			if ids := r.Volumes(t); len(ids) != 1 {
				t.Errorf("%d disks, want 1", len(ids))
			}
		})
	}
}

// noWait is a deadline that leaves no time to wait for a volume's lock: the interceptor keeps two seconds for the
// answer.
const noWait = 2 * time.Second

// After a call that ended early, the volume is unlocked as soon as the rack has answered.
func TestVolumeIsUnlockedAfter(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name string
		end  func(context.Context) (context.Context, context.CancelFunc)
		code codes.Code
	}{
		{"a deadline", func(ctx context.Context) (context.Context, context.CancelFunc) {
			// Real time, because gRPC's sockets do not work in a synctest bubble. Before it ends, the call must reach the
			// rack's client, also on a busy machine.
			return context.WithTimeout(ctx, 5*time.Second)
		}, codes.DeadlineExceeded},
		{"cancellation", func(ctx context.Context) (context.Context, context.CancelFunc) {
			return context.WithCancel(ctx)
		}, codes.Canceled},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			gate := &coretest.Gate{}
			r, conn, _ := gatedController(t, gate)
			client := csi.NewControllerClient(conn)
			hold := gate.Hold("POST", "/v1/disks")
			ctx, cancel := test.end(t.Context())
			defer cancel()
			answered := make(chan error, 1)
			go func() {
				_, err := client.CreateVolume(ctx, coretest.CreateRequest("v"))
				answered <- err
			}()
			hold.Entered(t)
			if test.code == codes.Canceled {
				cancel()
			}
			coretest.WantCode(t, <-answered, test.code)
			hold.Release()
			if _, err := client.CreateVolume(coretest.WithTimeout(t, time.Minute), coretest.CreateRequest("v")); err != nil {
				t.Errorf("the next call: %v", err)
			}
			if ids := r.Volumes(t); len(ids) != 1 {
				t.Errorf("%d disks, want 1", len(ids))
			}
		})
	}
}

// A second call for a volume waits for the first and returns the same answer. Calls for other volumes do not wait.
func TestSecondCallWaits(t *testing.T) {
	gate, log := &coretest.Gate{}, &simtest.Output{}
	r, conn, _ := gatedController(t, gate, func(o *core.ServerOptions) {
		o.Log = slog.New(slog.NewJSONHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	})
	client := csi.NewControllerClient(conn)
	hold := gate.Hold("POST", "/v1/disks")
	type answer struct {
		resp *csi.CreateVolumeResponse
		err  error
	}
	answers := make(chan answer, 2)
	create := func() {
		resp, err := client.CreateVolume(t.Context(), coretest.CreateRequest("v"))
		answers <- answer{resp, err}
	}
	go create()
	hold.Entered(t)
	go create()
	await.Eventually(t, "the second call is logged", func() bool { return len(records(t, log, "request")) == 2 })

	if _, err := client.CreateVolume(coretest.WithTimeout(t, time.Minute), coretest.CreateRequest("w")); err != nil {
		t.Errorf("another volume: %v", err)
	}
	select {
	case a := <-answers:
		t.Fatalf("answered while the first call was delayed: %v", a)
	default:
	}
	hold.Release()
	first, second := <-answers, <-answers
	coretest.Must(t, errors.Join(first.err, second.err))
	coretest.WantSame(t, first.resp, second.resp)
	if ids := r.Volumes(t); len(ids) != 2 {
		t.Errorf("%d disks, want 2", len(ids))
	}
}

// A call that waits for a volume's lock answers ABORTED two seconds before its deadline. It waits in real time, since
// gRPC's sockets do not work in a synctest bubble.
func TestWaitEndsBeforeTheDeadline(t *testing.T) {
	gate := &coretest.Gate{}
	r, conn, _ := gatedController(t, gate)
	client := csi.NewControllerClient(conn)
	id := r.Create(t, "v")
	hold := gate.Hold("DELETE", "/v1/disks/")
	answered := make(chan error, 1)
	go func() {
		_, err := client.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id})
		answered <- err
	}()
	hold.Entered(t)
	for _, test := range []struct{ deadline, wait time.Duration }{{noWait, 0}, {2500 * time.Millisecond, 500 * time.Millisecond}} {
		start := time.Now()
		// An ID in capital letters names the same volume.
		_, err := client.DeleteVolume(
			coretest.WithTimeout(t, test.deadline),
			&csi.DeleteVolumeRequest{VolumeId: strings.ToUpper(id)},
		)
		coretest.WantCode(t, err, codes.Aborted, id, "retry")
		if took := time.Since(start); took < test.wait-50*time.Millisecond || took > test.deadline {
			t.Errorf("with a deadline of %s it took %s, want %s", test.deadline, took, test.wait)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(50*time.Millisecond, cancel)
	_, err := client.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: id})
	coretest.WantCode(t, err, codes.Canceled)
	hold.Release()
	coretest.Must(t, <-answered)
}

// RPCs that change nothing do not wait for a volume's lock.
func TestReadsTakeNoLock(t *testing.T) {
	t.Parallel()
	e := newEverything(t)
	hold := e.gate.Hold("DELETE", "/v1/disks/")
	controller, node, identity := csi.NewControllerClient(e.Conn), csi.NewNodeClient(e.Conn), csi.NewIdentityClient(e.Conn)
	answered := make(chan error, 1)
	go func() {
		_, err := controller.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: e.volumeID})
		answered <- err
	}()
	hold.Entered(t)
	// A call that needs the lock answers ABORTED at once, because its deadline leaves no time to wait.
	_, err := controller.ControllerUnpublishVolume(
		coretest.WithTimeout(t, noWait),
		&csi.ControllerUnpublishVolumeRequest{VolumeId: e.volumeID},
	)
	coretest.WantCode(t, err, codes.Aborted)
	for name, call := range map[string]func(context.Context) error{
		"ValidateVolumeCapabilities": func(ctx context.Context) error {
			resp, err := controller.ValidateVolumeCapabilities(ctx, &csi.ValidateVolumeCapabilitiesRequest{VolumeId: e.volumeID, VolumeCapabilities: []*csi.VolumeCapability{coretest.MountWriter()}})
			if err == nil && resp.GetConfirmed() == nil {
				return fmt.Errorf("not confirmed: %s", resp.GetMessage())
			}
			return err
		},
		"NodeGetVolumeStats": func(ctx context.Context) error {
			_, err := node.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: e.volumeID, VolumePath: e.path("target")})
			coretest.WantCode(t, err, codes.NotFound)
			return nil
		},
		"NodeGetInfo": func(ctx context.Context) error {
			_, err := node.NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
			return err
		},
		"NodeGetCapabilities": func(ctx context.Context) error {
			_, err := node.NodeGetCapabilities(ctx, &csi.NodeGetCapabilitiesRequest{})
			return err
		},
		"ControllerGetCapabilities": func(ctx context.Context) error {
			_, err := controller.ControllerGetCapabilities(ctx, &csi.ControllerGetCapabilitiesRequest{})
			return err
		},
		"GetPluginInfo": func(ctx context.Context) error {
			_, err := identity.GetPluginInfo(ctx, &csi.GetPluginInfoRequest{})
			return err
		},
		"GetPluginCapabilities": func(ctx context.Context) error {
			_, err := identity.GetPluginCapabilities(ctx, &csi.GetPluginCapabilitiesRequest{})
			return err
		},
		"Probe": func(ctx context.Context) error {
			_, err := identity.Probe(ctx, &csi.ProbeRequest{})
			return err
		},
	} {
		if err := call(coretest.WithTimeout(t, time.Minute)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	select {
	case err := <-answered:
		t.Fatalf("the deletion ended before the rack answered: %v", err)
	default:
	}
	hold.Release()
	coretest.Must(t, <-answered)
}

// The log at debug level has the fields that identify a request, and no secrets.
func TestLogHoldsNoSecrets(t *testing.T) {
	log := &simtest.Output{}
	e := newEverything(t, slog.New(slog.NewJSONHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug})))
	secrets := 0
	for _, rpc := range rpcsOf(t, services...) {
		for name, value := range map[string]string{"ordinary": canary, "too large": strings.Repeat(canary, 1000)} {
			request := newRequest(t, rpc)
			if served, is := badInputRPCs[string(rpc.Name())]; is {
				request = served.valid(e)
			}
			secrets += setSecrets(request.ProtoReflect(), value)
			if create, is := request.(*csi.CreateVolumeRequest); is {
				create.Name += name
			}
			if _, err := e.invoke(t.Context(), rpc, request); err != nil && strings.Contains(err.Error(), canary) {
				t.Errorf("%s, %s: %v", rpc.Name(), name, err)
			}
		}
	}
	if capability := fullCapability(); true { // with a rejected mount flag
		capability.GetMount().MountFlags = []string{canary + `"`, "loop=" + canary}
		_, err := csi.NewNodeClient(e.Conn).NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{
			VolumeId:          e.volumeID,
			StagingTargetPath: e.path("staging"),
			VolumeCapability:  capability,
			PublishContext:    map[string]string{rpc.KeyDiskName: "d"},
		})
		coretest.WantCode(t, err, codes.InvalidArgument, "mount flags")
		if strings.Contains(err.Error(), canary) {
			t.Error(err)
		}
	}
	if secrets < 30 { // the linked version of the specification has 46
		t.Fatalf("found only %d fields with secrets", secrets)
	}
	for line := range strings.Lines(log.String()) {
		if strings.Contains(line, canary) {
			t.Errorf("logged: %.500s", line)
		}
	}
	if len(records(t, log, "request")) == 0 {
		t.Error("at debug level no requests are logged")
	}
	for _, want := range []map[string]any{
		{"method": "CreateVolume", "name": "newordinary", "code": "OK", "level": "INFO"},
		{"method": "DeleteVolume", "volume_id": e.volumeID, "code": "OK", "level": "INFO"},
		{"method": "ControllerPublishVolume", "volume_id": e.volumeID, "node_id": e.nodeID},
		{"method": "NodeStageVolume", "volume_id": e.volumeID, "staging_target_path": e.path("no-such-folder/staging"), "code": "FailedPrecondition", "level": "ERROR"},
		{"method": "NodePublishVolume", "volume_id": e.volumeID, "target_path": e.path("no-such-folder/target")},
		{"method": "NodeGetVolumeStats", "volume_id": e.volumeID, "code": "NotFound"},
		{"method": "Probe", "code": "OK", "level": "DEBUG"},
	} {
		found := false
		for _, record := range records(t, log, "responded") {
			matches := record["request_id"] != nil && record["duration"] != nil
			for key, value := range want {
				matches = matches && record[key] == value
			}
			found = found || matches
		}
		if !found {
			t.Errorf("no line of the log has %v", want)
		}
	}
}

func TestRequestsAreLoggedAtDebugOnly(t *testing.T) {
	log := &simtest.Output{}
	e := newEverything(t, slog.New(slog.NewJSONHandler(log, nil)))
	_, err := csi.NewControllerClient(e.Conn).CreateVolume(t.Context(), coretest.CreateRequest("v"))
	e.Must(t, err)
	_, err = csi.NewIdentityClient(e.Conn).Probe(t.Context(), &csi.ProbeRequest{})
	e.Must(t, err)
	if lines := strings.Count(log.String(), "\n"); lines != 1 || len(records(t, log, "responded")) != 1 {
		t.Errorf("want one line, for CreateVolume, got\n%s", log)
	}
}

// setSecrets sets every field of a request that may hold a secret, nested fields too, and returns their number.
func setSecrets(message protoreflect.Message, value string) int {
	count := 0
	fields := message.Descriptor().Fields()
	for i := range fields.Len() {
		field := fields.Get(i)
		switch {
		case field.Name() == "mount_flags":
			message.Mutable(field).List().Append(protoreflect.ValueOfString("context=" + value)) // an allowed flag
			count++
		case !proto.GetExtension(field.Options(), csi.E_CsiSecret).(bool):
			if field.Message() == nil || field.IsMap() || !message.Has(field) {
				continue
			}
			if !field.IsList() {
				count += setSecrets(message.Mutable(field).Message(), value)
				continue
			}
			for j := range message.Get(field).List().Len() {
				count += setSecrets(message.Mutable(field).List().Get(j).Message(), value)
			}
		case field.IsMap():
			message.Mutable(field).Map().Set(protoreflect.ValueOf("key").MapKey(), protoreflect.ValueOf(value))
			count++
		default:
			message.Set(field, protoreflect.ValueOfString(value))
			count++
		}
	}
	return count
}

// records returns the lines of a JSON log that have this message.
func records(t *testing.T, log *simtest.Output, message string) []map[string]any {
	t.Helper()
	var list []map[string]any
	for line := range strings.Lines(log.String()) {
		var record map[string]any
		if err := json.Unmarshal([]byte(line), &record); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		if record["msg"] == message {
			list = append(list, record)
		}
	}
	return list
}

// gatedController is a controller whose HTTP requests pass a gate. The rig's own controller uses the same rack without
// a gate.
func gatedController(
	t *testing.T,
	gate *coretest.Gate,
	change ...func(*core.ServerOptions),
) (*coretest.Rig, *grpc.ClientConn, *core.Server) {
	t.Helper()
	r := coretest.New(t)
	opts := coretest.ServerOptions("controller")
	for _, c := range change {
		c(&opts)
	}
	client := coretest.RackClient(t, r, func(cfg *rack.Config) { cfg.HTTPClient = &http.Client{Transport: gate} })
	opts.Controller = controller.New(
		controller.Options{
			Racks:    []*rack.Client{client},
			Cluster:  coretest.Cluster,
			MaxDisks: 8,
			Metrics:  opts.Metrics,
			Log:      coretest.DiscardLog(),
		},
	)
	server := core.NewServer(opts)
	conn, _ := coretest.Serve(t, server)
	return r, conn, server
}
