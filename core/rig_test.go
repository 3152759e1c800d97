package core_test

import (
	"context"
	"io"
	"log/slog"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
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
	"github.com/oxidecomputer/oxide-csi-plugin/core/metrics"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/restart"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/lab"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/openapi"
)

const (
	testToken   = "oxide-token-rig"
	testProject = "demo"
	testCluster = "rig"
	gib         = int64(1) << 30
)

// rig is a controller on a real socket, with the real SDK, before a simulated rack without guests.
type rig struct {
	csi.ControllerClient
	csi.IdentityClient
	csi.NodeClient

	// sim has only a control endpoint: this rack is no process of its own.
	sim *lab.Sim
	// sdk is a client of the rack with all rights.
	sdk *oxide.Client
	// token is what the controller uses now.
	token *string
	// conn is the connection behind the clients, server what it leads to.
	conn    *grpc.ClientConn
	server  *core.Server
	options rigOptions
	// patience is a deadline for each call; 0 is none.
	patience *atomic.Int64
	// crash ends the planning of restarts in the middle of whatever it is doing, retire as a controller does that is told to end.
	crash, retire func()
}

type rigOptions struct {
	rack        simrack.Options
	cluster     string
	rackName    string
	maxDisks    int
	detachGrace time.Duration
	// sweepAge makes the controller sweep temporary snapshots of that age.
	sweepAge time.Duration
	// restarts is for attach mode restart.
	restarts *core.PlannedRestarts
	// endRestarts is for attach mode hot after it.
	endRestarts *restart.Options
	// unplanned leaves out what plans them.
	unplanned bool
	metrics   *metrics.Metrics
	log       io.Writer
}

func newRig(t *testing.T, change ...func(*rigOptions)) *rig {
	t.Helper()
	opts := rigOptions{
		rack: simrack.Options{
			Token:     testToken,
			Project:   testProject,
			Instances: []string{"node-a", "node-b"},
			Hotplug:   true,
		},
		cluster:  testCluster,
		rackName: "default",
		maxDisks: 8,
		log:      io.Discard,
	}
	for _, c := range change {
		c(&opts)
	}
	r := &rig{sim: simulate(t, opts.rack), options: opts, patience: new(atomic.Int64)}
	token := testToken
	r.token = &token
	var err error
	if r.sdk, err = oxide.NewClient(oxide.WithHost(r.sim.Host), oxide.WithToken(testToken)); err != nil {
		t.Fatal(err)
	}
	r.start(t)
	return r
}

// simulate serves a simulated rack in this process.
func simulate(t *testing.T, opts simrack.Options) *lab.Sim {
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
	return &lab.Sim{Host: api.URL, Token: testToken, Project: testProject, Control: control.URL}
}

