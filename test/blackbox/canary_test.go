// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package blackbox

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/dynamicpb"

	corerpc "github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// The canaries are secrets that must never be shown. Each has characters that change in a URL, and a core that does
// not.
const (
	canaryToken  = "oxide-token-canary+/Tq8vYw3ZkR6pXn="
	canarySecret = "secret-canary+/Hd5mJs7LbQ9wCf="
	// canaryKey is the key of a secret. A key may reveal what the secret is, so it is secret too.
	canaryKey = "key-canary+/Gu4nBx2VtE8yKr="
	// Only flags on a list are accepted, and of their values ext4 takes such a number.
	canaryNumber = "491736025"
	canaryFlag   = "max_dir_size_kb=" + canaryNumber
)

var canaries = []string{canaryToken, canarySecret, canaryKey, canaryNumber}

// forms returns the encodings of a text: plain, URL, JSON, quoted, hex and base64. The base64 forms lack their ends,
// which depend on the neighbouring bytes.
func forms(text string) map[string]string {
	quoted, err := json.Marshal(text)
	if err != nil {
		panic(err) // a string always encodes
	}
	all := map[string]string{
		"plain":        text,
		"core":         cmp.Or(regexp.MustCompile(`[A-Za-z0-9]{14}`).FindString(text), text), // a number has no core
		"URL query":    url.QueryEscape(text),
		"URL path":     url.PathEscape(text),
		"JSON":         strings.Trim(string(quoted), `"`),
		"Go":           strings.Trim(fmt.Sprintf("%q", text), `"`),
		"hex":          hex.EncodeToString([]byte(text)),
		"decimal list": strings.Trim(fmt.Sprint([]byte(text)), "[]"),
	}
	for shift := range 3 {
		padded := append(make([]byte, shift), text...)
		padded = padded[:len(padded)/3*3]
		whole := base64.StdEncoding.EncodeToString(padded)
		all[fmt.Sprintf("base64+%d", shift)] = whole[4:]
		all[fmt.Sprintf("base64url+%d", shift)] = base64.URLEncoding.EncodeToString(padded)[4:]
	}
	return all
}

// find returns the canaries in a text, and their encodings.
func find(text string) (found []string) {
	lower := strings.ToLower(text)
	for _, canary := range canaries {
		for name, form := range forms(canary) {
			if strings.Contains(lower, strings.ToLower(form)) {
				at := strings.Index(lower, strings.ToLower(form))
				found = append(found, fmt.Sprintf("%.16s… (%s) in %q", canary, name, text[max(0, at-300):min(len(text), at+120)]))
				break
			}
		}
	}
	return found
}

// TestFind checks that the search of the other tests finds every encoding.
func TestFind(t *testing.T) {
	for _, canary := range canaries {
		for name, text := range map[string]string{
			"plain":       canary,
			"URL":         "https://rack/?token=" + url.QueryEscape(canary),
			"upper case":  strings.ToUpper(canary),
			"hex":         fmt.Sprintf("%x", canary),
			"HEX":         fmt.Sprintf("%X", canary),
			"bytes":       fmt.Sprint([]byte(canary)),
			"base64":      base64.StdEncoding.EncodeToString([]byte(canary)),
			"raw base64":  base64.RawURLEncoding.EncodeToString([]byte("a:" + canary + "!")),
			"basic auth":  base64.StdEncoding.EncodeToString([]byte("u:" + canary)),
			"bearer":      base64.StdEncoding.EncodeToString([]byte("Bearer " + canary + "\r\n")),
			"JSON":        fmt.Sprintf(`{"a":%q}`, canary),
			"in a string": fmt.Sprintf("%q", fmt.Sprintf("%q", canary)),
		} {
			if len(find("before "+text+" after")) == 0 {
				t.Errorf("%s: %q is not found in %q", name, canary, text)
			}
		}
	}
	if found := find("volume csi-abcdefghijklmnop, oxide-token-demo, ***stripped***"); len(found) > 0 {
		t.Errorf("found canaries in a text without any: %v", found)
	}
}

// evidence is all output of the plugin, by channel.
type evidence struct {
	mu   sync.Mutex
	text map[string]*strings.Builder
}

func (e *evidence) add(where, text string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.text == nil {
		e.text = map[string]*strings.Builder{}
	}
	if e.text[where] == nil {
		e.text[where] = &strings.Builder{}
	}
	e.text[where].WriteString(text + "\n")
}

// all returns the output of one channel.
func (e *evidence) all(where string) string {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.text[where] == nil {
		return ""
	}
	return e.text[where].String()
}

