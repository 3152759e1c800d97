// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package coretest runs the plugin's services on a real socket, with a simulated rack, in the process of the test.
package coretest

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/oxidecomputer/oxide-csi-plugin/core"
	"github.com/oxidecomputer/oxide-csi-plugin/core/controller"
	"github.com/oxidecomputer/oxide-csi-plugin/core/metrics"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/restart"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/core/socket"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/openapi"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// Constants of every rig.
const (
	Token   = "oxide-token-rig"
	Project = "demo"
	Cluster = "rig"
	GiB     = int64(1) << 30
	// NoVolumeID is the ID of no disk.
	NoVolumeID = "00000000-0000-4000-8000-000000000000"
)

// Rig is a controller on a real socket and a simulated rack without guests. The controller uses the real SDK.
type Rig struct {
	csi.ControllerClient
	csi.IdentityClient
	csi.NodeClient

	// Sim is the control endpoint of the rack, which runs in the process of the test.
	Sim *simtest.Sim
	// SDK is a client of the rack with full access.
	SDK *oxide.Client
	// Token holds the token that the controller uses now, a string.
	Token *atomic.Value
	// Conn is the connection of the clients to Server.
	Conn    *grpc.ClientConn
	Server  *core.Server
	Options Options
	// CallContext, if not nil, derives the context of each call.
	CallContext func(context.Context) (context.Context, context.CancelFunc)
	// Crash ends the planning of restarts at once. Retire ends it as a termination signal does.
	Crash, Retire func()
}

// Options configure a [Rig]. [New] sets defaults.
type Options struct {
	Rack        simrack.Options
	Cluster     string
	RackName    string
	MaxDisks    int
	DetachGrace time.Duration
	// SweepAge makes the controller delete temporary snapshots of this age. 0 means that it deletes none.
	SweepAge time.Duration
	// OtherRacksWait and LookAge are the controller's options of these names. 0 means a LookAge that is safe for one
	// controller.
	OtherRacksWait, LookAge time.Duration
	// Restarts configures attach mode restart. Nil means attach mode hot.
	Restarts *controller.PlannedRestarts
	// Orchestrator tells who uses a volume. It may be nil.
	Orchestrator orchestrator.Claims
	// CleanUpRestarts makes a controller in attach mode hot end the restarts that attach mode restart left behind.
	CleanUpRestarts *restart.Options
	// Unplanned makes the controller run without the engines that plan restarts.
	Unplanned bool
	Metrics   *metrics.Metrics
	Log       io.Writer
}

// New starts a simulated rack and a controller for it. Both end with the test.
func New(t *testing.T, change ...func(*Options)) *Rig {
	t.Helper()
	opts := Options{
		Rack: simrack.Options{
			Token:     Token,
			Project:   Project,
			Instances: []string{"node-a", "node-b"},
			Hotplug:   true,
		},
		Cluster:  Cluster,
		RackName: "default",
		MaxDisks: 8,
		Log:      io.Discard,
	}
	for _, c := range change {
		c(&opts)
	}
	r := &Rig{Sim: Simulate(t, opts.Rack), Options: opts}
	r.Token = &atomic.Value{}
	r.Token.Store(Token)
	var err error
	if r.SDK, err = oxide.NewClient(oxide.WithHost(r.Sim.Host), oxide.WithToken(Token)); err != nil {
		t.Fatal(err)
	}
	r.Start(t)
	return r
}

// Simulate serves a simulated rack in this process.
func Simulate(t *testing.T, opts simrack.Options) *simtest.Sim {
	t.Helper()
	opts.Log = slog.New(slog.DiscardHandler)
	sim, err := simrack.New(opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := sim.Close(); err != nil {
			t.Error(err)
		}
	})
	api, control := httptest.NewServer(openapi.Validator(t)(sim.API())), httptest.NewServer(sim.Control())
	t.Cleanup(api.Close)
	t.Cleanup(control.Close)
	return &simtest.Sim{Host: api.URL, Token: Token, Project: Project, Control: control.URL}
}

// Start starts a controller for the rack.
func (r *Rig) Start(t *testing.T) {
	t.Helper()
	client, err := rack.New(rack.Config{
		Name:     r.Options.RackName,
		Host:     r.Sim.Host,
		Project:  Project,
		Token:    func() (string, error) { return r.Token.Load().(string), nil },
		MaxDisks: r.Options.MaxDisks,
		// These racks execute a request at once.
		LostAnswerWait: time.Millisecond,
	})
	if err != nil {
		t.Fatal(err)
	}
	// The plugin makes this call when it starts, so that later no RPC makes it.
	if _, err := client.ProjectID(t.Context()); err != nil {
		t.Fatal(err)
	}
	// Not after the start, because a controller may begin to restart instances at once.
	r.ClearCalls(t)
	r.StartWith(t, client)
}