// start starts a controller before the rack.
func (r *rig) start(t *testing.T) {
	t.Helper()
	client, err := rack.New(rack.Config{
		Name:    r.options.rackName,
		Host:    r.sim.Host,
		Project: testProject,
		Token:   func() (string, error) { return *r.token, nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	// What the plugin does when it starts: the one call that no RPC has to make then.
	if _, err := client.ProjectID(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.startWith(t, client)
	r.clearCalls(t)
}

// startWith starts a controller with these racks.
func (r *rig) startWith(t *testing.T, racks ...*rack.Client) {
	t.Helper()
	log := slog.New(slog.NewTextHandler(r.options.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	controller := core.NewController(core.ControllerOptions{
		Racks: racks, Cluster: r.options.cluster, MaxDisks: r.options.maxDisks, DetachGrace: r.options.detachGrace, TemporaryAge: r.options.sweepAge,
		Restarts: r.options.restarts, Metrics: r.options.metrics, Log: log,
	})
	if !r.options.unplanned {
		r.planRestarts(t, controller, racks)
	}
	if r.options.sweepAge > 0 {
		controller.StartSweeping(t.Context())
	}
	r.server = core.NewServer(core.ServerOptions{
		Mode:       "controller",
		Identity:   core.NewIdentity("test", "", &core.Readiness{}),
		Controller: controller,
		Log:        log,
	})
	r.serve(t)
}

// planRestarts has the controller's engines work until the test ends, or until [rig.crash].
func (r *rig) planRestarts(t *testing.T, controller *core.Controller, racks []*rack.Client) {
	ctx, cancel := context.WithCancel(context.Background())
	var engines sync.WaitGroup
	for _, client := range racks {
		engines.Go(func() {
			if r.options.endRestarts != nil {
				controller.EndRestarts(ctx, client, *r.options.endRestarts)
			}
			controller.PlanRestarts(ctx, client)
		})
	}
	r.crash = func() {
		cancel()
		engines.Wait()
	}
	r.retire = func() { controller.RetireRestarts(t.Context()) }
	t.Cleanup(r.crash)
}

// again is another controller before the same rack: a replica, or the same one after a restart.
func (r *rig) again(t *testing.T) *rig {
	t.Helper()
	other := *r
	other.start(t)
	return &other
}

func (r *rig) serve(t *testing.T) {
	t.Helper()
	dir, err := os.MkdirTemp("", "csi")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	socket := filepath.Join(dir, "csi.sock")
	listener, err := core.Listen(socket)
	if err != nil {
		t.Fatal(err)
	}
	server, served := r.server, make(chan error, 1) // another may take its place
	go func() { served <- server.Serve(listener) }()
	t.Cleanup(func() {
		server.StopNow()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	impatient := grpc.WithUnaryInterceptor(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		if limit := time.Duration(r.patience.Load()); limit > 0 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, limit)
			defer cancel()
		}
		return invoke(ctx, method, req, reply, cc, opts...)
	})
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()), impatient)
	if err != nil {
		t.Fatal(err)
	}
	r.conn = conn
	t.Cleanup(func() {
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	})
	r.IdentityClient, r.ControllerClient, r.NodeClient = csi.NewIdentityClient(r.conn), csi.NewControllerClient(r.conn), csi.NewNodeClient(r.conn)
}

func mountWriter() *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
	}
}

func createRequest(name string) *csi.CreateVolumeRequest {
	return &csi.CreateVolumeRequest{
		Name:               name,
		CapacityRange:      &csi.CapacityRange{RequiredBytes: gib},
		VolumeCapabilities: []*csi.VolumeCapability{mountWriter()},
	}
}

// create makes a volume and returns its ID.
func (r *rig) create(t *testing.T, name string) string {
	t.Helper()
	resp, err := r.CreateVolume(t.Context(), createRequest(name))
	if err != nil {
		t.Fatal(err)
	}
	return resp.GetVolume().GetVolumeId()
}

func (r *rig) publish(t *testing.T, volumeID, nodeID string) error {
	t.Helper()
	_, err := r.ControllerPublishVolume(t.Context(), &csi.ControllerPublishVolumeRequest{VolumeId: volumeID, NodeId: nodeID, VolumeCapability: mountWriter()})
	return err
}

func (r *rig) unpublish(t *testing.T, volumeID, nodeID string) error {
	t.Helper()
	_, err := r.ControllerUnpublishVolume(t.Context(), &csi.ControllerUnpublishVolumeRequest{VolumeId: volumeID, NodeId: nodeID})
	return err
}

func (r *rig) delete(t *testing.T, volumeID string) error {
	t.Helper()
	_, err := r.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: volumeID})
	return err
}

// node returns the ID of an instance.
func (r *rig) node(t *testing.T, name string) string {
	t.Helper()
	instance, err := r.sdk.InstanceView(t.Context(), oxide.InstanceViewParams{Instance: oxide.NameOrId(name), Project: testProject})
	if err != nil {
		t.Fatal(err)
	}
	return instance.Id
}

// disk returns a disk as the rack shows it.
func (r *rig) disk(t *testing.T, id string) *oxide.Disk {
	t.Helper()
	disk, err := r.sdk.DiskView(t.Context(), oxide.DiskViewParams{Disk: oxide.NameOrId(id)})
	if err != nil {
		t.Fatal(err)
	}
	return disk
}