// check searches the output of all channels line by line.
func (e *evidence) check(t *testing.T) {
	t.Helper()
	e.mu.Lock()
	defer e.mu.Unlock()
	for where, text := range e.text {
		seen := map[string]bool{}
		for line := range strings.Lines(text.String()) {
			for _, found := range find(line) {
				if kind := found[:16]; !seen[kind] {
					seen[kind] = true
					t.Errorf("%s shows %s", where, found)
				}
			}
		}
	}
}

// intercept records all that a plugin answers: message or status with details, and metadata.
func (e *evidence) intercept(
	ctx context.Context,
	method string,
	req, reply any,
	conn *grpc.ClientConn,
	invoke grpc.UnaryInvoker,
	opts ...grpc.CallOption,
) error {
	var header, trailer metadata.MD
	err := invoke(ctx, method, req, reply, conn, append(opts, grpc.Header(&header), grpc.Trailer(&trailer))...)
	text := prototext.Format(status.Convert(err).Proto())
	if message, ok := reply.(proto.Message); ok && err == nil {
		text = prototext.Format(message)
	}
	e.add("gRPC", fmt.Sprint(method, " ", text, header, trailer))
	return err
}

// recordedPlugin is a plugin whose output is recorded.
type recordedPlugin struct {
	csi.IdentityClient
	csi.ControllerClient
	csi.NodeClient

	plugin    *simtest.Plugin
	conn      *grpc.ClientConn
	http, dir string
}

// startRecorded starts a plugin at debug level with every diagnostic endpoint.
func startRecorded(t *testing.T, e *evidence, opts simtest.PluginOptions) *recordedPlugin {
	t.Helper()
	s := &recordedPlugin{http: freeAddress(t)}
	opts.Args = append(opts.Args, "--log-level=debug", "--http-endpoint="+s.http, "--pprof")
	opts.Dir = shortDir(t)
	s.dir = opts.Dir
	plugin, err := simtest.StartPlugin(programs.Plugin, opts)
	if err != nil {
		t.Fatal(err)
	}
	s.plugin = plugin
	t.Cleanup(func() {
		if err := plugin.Process.Kill(); err != nil {
			t.Error(err)
		}
	})
	s.conn, err = grpc.NewClient(
		"unix://"+plugin.Socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithUnaryInterceptor(e.intercept),
	)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.conn.Close(); err != nil {
			t.Error(err)
		}
	})
	s.IdentityClient, s.ControllerClient, s.NodeClient = csi.NewIdentityClient(
		s.conn,
	), csi.NewControllerClient(
		s.conn,
	), csi.NewNodeClient(
		s.conn,
	)
	return s
}

// freeAddress returns a loopback address that is not in use.
func freeAddress(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	return listener.Addr().String()
}

// browse records the pages of the HTTP endpoint.
func (s *recordedPlugin) browse(t *testing.T, e *evidence) {
	t.Helper()
	for _, path := range []string{"/livez", "/readyz", "/debug/pprof/cmdline", "/debug/pprof/goroutine?debug=2", "/debug/pprof/heap?debug=1"} {
		resp, err := http.Get("http://" + s.http + path)
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		if err := resp.Body.Close(); err != nil {
			t.Fatal(err)
		}
		if len(text) == 0 {
			t.Errorf("%s shows nothing, so the search proves nothing", path)
		}
		e.add("HTTP", path+" "+string(text))
	}
}

// end ends the plugin with SIGQUIT, which makes the Go runtime print the stack of every goroutine, as a crash would.
// No known request makes the plugin panic; package core tests the output of a recovered panic.
func (s *recordedPlugin) end(t *testing.T, e *evidence) {
	t.Helper()
	if err := s.plugin.Signal(syscall.SIGQUIT); err != nil {
		t.Fatal(err)
	}
	if _, err := s.plugin.ExitCode(within(t, time.Minute)); err != nil {
		t.Fatal(err)
	}
	printed := s.plugin.Stderr().String()
	if !strings.Contains(printed, "SIGQUIT") || !strings.Contains(printed, "goroutine ") {
		t.Error("the plugin ended without the stacks of its goroutines")
	}
	e.add("stderr", printed)
	e.add("stdout", s.plugin.Stdout().String())
}