// StartWith starts a controller with these racks.
func (r *Rig) StartWith(t *testing.T, racks ...*rack.Client) {
	t.Helper()
	log := slog.New(slog.NewTextHandler(r.Options.Log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	controller := controller.New(controller.Options{
		Racks:          racks,
		Cluster:        r.Options.Cluster,
		MaxDisks:       r.Options.MaxDisks,
		DetachGrace:    r.Options.DetachGrace,
		TemporaryAge:   r.Options.SweepAge,
		OtherRacksWait: r.Options.OtherRacksWait,
		LookAge:        max(r.Options.LookAge, 250*time.Millisecond),
		Restarts:       r.Options.Restarts,
		Orchestrator:   r.Options.Orchestrator,
		Metrics:        r.Options.Metrics,
		Log:            log,
	})
	if !r.Options.Unplanned {
		r.PlanRestarts(t, controller, racks)
	}
	if r.Options.SweepAge > 0 {
		controller.StartSweeping(t.Context())
	}
	r.Server = core.NewServer(core.ServerOptions{
		Mode:       "controller",
		Identity:   core.NewIdentity("test", "", &core.Readiness{}),
		Controller: controller,
		Log:        log,
	})
	r.serve(t)
}

// PlanRestarts runs the controller's engines and its deferred detaches until the test ends, or until [Rig.Crash].
func (r *Rig) PlanRestarts(t *testing.T, controller *controller.Service, racks []*rack.Client) {
	ctx, cancel := context.WithCancel(context.Background())
	var engines sync.WaitGroup
	for _, client := range racks {
		engines.Go(func() {
			if r.Options.CleanUpRestarts != nil {
				controller.CleanUpRestarts(ctx, client, *r.Options.CleanUpRestarts)
			}
			controller.PlanRestarts(ctx, client)
		})
		engines.Go(func() { controller.DetachLater(ctx, client) })
	}
	r.Crash = func() {
		cancel()
		engines.Wait()
	}
	r.Retire = func() { controller.RetireRestarts(t.Context()) }
	t.Cleanup(r.Crash)
}

// Again starts another controller for the same rack: a replica, or the same controller after a restart.
func (r *Rig) Again(t *testing.T) *Rig {
	t.Helper()
	other := *r
	other.Start(t)
	return &other
}

func (r *Rig) serve(t *testing.T) {
	t.Helper()
	withCallContext := grpc.WithUnaryInterceptor(func(
		ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption,
	) error {
		if r.CallContext != nil {
			var cancel context.CancelFunc
			ctx, cancel = r.CallContext(ctx)
			defer cancel()
		}
		return invoke(ctx, method, req, reply, cc, opts...)
	})
	r.Conn, _ = Serve(t, r.Server, withCallContext)
	r.IdentityClient = csi.NewIdentityClient(r.Conn)
	r.ControllerClient = csi.NewControllerClient(r.Conn)
	r.NodeClient = csi.NewNodeClient(r.Conn)
}

// MountWriter is the capability of a filesystem that one node writes.
func MountWriter() *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
	}
}

// CreateRequest is a request for a volume of 1 GiB.
func CreateRequest(name string) *csi.CreateVolumeRequest {
	return &csi.CreateVolumeRequest{
		Name:               name,
		CapacityRange:      &csi.CapacityRange{RequiredBytes: GiB},
		VolumeCapabilities: []*csi.VolumeCapability{MountWriter()},
	}
}

// Create makes a volume and returns its ID.
func (r *Rig) Create(t *testing.T, name string) string {
	t.Helper()
	resp, err := r.CreateVolume(t.Context(), CreateRequest(name))
	if err != nil {
		t.Fatal(err)
	}
	return resp.GetVolume().GetVolumeId()
}

// Publish attaches a volume to a node.
func (r *Rig) Publish(t *testing.T, volumeID, nodeID string) error {
	t.Helper()
	_, err := r.ControllerPublishVolume(
		t.Context(),
		&csi.ControllerPublishVolumeRequest{VolumeId: volumeID, NodeId: nodeID, VolumeCapability: MountWriter()},
	)
	return err
}

// Unpublish detaches a volume from a node.
func (r *Rig) Unpublish(t *testing.T, volumeID, nodeID string) error {
	t.Helper()
	_, err := r.ControllerUnpublishVolume(
		t.Context(),
		&csi.ControllerUnpublishVolumeRequest{VolumeId: volumeID, NodeId: nodeID},
	)
	return err
}

