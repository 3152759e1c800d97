// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package core_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"github.com/kubernetes-csi/csi-test/v5/pkg/sanity"
	"github.com/onsi/ginkgo/v2"
	"github.com/onsi/ginkgo/v2/types"
	"github.com/onsi/gomega"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// sanitySkips are the specs of csi-sanity that do not run: the message of the skip, the number of specs for each kind
// of volume, and the capability that they need. This plugin does not advertise that capability, for the reasons in
// capabilities.go. A spec that skips for another reason fails the test.
var sanitySkips = []struct {
	message string
	specs   int
	needs   fmt.Stringer
}{
	// csi-test has disabled this spec for all plugins.
	{
		"pending: pagination should detect volumes added between pages and accept tokens when the last volume from a page is deleted",
		1,
		nil,
	},
	{"ControllerPublishVolume.readonly field not supported", 1, csi.ControllerServiceCapability_RPC_PUBLISH_READONLY},
	{"Modify volume not supported", 1, csi.ControllerServiceCapability_RPC_MODIFY_VOLUME},
	{"Modify Volume not supported", 1, csi.ControllerServiceCapability_RPC_MODIFY_VOLUME},
	{"ControllerModifyVolume not supported", 6, csi.ControllerServiceCapability_RPC_MODIFY_VOLUME},
	{"GroupControllerService not supported", 6, csi.PluginCapability_Service_GROUP_CONTROLLER_SERVICE},
	{"NodeExpandVolume not supported", 4, csi.NodeServiceCapability_RPC_EXPAND_VOLUME},
}

// TestSanity runs csi-sanity against the built plugin: over its socket, with the real SDK, a simulated rack, and real
// block devices in one of the rack's guests. The suite has two rounds, with filesystem volumes and with raw block
// volumes, because ginkgo runs only one suite in a process.
func TestSanity(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: the guest of the simulated rack is made of loop devices, device nodes and mounts")
	}
	if count := flag.Lookup("test.count"); count != nil && count.Value.String() != "1" {
		t.Skip("ginkgo ends the process when its suite runs a second time: use -count=1")
	}
	programs, err := simtest.Build(t.TempDir(), simtest.RaceDetector())
	if err != nil {
		t.Fatal(err)
	}
	// A socket's path has at most 107 bytes. The path of t.TempDir is longer, since it contains the name of the test.
	dir, err := os.MkdirTemp("", "sanity")
	if err != nil {
		t.Fatal(err)
	}
	state := filepath.Join(dir, "state")
	sim, err := simtest.StartSim(
		programs.Sim,
		nil,
		"--hotplug",
		"--instances=node-a",
		"--guest-root="+filepath.Join(dir, "guests"),
		"--state="+state,
		"--tls="+filepath.Join(dir, "tls"),
	)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		endSanity(t, "oxide-sim", sim.Stop, sim.Process)
		checkNothingBelow(t, dir)
	})
	plugin, err := simtest.StartPlugin(
		programs.Plugin,
		simtest.PluginOptions{Mode: "all", Dir: dir, Sim: sim, Instance: sim.Instance("node-a")},
	)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { endSanity(t, "oxide-csi", plugin.Stop, plugin.Process) })

	report := runSanity(t, plugin.Socket, dir)
	checkSkips(t, plugin, report, len(sanityRounds))
	left, err := sim.Leftovers(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(simtest.Leftovers{}, left); diff != "" {
		t.Errorf("leftovers on the rack (-want +got):\n%s", diff)
	}
}

// endSanity stops a program and fails if the program does not end. It shows the program's output if the test failed.
func endSanity(t *testing.T, name string, stop func() error, process *simtest.Process) {
	if err := stop(); err != nil {
		t.Error(err)
	}
	if strings.Contains(process.Stderr().String(), "DATA RACE") {
		t.Errorf("%s: the race detector found something", name)
	}
	if t.Failed() {
		t.Logf("%s printed:\n%s", name, process.Stderr())
	}
}

// ranSpecs is the number of csi-sanity's specs that run for each kind of volume.
const ranSpecs = 83

// sanityRounds are csi-sanity's names for the two kinds of volumes.
var sanityRounds = []string{"mount", "block"}