// readFiles records the content of every file below the plugin's folder: its state, and what it may have left.
func (s *recordedPlugin) readFiles(t *testing.T, e *evidence, dir string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.Type().IsRegular() || entry.Name() == "token" {
			return err
		}
		content, err := os.ReadFile(path)
		e.add("files", path+" "+string(content))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// secrets is the content of every secrets field.
func secrets() map[string]string { return map[string]string{canaryKey: canarySecret} }

// TestCanary puts canaries into every input that an operator controls, at debug level, and searches all output of the
// plugin.
func TestCanary(t *testing.T) {
	for _, format := range []string{"text", "json"} {
		t.Run(format, func(t *testing.T) {
			t.Parallel()
			var e evidence
			sim, mode := (*simtest.Sim)(nil), "all"
			if isRoot() {
				sim = startSimWithGuests(t, shortDir(t), "--hotplug", "--instances=node-a", "--token="+canaryToken)
			} else {
				sim, mode = startSim(t, "--hotplug", "--instances=node-a", "--token="+canaryToken), "controller"
			}
			opts := simtest.PluginOptions{
				Mode:     mode,
				Sim:      sim,
				Instance: sim.Instance("node-a"),
				Args:     []string{"--log-format=" + format},
			}
			if format == "json" { // text uses a token file, json an environment variable
				opts.Args = append(opts.Args, "--oxide-token-file=")
				opts.Env = []string{"PATH=" + os.Getenv("PATH"), "OXIDE_TOKEN=" + canaryToken}
			}
			s := startRecorded(t, &e, opts)
			s.askEverything(t)
			volume := s.live(t, sim, format)
			s.liveEncrypted(t, sim, &e)
			s.liveWithFaults(t, sim)
			s.browse(t, &e)
			s.end(t, &e)
			e.check(t)

			// The search proves something only if the evidence is complete: text that is not secret must be in it.
			for where, want := range map[string][]string{
				"stderr": {volume.GetVolumeId(), "canary-" + format, "stripped", "credentials missing or invalid"},
				"gRPC":   {volume.GetVolumeId(), "credentials missing or invalid", "/csi.v1.Controller/CreateSnapshot"},
				"HTTP":   {"/readyz ", "--oxide-project=demo", "goroutine ", "heap profile"},
			} {
				for _, text := range want {
					if !strings.Contains(e.all(where), text) {
						t.Errorf("%s does not show %q", where, text)
					}
				}
			}
			checkArrived(t, e.all("stderr"), mode)
		})
	}
}

// askEverything makes each RPC of the specification with canaries only: in each field that the specification marks as
// secret, and in mount flags, which the specification says may be secret.
func (s *recordedPlugin) askEverything(t *testing.T) {
	t.Helper()
	asked := 0
	services := csi.File_csi_proto.Services()
	for i := range services.Len() {
		for j := range services.Get(i).Methods().Len() {
			method := services.Get(i).Methods().Get(j)
			if method.IsStreamingServer() {
				continue // SnapshotMetadata, which the plugin does not serve
			}
			req, reply := dynamicpb.NewMessage(method.Input()), dynamicpb.NewMessage(method.Output())
			plant(req)
			ctx, cancel := context.WithTimeout(t.Context(), requestTimeout)
			// The interceptor records the answer.
			err := s.conn.Invoke(ctx, fmt.Sprintf("/%s/%s", method.Parent().FullName(), method.Name()), req, reply)
			cancel()
			if len(find(prototext.Format(req))) > 0 {
				asked++
				if err == nil {
					t.Logf("%s accepts a request with only secrets", method.Name())
				}
			}
		}
	}
	if asked < 15 {
		t.Errorf("only %d RPCs have secrets, fewer than in the specification", asked)
	}
}

// plant puts canaries into every secret field of a message.
func plant(message protoreflect.Message) {
	fields := message.Descriptor().Fields()
	for i := range fields.Len() {
		field := fields.Get(i)
		switch secret, _ := proto.GetExtension(field.Options(), csi.E_CsiSecret).(bool); {
		case secret && field.IsMap():
			message.Mutable(field).
				Map().
				Set(protoreflect.ValueOfString(canaryKey).MapKey(), protoreflect.ValueOfString(canarySecret))
		case field.Name() == "mount_flags":
			message.Mutable(field).List().Append(protoreflect.ValueOfString(canaryFlag))
		case field.Name() == "volume_capabilities":
			list := message.Mutable(field).List()
			plant(list.AppendMutable().Message())
		case field.Name() == "volume_capability", field.Name() == "mount":
			plant(message.Mutable(field).Message())
		}
	}
}

// live runs a volume's life with secrets in each request that has a field for them, and with mount flags: first flags
// that the kernel accepts, then flags that it rejects.
func (s *recordedPlugin) live(t *testing.T, sim *simtest.Sim, format string) *csi.Volume {
	t.Helper()
	c, node, capability := newClient(), sim.Instance("node-a"), mountVolume("ext4", canaryFlag)
	create := createRequest("canary-"+format, capability)
	create.Secrets = secrets()
	volume := twice(t, c, s.CreateVolume, create).GetVolume()
	publish := publishRequest(volume, node, capability)
	publish.Secrets = secrets()
	published := twice(t, c, s.ControllerPublishVolume, publish)
	// The answer repeats the capabilities, as the specification says. So these have no canary.
	twice(t, c, s.ValidateVolumeCapabilities, &csi.ValidateVolumeCapabilitiesRequest{
		VolumeId: volume.GetVolumeId(), VolumeCapabilities: []*csi.VolumeCapability{mountVolume("ext4")}, Secrets: secrets(),
	})
	s.liveOnNode(t, c, volume, published.GetPublishContext(), capability)
	twice(
		t,
		c,
		s.ControllerUnpublishVolume,
		&csi.ControllerUnpublishVolumeRequest{VolumeId: volume.GetVolumeId(), NodeId: node.ID, Secrets: secrets()},
	)
	twice(t, c, s.DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: volume.GetVolumeId(), Secrets: secrets()})
	checkLeftovers(t, sim, 0)
	return volume
}