// Delete deletes a volume.
func (r *Rig) Delete(t *testing.T, volumeID string) error {
	t.Helper()
	_, err := r.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: volumeID})
	return err
}

// Node returns the ID of an instance.
func (r *Rig) Node(t *testing.T, name string) string {
	t.Helper()
	instance, err := r.SDK.InstanceView(
		t.Context(),
		oxide.InstanceViewParams{Instance: oxide.NameOrId(name), Project: Project},
	)
	if err != nil {
		t.Fatal(err)
	}
	return instance.Id
}

// Disk returns a disk as the rack shows it.
func (r *Rig) Disk(t *testing.T, id string) *oxide.Disk {
	t.Helper()
	disk, err := r.SDK.DiskView(t.Context(), oxide.DiskViewParams{Disk: oxide.NameOrId(id)})
	if err != nil {
		t.Fatal(err)
	}
	return disk
}

// Holder is the ID of the instance to which a disk is attached. It is empty for a detached disk.
func (r *Rig) Holder(t *testing.T, id string) string {
	t.Helper()
	if s, ok := r.Disk(t, id).State.AsAttached(); ok {
		return s.Instance
	}
	return ""
}

// UserDisk makes a disk as a user would by hand.
func (r *Rig) UserDisk(t *testing.T, project, name, description string) *oxide.Disk {
	t.Helper()
	disk, err := r.SDK.DiskCreate(
		t.Context(),
		oxide.DiskCreateParams{Project: oxide.NameOrId(project), Body: &oxide.DiskCreate{
			Name:        oxide.Name(name),
			Description: description,
			Size:        oxide.ByteCount(GiB),
			DiskBackend: oxide.DiskBackend{
				Value: &oxide.DiskBackendDistributed{DiskSource: oxide.DiskSource{Value: &oxide.DiskSourceBlank{BlockSize: 512}}},
			},
		}},
	)
	if err != nil {
		t.Fatal(err)
	}
	return disk
}

// AttachByHand attaches a disk as a user would.
func (r *Rig) AttachByHand(t *testing.T, diskID, instanceID string) {
	t.Helper()
	_, err := r.SDK.InstanceDiskAttach(
		t.Context(),
		oxide.InstanceDiskAttachParams{
			Instance: oxide.NameOrId(instanceID),
			Body:     &oxide.DiskPath{Disk: oxide.NameOrId(diskID)},
		},
	)
	if err != nil {
		t.Fatal(err)
	}
}

// Volumes lists the IDs of the rack's disks except the boot disks.
func (r *Rig) Volumes(t *testing.T) []string {
	t.Helper()
	disks, err := r.SDK.DiskListAllPages(t.Context(), oxide.DiskListParams{Project: Project})
	if err != nil {
		t.Fatal(err)
	}
	var ids []string
	for _, disk := range disks {
		if !strings.HasSuffix(string(disk.Name), "-boot") {
			ids = append(ids, disk.Id)
		}
	}
	return ids
}

// Must ends the test if err is not nil.
func (r *Rig) Must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// ClearCalls sets the counts of API calls to 0.
func (r *Rig) ClearCalls(t *testing.T) {
	t.Helper()
	r.Must(t, r.Sim.ClearCalls(t.Context()))
}

// Calls counts the API calls since the last [Rig.ClearCalls], by operation.
func (r *Rig) Calls(t *testing.T) map[string]int {
	t.Helper()
	calls, err := r.Sim.Calls(t.Context())
	r.Must(t, err)
	return calls.Counts
}

// WantCalls compares the API calls since the last [Rig.ClearCalls].
func (r *Rig) WantCalls(t *testing.T, want map[string]int) {
	t.Helper()
	if diff := cmp.Diff(want, r.Calls(t)); diff != "" {
		t.Errorf("API calls (-want +got):\n%s", diff)
	}
}

// Attempts is how often package rack sends a repeatable request that gets no answer or 503.
const Attempts = 3

// Inject adds a fault that hits one call of package rack, with all its Attempts.
func (r *Rig) Inject(t *testing.T, operation, kind string, code int) {
	t.Helper()
	fault := simtest.Fault{Operation: operation, Kind: kind, Status: code}
	if once := strings.HasSuffix(operation, "_create") ||
		strings.HasSuffix(operation, "_delete"); !once &&
		(kind != simtest.FaultStatus || code == 503) {
		fault.Count = new(Attempts)
	}
	switch code {
	case 400:
		fault.ErrorCode, fault.Message = "InvalidRequest", "no"
	case 401:
		fault.ErrorCode, fault.Message = "Unauthorized", "credentials missing or invalid"
	case 403:
		fault.ErrorCode, fault.Message = "Forbidden", "Forbidden"
	case 409:
		fault.ErrorCode, fault.Message = "Conflict", "another change came first"
	case 500:
		fault.ErrorCode, fault.Message = "Internal", "Internal Server Error"
	case 503:
		fault.ErrorCode, fault.Message = "ServiceNotAvailable", "Service Unavailable"
	case 507:
		fault.ErrorCode, fault.Message = "InsufficientCapacity", "Insufficient capacity: Not enough storage"
	}
	_, err := r.Sim.Inject(t.Context(), fault)
	r.Must(t, err)
}