// holder is the instance that a disk is attached to, empty when it is not.
func (r *rig) holder(t *testing.T, id string) string {
	t.Helper()
	if s, ok := r.disk(t, id).State.AsAttached(); ok {
		return s.Instance
	}
	return ""
}

// userDisk makes a disk as a user would by hand.
func (r *rig) userDisk(t *testing.T, project, name, description string) *oxide.Disk {
	t.Helper()
	disk, err := r.sdk.DiskCreate(t.Context(), oxide.DiskCreateParams{Project: oxide.NameOrId(project), Body: &oxide.DiskCreate{
		Name:        oxide.Name(name),
		Description: description,
		Size:        oxide.ByteCount(gib),
		DiskBackend: oxide.DiskBackend{Value: &oxide.DiskBackendDistributed{DiskSource: oxide.DiskSource{Value: &oxide.DiskSourceBlank{BlockSize: 512}}}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	return disk
}

// attachByHand attaches a disk as a user would.
func (r *rig) attachByHand(t *testing.T, diskID, instanceID string) {
	t.Helper()
	_, err := r.sdk.InstanceDiskAttach(t.Context(), oxide.InstanceDiskAttachParams{Instance: oxide.NameOrId(instanceID), Body: &oxide.DiskPath{Disk: oxide.NameOrId(diskID)}})
	if err != nil {
		t.Fatal(err)
	}
}

// volumes lists the rack's disks but the boot disks.
func (r *rig) volumes(t *testing.T) []string {
	t.Helper()
	disks, err := r.sdk.DiskListAllPages(t.Context(), oxide.DiskListParams{Project: testProject})
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

func (r *rig) must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (r *rig) clearCalls(t *testing.T) {
	t.Helper()
	r.must(t, r.sim.ClearCalls(t.Context()))
}

// calls are the API calls since the last clearCalls.
func (r *rig) calls(t *testing.T) map[string]int {
	t.Helper()
	calls, err := r.sim.Calls(t.Context())
	r.must(t, err)
	return calls.Counts
}

func wantCalls(t *testing.T, r *rig, want map[string]int) {
	t.Helper()
	if diff := cmp.Diff(want, r.calls(t)); diff != "" {
		t.Errorf("API calls (-want +got):\n%s", diff)
	}
}

// attempts is how often package rack sends a request that got no answer or 503, where doing it twice does no harm.
const attempts = 3

// inject adds a fault that happens to one call, whichever of its attempts.
func (r *rig) inject(t *testing.T, operation, kind string, code int) {
	t.Helper()
	fault := lab.Fault{Operation: operation, Kind: kind, Status: code}
	if once := strings.HasSuffix(operation, "_create") || strings.HasSuffix(operation, "_delete"); !once && (kind != lab.FaultStatus || code == 503) {
		fault.Count = new(attempts)
	}
	switch code {
	case 400:
		fault.ErrorCode, fault.Message = "InvalidRequest", "no"
	case 401:
		fault.ErrorCode, fault.Message = "Unauthorized", "credentials missing or invalid"
	case 403:
		fault.ErrorCode, fault.Message = "Forbidden", "Forbidden"
	case 409:
		fault.ErrorCode, fault.Message = "Conflict", "somebody was faster"
	case 500:
		fault.ErrorCode, fault.Message = "Internal", "Internal Server Error"
	case 503:
		fault.ErrorCode, fault.Message = "ServiceNotAvailable", "Service Unavailable"
	case 507:
		fault.ErrorCode, fault.Message = "InsufficientCapacity", "Insufficient capacity: Not enough storage"
	}
	_, err := r.sim.Inject(t.Context(), fault)
	r.must(t, err)
}

func wantCode(t *testing.T, err error, want codes.Code, mentions ...string) {
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

func wantSame[M any](t *testing.T, got, want M) {
	t.Helper()
	if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
		t.Errorf("answers differ (-want +got):\n%s", diff)
	}
}

func withTimeout(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}