func (s *recordedPlugin) liveOnNode(
	t *testing.T,
	c *client,
	volume *csi.Volume,
	publishContext map[string]string,
	capability *csi.VolumeCapability,
) {
	t.Helper()
	dir := shortDir(t)
	staging, target := filepath.Join(dir, "staging"), filepath.Join(dir, "target")
	if err := os.Mkdir(staging, 0o750); err != nil {
		t.Fatal(err)
	}
	stage := &csi.NodeStageVolumeRequest{
		VolumeId:          volume.GetVolumeId(),
		PublishContext:    publishContext,
		StagingTargetPath: staging,
		VolumeCapability:  capability,
		VolumeContext:     volume.GetVolumeContext(),
		Secrets:           secrets(),
	}
	publish := &csi.NodePublishVolumeRequest{
		VolumeId:          volume.GetVolumeId(),
		PublishContext:    publishContext,
		StagingTargetPath: staging,
		TargetPath:        target,
		VolumeCapability:  capability,
		VolumeContext:     volume.GetVolumeContext(),
		Secrets:           secrets(),
	}
	ctx := within(t, time.Minute)
	if !isRoot() { // then the plugin serves the controller only
		if _, err := s.NodeStageVolume(ctx, stage); err == nil {
			t.Error("NodeStageVolume succeeded in mode controller")
		}
		if _, err := s.NodePublishVolume(ctx, publish); err == nil {
			t.Error("NodePublishVolume succeeded in mode controller")
		}
		return
	}
	for _, refused := range []string{
		"bogus=" + canaryNumber, canaryNumber, "offset=" + canaryNumber, "logdev=" + canaryNumber, `"` + canaryFlag, canaryFlag + ",loop",
	} {
		bad := proto.CloneOf(stage)
		bad.VolumeCapability = mountVolume("ext4", refused)
		if _, err := s.NodeStageVolume(ctx, bad); err == nil {
			t.Errorf("NodeStageVolume accepts the mount flag %q", refused)
		}
	}
	twice(t, c, s.NodeStageVolume, stage)
	twice(t, c, s.NodePublishVolume, publish)
	other := proto.CloneOf(publish)
	other.TargetPath += "-2"
	if _, err := s.NodePublishVolume(ctx, other); err == nil {
		t.Error("NodePublishVolume accepts a second target")
	}
	twice(t, c, s.NodeGetVolumeStats, &csi.NodeGetVolumeStatsRequest{VolumeId: volume.GetVolumeId(), VolumePath: target})
	twice(t, c, s.NodeUnpublishVolume, &csi.NodeUnpublishVolumeRequest{VolumeId: volume.GetVolumeId(), TargetPath: target})
	twice(
		t,
		c,
		s.NodeUnstageVolume,
		&csi.NodeUnstageVolumeRequest{VolumeId: volume.GetVolumeId(), StagingTargetPath: staging},
	)
}