// WantCode checks the code of an RPC's error, and that its message mentions these texts.
func WantCode(t *testing.T, err error, want codes.Code, mentions ...string) {
	t.Helper()
	if got := status.Code(err); got != want {
		t.Fatalf("code %s, want %s: %v", got, want, err)
	}
	if want != codes.OK && status.Convert(err).Message() == "" {
		t.Error("the error has no message")
	}
	for _, text := range mentions {
		if !strings.Contains(status.Convert(err).Message(), text) {
			t.Errorf("message %q does not mention %q", status.Convert(err).Message(), text)
		}
	}
}

// WantSame compares two answers.
func WantSame[M any](t *testing.T, got, want M) {
	t.Helper()
	if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
		t.Errorf("answers differ (-want +got):\n%s", diff)
	}
}

// WithTimeout returns the test's context with a timeout.
func WithTimeout(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// Serve runs a server on its own socket until the test ends. It checks then that the server left no file behind.
func Serve(t *testing.T, server *core.Server, options ...grpc.DialOption) (*grpc.ClientConn, string) {
	t.Helper()
	dir := ShortDir(t)
	path := filepath.Join(dir, "csi.sock")
	listener, err := socket.Listen(path)
	Must(t, err)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	options = append(
		options,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithChainUnaryInterceptor(checkErrorLengths(t)),
	)
	conn, err := grpc.NewClient("unix://"+path, options...)
	Must(t, err)
	t.Cleanup(func() {
		Must(t, conn.Close())
		server.StopNow()
		Must(t, <-served)
		if left := Listing(t, dir); len(left) != 0 {
			t.Errorf("the server left %v behind", left)
		}
	})
	return conn, path
}

// ShortDir makes a folder with a short path, because the path of a socket has at most 107 bytes.
func ShortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "csi")
	Must(t, err)
	t.Cleanup(func() { Must(t, os.RemoveAll(dir)) })
	return dir
}

// Must ends the test if err is not nil.
func Must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// DiscardLog returns a log that discards everything.
func DiscardLog() *slog.Logger { return slog.New(slog.DiscardHandler) }

// Listing describes each entry of a folder: its mode and its content or inode.
func Listing(t *testing.T, dir string) map[string]string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	Must(t, err)
	found := map[string]string{}
	for _, entry := range entries {
		path := filepath.Join(dir, entry.Name())
		info, err := entry.Info()
		Must(t, err)
		text := fmt.Sprintf("%v, inode %d", info.Mode(), info.Sys().(*syscall.Stat_t).Ino)
		if info.Mode().IsRegular() {
			content, err := os.ReadFile(path)
			Must(t, err)
			text = fmt.Sprintf("%v %q", info.Mode(), content)
		}
		found[entry.Name()] = text
	}
	return found
}

// ServerOptions are the options of a server with the Identity service only.
func ServerOptions(mode string) core.ServerOptions {
	return core.ServerOptions{Mode: mode, Identity: core.NewIdentity("test", "", &core.Readiness{}), Log: DiscardLog()}
}

// RequireRacks is a topology requirement for these racks.
func RequireRacks(names ...string) *csi.TopologyRequirement {
	requirement := &csi.TopologyRequirement{}
	for _, name := range names {
		requirement.Requisite = append(
			requirement.Requisite,
			&csi.Topology{Segments: map[string]string{rpc.TopologySegmentRack: name}},
		)
	}
	requirement.Preferred = requirement.Requisite
	return requirement
}

// RackClient returns another client of the rig's rack.
func RackClient(t *testing.T, r *Rig, change func(*rack.Config)) *rack.Client {
	t.Helper()
	cfg := rack.Config{
		Name: "default", Host: r.Sim.Host, Project: Project, Token: rack.FixedToken(Token), MaxDisks: r.Options.MaxDisks,
	}
	if change != nil {
		change(&cfg)
	}
	client, err := rack.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := client.ProjectID(t.Context()); err != nil {
		t.Fatal(err)
	}
	return client
}