// runSanity runs csi-sanity and returns ginkgo's report.
func runSanity(t *testing.T, socket, dir string) (report types.Report) {
	t.Helper()
	gomega.RegisterFailHandler(ginkgo.Fail)
	for _, round := range sanityRounds {
		config := sanity.NewTestConfig()
		config.Address = "unix://" + socket
		config.TargetPath = filepath.Join(dir, round+"-target")
		config.StagingPath = filepath.Join(dir, round+"-staging")
		config.TestVolumeAccessType = round
		config.TestVolumeSize = coretest.GiB
		config.TestNodeVolumeAttachLimit = true
		config.IdempotentCount = 5
		config.IDGen = idGenerator{}
		config.DialOptions = append(config.DialOptions, grpc.WithChainUnaryInterceptor(sendCopy))
		config.ControllerDialOptions = append(config.ControllerDialOptions, grpc.WithChainUnaryInterceptor(sendCopy))
		ginkgo.Describe(round, func() { t.Cleanup(sanity.GinkgoTest(&config).Finalize) })
	}
	ginkgo.ReportAfterSuite("keep the report", func(r ginkgo.Report) { report = r })
	suite, reporter := ginkgo.GinkgoConfiguration()
	reporter.Succinct, reporter.NoColor = true, true
	ginkgo.RunSpecs(t, "csi-sanity", suite, reporter)
	return report
}

// sendCopy sends a copy of the request. Sending a message changes its internal size cache, and csi-sanity compares a
// sent topology with a received one including these internals.
func sendCopy(
	ctx context.Context,
	method string,
	req, reply any,
	cc *grpc.ClientConn,
	invoke grpc.UnaryInvoker,
	opts ...grpc.CallOption,
) error {
	return invoke(ctx, method, proto.Clone(req.(proto.Message)), reply, cc, opts...)
}

// idGenerator makes IDs that are UUIDs, as this plugin's IDs are, so that the specs for missing IDs query the rack.
type idGenerator struct{}

func (idGenerator) GenerateUniqueValidVolumeID() string { return uuid.NewString() }
func (idGenerator) GenerateInvalidVolumeID() string     { return "no-disk-has-this-id" }
func (idGenerator) GenerateUniqueValidNodeID() string   { return uuid.NewString() }
func (idGenerator) GenerateInvalidNodeID() string       { return "no-instance-has-this-id" }

// checkSkips compares the skipped specs of all rounds with sanitySkips.
func checkSkips(t *testing.T, plugin *simtest.Plugin, report types.Report, rounds int) {
	t.Helper()
	advertised := advertisedCapabilities(t, plugin)
	want := map[string]int{}
	for _, skip := range sanitySkips {
		want[skip.message] = skip.specs * rounds
		if advertised[skip.needs] {
			t.Errorf("%s is advertised, so its specs must not skip", skip.needs)
		}
	}
	ran, got := 0, map[string]int{}
	for _, spec := range report.SpecReports {
		switch {
		case spec.LeafNodeType != types.NodeTypeIt:
		case spec.State == types.SpecStatePassed:
			ran++
		case spec.State == types.SpecStateSkipped:
			got[spec.Failure.Message]++
		case spec.State == types.SpecStatePending:
			got["pending: "+spec.LeafNodeText]++
		default:
			t.Errorf("%s: %s", spec.FullText(), spec.State)
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("csi-sanity skips other specs than it should (-want +got):\n%s", diff)
	}
	// With fewer specs, a round did not run.
	if ran != ranSpecs*rounds {
		t.Errorf("csi-sanity ran %d specs, want %d", ran, ranSpecs*rounds)
	}
}

// advertisedCapabilities returns all capabilities that the plugin advertises.
func advertisedCapabilities(t *testing.T, plugin *simtest.Plugin) map[fmt.Stringer]bool {
	t.Helper()
	services, err1 := plugin.GetPluginCapabilities(t.Context(), &csi.GetPluginCapabilitiesRequest{})
	controller, err2 := plugin.ControllerGetCapabilities(t.Context(), &csi.ControllerGetCapabilitiesRequest{})
	node, err3 := plugin.NodeGetCapabilities(t.Context(), &csi.NodeGetCapabilitiesRequest{})
	if err := errors.Join(err1, err2, err3); err != nil {
		t.Fatal(err)
	}
	all := map[fmt.Stringer]bool{}
	for _, capability := range services.GetCapabilities() {
		all[capability.GetService().GetType()] = true
	}
	for _, capability := range controller.GetCapabilities() {
		all[capability.GetRpc().GetType()] = true
	}
	for _, capability := range node.GetCapabilities() {
		all[capability.GetRpc().GetType()] = true
	}
	return all
}

// checkNothingBelow checks that the test left no mount and no loop device in dir, and removes dir.
func checkNothingBelow(t *testing.T, dir string) {
	t.Helper()
	table, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	clean := true
	for line := range strings.Lines(string(table)) {
		if strings.Contains(line, " "+dir+"/") {
			clean = false
			t.Errorf("mount left behind: %s", line)
		}
	}
	loops, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		t.Fatal(err)
	}
	for _, loop := range loops {
		if text, err := os.ReadFile(loop); err == nil && strings.HasPrefix(string(text), dir+"/") {
			t.Errorf("loop device left behind: %s: %s", loop, text)
		}
	}
	if !clean {
		return // removing dir would empty the mounted filesystem
	}
	if err := os.RemoveAll(dir); err != nil {
		t.Error(err)
	}
}