// liveEncrypted stages an encrypted volume with canaries as passphrases: right, changed and wrong. Without
// device-mapper, which the kernel of this machine may lack, a stage fails after it has used the passphrase.
func (s *recordedPlugin) liveEncrypted(t *testing.T, sim *simtest.Sim, e *evidence) {
	t.Helper()
	if !isRoot() {
		return // then the plugin serves the controller only
	}
	ctx, c, node, capability := within(t, 2*time.Minute), newClient(), sim.Instance("node-a"), mountVolume("ext4")
	create := createRequest("encrypted", capability)
	create.Parameters = map[string]string{corerpc.KeyEncryption: corerpc.EncryptionLUKS2}
	volume := twice(t, c, s.CreateVolume, create).GetVolume()
	published := twice(t, c, s.ControllerPublishVolume, publishRequest(volume, node, capability))
	staging := filepath.Join(shortDir(t), "staging")
	if err := os.Mkdir(staging, 0o750); err != nil {
		t.Fatal(err)
	}
	const changed = canarySecret + canarySecret
	for _, secrets := range []map[string]string{
		{corerpc.SecretPassphrase: canarySecret},
		{corerpc.SecretPassphrase: changed, corerpc.SecretPreviousPassphrase: canarySecret},
		{corerpc.SecretPassphrase: canarySecret + canaryKey, corerpc.SecretPreviousPassphrase: canaryKey},
		{corerpc.SecretPassphrase: canarySecret},
	} {
		// The interceptor records the answer.
		_, _ = s.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
			VolumeId: volume.GetVolumeId(), PublishContext: published.GetPublishContext(), StagingTargetPath: staging,
			VolumeCapability: capability, VolumeContext: volume.GetVolumeContext(), Secrets: secrets,
		})
	}
	for _, said := range []string{"encrypted a disk", "changed the passphrase"} {
		if !strings.Contains(s.plugin.Stderr().String(), said) {
			t.Errorf("the plugin did not log %q, so the search proves nothing", said)
		}
	}
	s.readFiles(t, e, s.dir)
	twice(t, c, s.NodeUnstageVolume,
		&csi.NodeUnstageVolumeRequest{VolumeId: volume.GetVolumeId(), StagingTargetPath: staging})
	twice(t, c, s.ControllerUnpublishVolume,
		&csi.ControllerUnpublishVolumeRequest{VolumeId: volume.GetVolumeId(), NodeId: node.ID})
	twice(t, c, s.DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: volume.GetVolumeId()})
}

// echo is the message of a careless rack, or of a proxy: it contains the rejected credentials.
const echo = "credentials missing or invalid: Authorization: Bearer " + canaryToken

// liveWithFaults makes the controller's RPCs while each kind of fault hits all calls.
func (s *recordedPlugin) liveWithFaults(t *testing.T, sim *simtest.Sim) {
	t.Helper()
	ctx := within(t, 2*time.Minute)
	c := newClient()
	volume := send(t, c, s.CreateVolume, createRequest("faulty", mountVolume(""))).GetVolume()
	for _, fault := range append(slices.Collect(maps.Values(faultKinds)),
		simtest.Fault{Kind: simtest.FaultStatus, Status: 400, ErrorCode: "InvalidRequest"},
		simtest.Fault{Kind: simtest.FaultStatus, Status: 400, ErrorCode: "InvalidValue"},
		simtest.Fault{Kind: simtest.FaultStatus, Status: 400, ErrorCode: "ObjectAlreadyExists"},
		simtest.Fault{Kind: simtest.FaultStatus, Status: 404, ErrorCode: "ObjectNotFound"},
		simtest.Fault{Kind: simtest.FaultStatus, Status: 418},
	) {
		fault.Operation, fault.Count = "*", new(int)
		if fault.Kind == simtest.FaultStatus {
			fault.Message = echo
		}
		if _, err := sim.Inject(ctx, fault); err != nil {
			t.Fatal(err)
		}
		if s.askController(t, sim, volume) == 0 {
			t.Errorf("no request failed although the rack was broken: %+v", fault)
		}
		if err := sim.ClearFaults(ctx); err != nil {
			t.Fatal(err)
		}
	}
	await.Eventually(t, "the volume is deleted", func() bool {
		_, err := s.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: volume.GetVolumeId()})
		return err == nil
	})
}

// askController makes each RPC of the controller once, with a short deadline, and counts the failed ones.
func (s *recordedPlugin) askController(t *testing.T, sim *simtest.Sim, volume *csi.Volume) (failed int) {
	t.Helper()
	node, capability := simtest.Instance{ID: volume.GetVolumeId()}, mountVolume("", canaryFlag)
	if sim != nil {
		node = sim.Instance("node-a")
	}
	create, publish := createRequest("asked", capability), publishRequest(volume, node, capability)
	create.Secrets, publish.Secrets = secrets(), secrets()
	for _, ask := range []func(context.Context) error{
		func(ctx context.Context) error { _, err := s.CreateVolume(ctx, create); return err },
		func(ctx context.Context) error { _, err := s.ControllerPublishVolume(ctx, publish); return err },
		func(ctx context.Context) error {
			_, err := s.ValidateVolumeCapabilities(ctx, &csi.ValidateVolumeCapabilitiesRequest{
				VolumeId: volume.GetVolumeId(), VolumeCapabilities: []*csi.VolumeCapability{mountVolume("")}, Secrets: secrets()})
			return err
		},
		func(ctx context.Context) error {
			_, err := s.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: volume.GetVolumeId(), NodeId: node.ID, Secrets: secrets()})
			return err
		},
		func(ctx context.Context) error {
			_, err := s.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: volume.GetVolumeId(), Secrets: secrets()})
			return err
		},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), shortDeadline)
		if ask(ctx) != nil {
			failed++
		}
		cancel()
	}
	return failed
}

// checkArrived checks that secrets have reached the plugin in each RPC with a secrets field: the debug log shows the
// field without its content.
func checkArrived(t *testing.T, log, mode string) {
	t.Helper()
	if !strings.Contains(log, canarySecret[:6]) {
		t.Errorf("the log does not show the name of the field %q", "secrets")
	}
	methods := []string{
		"CreateVolume",
		"DeleteVolume",
		"ControllerPublishVolume",
		"ControllerUnpublishVolume",
		"ValidateVolumeCapabilities",
		"NodeStageVolume",
		"NodePublishVolume",
	}
	for _, method := range methods {
		shown := false
		for line := range strings.Lines(log) {
			named := strings.Contains(line, "method="+method+" ") || strings.Contains(line, `"method":"`+method+`"`)
			shown = shown || named && strings.Contains(line, `secrets\":\"***stripped***\"`)
		}
		if !shown {
			t.Errorf("in mode %s the log does not show that %s had secrets", mode, method)
		}
	}
}

// TestCanaryBrokenRack connects the plugin to a server that is not a rack and that echoes the credentials in every way
// that a program could pass on.
func TestCanaryBrokenRack(t *testing.T) {
	t.Parallel()
	var e evidence
	var received, stolen sync.Map
	thief := serveOn(
		t,
		"127.0.0.2:0",
		func(_ http.ResponseWriter, req *http.Request) { stolen.Store(req.Header.Get("Authorization"), true) },
	)
	var mu sync.Mutex
	var answer func(w http.ResponseWriter, credentials string)
	broken := serveOn(t, "127.0.0.1:0", func(w http.ResponseWriter, req *http.Request) {
		received.Store(req.Header.Get("Authorization"), true)
		if req.URL.Path == "/v1/ping" { // only a server that answers the ping like a rack gets the token
			if version := req.Header.Get("Api-Version"); version > "3" {
				w.WriteHeader(400)
				fmt.Fprintf(w, `{"request_id":"r","message":"server does not support this API version: %s"}`, version)
			}
			return
		}
		mu.Lock()
		do := answer
		mu.Unlock()
		do(w, req.Header.Get("Authorization"))
	})
	answers := brokenAnswers(thief.URL)
	answer = answers["page"]
	sim := &simtest.Sim{Host: broken.URL, Token: canaryToken, Project: "demo"}
	s := startRecorded(t, &e, simtest.PluginOptions{Mode: "controller", Sim: sim})
	volume := &csi.Volume{VolumeId: "6f1b2c3d-4e5f-4a6b-8c7d-9e0f1a2b3c4d"}
	for name, do := range answers {
		mu.Lock()
		answer = do
		mu.Unlock()
		if s.askController(t, nil, volume) == 0 {
			t.Errorf("%s: no request failed although the server is not a rack", name)
		}
	}
	s.browse(t, &e)
	s.end(t, &e)
	e.check(t)
	if _, ok := received.Load("Bearer " + canaryToken); !ok {
		t.Error("the rack has not been sent the token, so the test proves nothing")
	}
	stolen.Range(func(credentials, _ any) bool {
		if credentials != "" {
			t.Errorf("a redirect to another machine got the credentials %q", credentials)
		}
		return true
	})
}

// serveOn serves on this address. Another loopback address stands for another machine.
func serveOn(t *testing.T, address string, handler http.HandlerFunc) *httptest.Server {
	t.Helper()
	listener, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	server := &httptest.Server{Listener: listener, Config: &http.Server{Handler: handler}}
	server.Start()
	t.Cleanup(server.Close)
	return server
}

// brokenAnswers are answers of a server that is not a rack. Each one echoes the credentials. Redirects lead to
// elsewhere.
func brokenAnswers(elsewhere string) map[string]func(http.ResponseWriter, string) {
	text := func(status int, format string) func(http.ResponseWriter, string) {
		return func(w http.ResponseWriter, credentials string) {
			w.Header().Set("X-Echo", credentials)
			w.WriteHeader(status)
			fmt.Fprintf(w, format, credentials)
		}
	}
	disk := `{"id":"6f1b2c3d-4e5f-4a6b-8c7d-9e0f1a2b3c4d","name":"csi-x","description":"","project_id":"6f1b2c3d-4e5f-4a6b-8c7d-9e0f1a2b3c4d","size":1073741824,"block_size":4096,`
	return map[string]func(http.ResponseWriter, string){
		"page":                text(200, "<html>you sent %s</html>"),
		"page 401":            text(401, "<html>you sent %s</html>"),
		"page 500":            text(500, "<html>you sent %s</html>"),
		"text 502":            text(502, "upstream refused %s"),
		"cut":                 text(200, `{"id":"%s`),
		"cut error":           text(503, `{"message":"%s`),
		"list for an object":  text(200, `["%s"]`),
		"string for a number": text(200, `{"id":"x","size":"%s"}`),
		"string for a time":   text(201, disk+`"time_created":"%s"}`),
		"unknown state":       text(201, disk+`"state":{"state":"%s"}}`),
		"unknown state, view": text(200, disk+`"state":{"state":"%s"}}`),
		"unknown run state":   text(200, `{"id":"6f1b2c3d-4e5f-4a6b-8c7d-9e0f1a2b3c4d","run_state":"%s"}`),
		"error code":          text(400, `{"error_code":"%[1]s","message":"%[1]s","request_id":"%[1]s"}`),
		"two errors":          text(400, `{"message":"no"}{"message":"%s"}`),
		"odd request ID": func(w http.ResponseWriter, credentials string) {
			w.Header().Set("X-Request-Id", credentials)
			text(500, `{"message":"%s"}`)(w, credentials)
		},
		"redirect": func(w http.ResponseWriter, credentials string) {
			w.Header().Set("Location", elsewhere+"/?"+url.QueryEscape(credentials))
			w.WriteHeader(302)
		},
		"redirect 307": func(w http.ResponseWriter, _ string) {
			w.Header().Set("Location", elsewhere)
			w.WriteHeader(307)
		},
		"redirect nowhere": func(w http.ResponseWriter, credentials string) {
			w.Header().Set("Location", "http://127.0.0.1:1/"+url.PathEscape(credentials))
			w.WriteHeader(308)
		},
		"no HTTP": func(w http.ResponseWriter, credentials string) {
			conn, _, err := http.NewResponseController(w).Hijack()
			if err != nil {
				panic(http.ErrAbortHandler)
			}
			fmt.Fprintf(conn, "EHLO %s\r\n\r\n", credentials)
			conn.Close() // the plugin sees the end of the connection
		},
		"bad header": func(w http.ResponseWriter, credentials string) {
			conn, _, err := http.NewResponseController(w).Hijack()
			if err != nil {
				panic(http.ErrAbortHandler)
			}
			fmt.Fprintf(conn, "HTTP/1.1 200 OK\r\n%s\r\n\r\n", credentials)
			conn.Close() // the plugin sees the end of the connection
		},
	}
}

// TestCanaryConfiguration puts the token into every wrong place. Each row has a second error, so that the plugin never
// starts.
func TestCanaryConfiguration(t *testing.T) {
	t.Parallel()
	rows := misconfigurations(t)
	for _, flag := range flagNames(t) {
		for _, prefix := range []string{"", "https://", "/run/"} {
			rows["in the flag "+flag+", "+prefix] = misconfiguration{args: []string{"--" + flag + "=" + prefix + canaryToken}}
		}
	}
	for name, r := range rows {
		t.Run(name, func(t *testing.T) {
			ctx := within(t, time.Minute)
			// The second error is in a setting that the row does not use.
			args := append([]string{"--max-disks=1"}, r.args...)
			if strings.HasPrefix(name, "argument of") {
				args = r.args
			}
			cmd := exec.CommandContext(ctx, programs.Plugin, args...)
			cmd.Env = append([]string{"PATH=" + os.Getenv("PATH")}, r.env...)
			var stdout, stderr strings.Builder
			cmd.Stdout, cmd.Stderr = &stdout, &stderr
			err := cmd.Run()
			if ctx.Err() != nil {
				t.Fatal(ctx.Err())
			}
			want := 78
			if name == "argument of version" {
				want = 2
			}
			if code := cmd.ProcessState.ExitCode(); name != "argument of help" && name != "help flag" && code != want {
				t.Errorf("exit code %d, want %d: %v", code, want, err)
			}
			if stdout.Len()+stderr.Len() == 0 {
				t.Error("nothing was printed, so the search proves nothing")
			}
			for where, text := range map[string]string{"stdout": stdout.String(), "stderr": stderr.String()} {
				for _, found := range find(text) {
					t.Errorf("%s shows %s", where, found)
				}
			}
		})
	}
}

// misconfiguration is a start of the plugin with the token in a wrong place.
type misconfiguration struct{ args, env []string }

func misconfigurations(t *testing.T) map[string]misconfiguration {
	t.Helper()
	dir := shortDir(t)
	file := func(name, content string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	good := file("good", canaryToken+"\n")
	return map[string]misconfiguration{
		"argument":             {args: []string{canaryToken}},
		"argument of version":  {args: []string{"version", canaryToken}},
		"argument of help":     {args: []string{"help", canaryToken}},
		"unknown flag":         {args: []string{"--oxide-token=" + canaryToken}},
		"unknown flag, two":    {args: []string{"--oxide-token", canaryToken}},
		"as a flag":            {args: []string{"--" + canaryToken}},
		"as a flag with value": {args: []string{"--" + canaryToken + "=1"}},
		"as a short flag":      {args: []string{"-" + canaryToken}},
		"short flag":           {args: []string{"-t", canaryToken}},
		"help flag":            {args: []string{"-h" + canaryToken}},
		"host with user": {
			args: []string{"--oxide-host=https://" + url.UserPassword("user", canaryToken).String() + "@rack.example"},
		},
		"host with query":      {args: []string{"--oxide-host=https://rack.example/?token=" + url.QueryEscape(canaryToken)}},
		"good, other problems": {args: []string{"--oxide-token-file=" + good}},
		"token of two lines":   {args: []string{"--oxide-token-file=" + file("lines", canaryToken+"\n"+canaryToken+"\n")}},
		"token with text":      {args: []string{"--oxide-token-file=" + file("text", "token: "+canaryToken)}},
		"token without prefix": {args: []string{"--oxide-token-file=" + file("bare", canarySecret)}},
		"token with a zero":    {args: []string{"--oxide-token-file=" + file("zero", canaryToken+"\x00")}},
		"token too long":       {args: []string{"--oxide-token-file=" + file("long", strings.Repeat(canaryToken, 10_000))}},
		"token as config":      {args: []string{"--config=" + good}},
		"variable":             {env: []string{"OXIDE_TOKEN=" + canaryToken}},
		"variable, quoted":     {env: []string{`OXIDE_TOKEN="` + canaryToken + `"`}},
		"variable, bearer":     {env: []string{"OXIDE_TOKEN=Bearer " + canaryToken}},
		"variable, bare":       {env: []string{"OXIDE_TOKEN=" + canarySecret}},
		"variable, lines":      {env: []string{"OXIDE_TOKEN=" + canaryToken + "\n" + canarySecret}},
		"unknown variable":     {env: []string{"OXIDE_CSI_TOKEN=" + canaryToken}},
		"variable and file": {
			args: []string{"--oxide-token-file=" + filepath.Join(dir, "missing")},
			env:  []string{"OXIDE_TOKEN=" + canaryToken},
		},
		"file: key":         {args: []string{"--config=" + file("key.yaml", "oxideToken: "+canaryToken+"\n")}},
		"file: unknown key": {args: []string{"--config=" + file("unknown.yaml", "token: "+canaryToken+"\n")}},
		"file: as key":      {args: []string{"--config=" + file("askey.yaml", canaryToken+": 1\n")}},
		"file: racks": {
			args: []string{"--config=" + file("racks.yaml", "racks:\n- {name: a, host: b, token: "+canaryToken+"}\n")},
		},
		"file: rack's file": {
			args: []string{"--config=" + file("tokenfile.yaml", "racks:\n- {name: a, host: b, tokenFile: "+canaryToken+"}\n")},
		},
		"file: broken": {args: []string{"--config=" + file("broken.yaml", "oxideHost: [\""+canaryToken+"\n")}},
		"file: wrong type": {
			args: []string{"--config=" + file("type.yaml", "maxDisks: "+canaryToken+"\nracks: "+canaryToken+"\n")},
		},
	}
}

// flagNames returns the plugin's flags from its own help.
func flagNames(t *testing.T) (names []string) {
	t.Helper()
	help, err := exec.CommandContext(within(t, time.Minute), programs.Plugin, "--help").Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, match := range regexp.MustCompile(`(?m)^ +(?:-., )?--([a-z-]+)`).FindAllStringSubmatch(string(help), -1) {
		if !slices.Contains([]string{"help", "version"}, match[1]) {
			names = append(names, match[1])
		}
	}
	if len(names) < 20 {
		t.Fatalf("%d flags found in the help: %v", len(names), names)
	}
	return names
}
