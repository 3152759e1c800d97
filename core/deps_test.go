// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package core_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
)

const module = "github.com/oxidecomputer/oxide-csi-plugin"

// pkg is a package in the output of go list.
type pkg struct {
	ImportPath string
	Standard   bool
	// Imports are the imports of the package without its tests.
	Imports []string
}

// goList lists packages, and with deps also all packages that they link. It sets no build tags, so it lists what ships.
func goList(t *testing.T, deps bool, patterns ...string) []pkg {
	t.Helper()
	args := []string{"list", "-json=ImportPath,Standard,Imports"}
	if deps {
		args = append(args, "-deps")
	}
	cmd := exec.Command("go", append(args, patterns...)...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	output, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %s", err, stderr.Bytes())
	}
	var packages []pkg
	for decoder := json.NewDecoder(bytes.NewReader(output)); ; {
		var p pkg
		if err := decoder.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		packages = append(packages, p)
	}
	if len(packages) == 0 {
		t.Fatalf("go list %v found nothing", patterns)
	}
	return packages
}

// within reports whether a package is parent or below it.
func within(path, parent string) bool {
	return path == parent || strings.HasPrefix(path, parent+"/")
}

// TestLinks checks all direct and indirect imports: core links no orchestrator's client, core/node no client of a rack,
// core/controller no device code, and the plugin neither the simulator nor a test library.
func TestLinks(t *testing.T) {
	orchestrators := []string{"k8s.io/client-go", "k8s.io/api", "k8s.io/apimachinery", "github.com/hashicorp/nomad"}
	tests := []string{
		module + "/test",
		module + "/core/device/devicetest",
		module + "/core/metrics/metricstest",
		module + "/metadata/metadatatest",
		module + "/metadata/kubernetes/kubetest",
		module + "/orchestrator/orchestratortest",
		"testing",
		"github.com/kubernetes-csi/csi-test",
		"github.com/getkin/kin-openapi",
		"github.com/onsi/ginkgo",
		"github.com/onsi/gomega",
		"github.com/google/go-cmp",
		"github.com/go-analyze/charts",
	}
	buckets := []string{
		module + "/core/buckets",
		"sigs.k8s.io/container-object-storage-interface",
		"github.com/aws",
		"github.com/hashicorp/go-retryablehttp",
	}
	for _, test := range []struct {
		name, pattern string
		has           string
		hasNot        []string
	}{
		{"core", module + "/core", "google.golang.org/grpc", slices.Concat(orchestrators, tests)},
		{"the table of errors", module + "/core/fault", module + "/metadata", []string{
			module + "/core", "!" + module + "/core/fault", module + "/orchestrator", module + "/admin",
		}},
		{"what drives an orchestrator", module + "/orchestrator", module + "/orchestrator", []string{
			module + "/core", module + "/metadata", "google.golang.org/grpc",
		}},
		{"the choice of an orchestrator", module + "/orchestrator/choice", module + "/orchestrator/nomad", []string{
			module + "/core/controller", module + "/core/node", module + "/core/rack", module + "/admin",
		}},
		{"the node", module + "/core/node", module + "/core/rack/diskname", []string{
			module + "/core/rack", "!" + module + "/core/rack/diskname", module + "/core/restart", module + "/core/controller", "github.com/oxidecomputer/oxide.go",
		}},
		{"the controller", module + "/core/controller", module + "/core/rack", []string{
			module + "/core/device", module + "/core/mount", module + "/core/hostexec", module + "/core/node", "k8s.io/mount-utils",
		}},
		{"all packages below core", module + "/core/...", "github.com/oxidecomputer/oxide.go/oxide",
			slices.Concat(orchestrators, []string{
				module + "/admin", module + "/orchestrator/kubernetes", module + "/orchestrator/nomad",
				module + "/orchestrator/choice",
			})},
		// A typed clientset links the types of the whole API and would double the size of the program. Buckets are another
		// program's: the plugin does not grow by them.
		{"the plugin", module + "/cmd/oxide-csi", "k8s.io/client-go/rest",
			slices.Concat(tests, buckets, []string{"k8s.io/client-go/kubernetes", "k8s.io/api"})},
		{"the COSI driver", module + "/cmd/oxide-cosi", module + "/core/buckets", slices.Concat(tests, orchestrators, []string{
			module + "/core/controller", module + "/core/node", module + "/core/rack", module + "/core/device",
		})},
	} {
		t.Run(test.name, func(t *testing.T) {
			found := false
			for _, p := range goList(t, true, test.pattern) {
				found = found || p.ImportPath == test.has
				for _, forbidden := range test.hasNot {
					if slices.Contains(test.hasNot, "!"+p.ImportPath) {
						continue
					}
					if within(p.ImportPath, forbidden) ||
						strings.HasPrefix(forbidden, "github.com/") && strings.HasPrefix(p.ImportPath, forbidden+"/v") {
						t.Errorf("links %s", p.ImportPath)
					}
				}
			}
			if !found {
				t.Errorf("does not link %s: the pattern of this case is wrong", test.has)
			}
		})
	}
}

// TestImports checks which packages import a library, without tests. Each case expects at least one importer, so that a
// wrong path fails.
func TestImports(t *testing.T) {
	ships := func(path string) bool { return !within(path, module+"/test") && !strings.HasSuffix(path, "test") }
	packages := goList(t, false, module+"/...")
	for _, test := range []struct {
		name string
		// checked reports whether the rule applies to a package.
		checked  func(path string) bool
		imported func(path string) bool
		only     []string
	}{
		{"the rack's SDK", func(path string) bool {
			return ships(path) && !within(path, module+"/cmd/oxide-sim") && !within(path, module+"/bench")
		},
			func(path string) bool { return within(path, "github.com/oxidecomputer/oxide.go") }, []string{module + "/core/rack"}},
		{"Kubernetes' client", func(path string) bool { return !within(path, module+"/test") },
			func(path string) bool { return within(path, "k8s.io/client-go") }, []string{module + "/metadata/kubernetes"}},
		{"the adapters", func(path string) bool { return true },
			func(path string) bool {
				return path == module+"/orchestrator/kubernetes" || path == module+"/orchestrator/nomad"
			}, []string{module + "/orchestrator/choice"}},
		{"the commands of operators", ships, func(path string) bool { return path == module+"/admin" },
			[]string{module + "/cmd/oxide-csi"}},
		{"Prometheus' client", ships,
			func(path string) bool { return within(path, "github.com/prometheus") }, []string{module + "/core/metrics"}},
		{"Nomad's client", func(path string) bool { return !within(path, module+"/test") },
			func(path string) bool { return within(path, "github.com/hashicorp/nomad") }, []string{module + "/metadata/nomad", module + "/orchestrator/nomad"}},
		{"gRPC's codes", func(path string) bool { return within(path, module+"/core") && ships(path) },
			func(path string) bool {
				return path == "google.golang.org/grpc/codes" || path == "google.golang.org/grpc/status"
			}, []string{module + "/core", module + "/core/fault", module + "/core/rpc", module + "/core/socket"}},
		{"the configuration library", func(path string) bool { return within(path, module+"/core") || within(path, module+"/metadata") },
			func(path string) bool { return within(path, "github.com/knadh/koanf") }, []string{module + "/core/config"}},
		{"S3 and COSI", ships, func(path string) bool {
			return within(path, "github.com/aws") || within(path, "sigs.k8s.io/container-object-storage-interface")
		}, []string{module + "/bench", module + "/cmd/oxide-cosi", module + "/core/buckets"}},
		{"CSI", func(path string) bool { return within(path, module+"/core") && ships(path) },
			func(path string) bool { return within(path, "github.com/container-storage-interface/spec") },
			[]string{
				module + "/core", module + "/core/controller", module + "/core/node", module + "/core/rpc", module + "/core/socket",
			}},
	} {
		t.Run(test.name, func(t *testing.T) {
			var importers []string
			for _, p := range packages {
				if test.checked(p.ImportPath) && slices.ContainsFunc(p.Imports, test.imported) {
					importers = append(importers, p.ImportPath)
				}
			}
			coretest.WantSame(t, importers, test.only)
		})
	}
}

// The simulator imports nothing of the plugin that it tests, and the plugin nothing of the simulator.
func TestSimulatorStandsAlone(t *testing.T) {
	for _, p := range goList(t, false, module+"/...") {
		own := within(p.ImportPath, module+"/test") || within(p.ImportPath, module+"/cmd/oxide-sim") ||
			within(p.ImportPath, module+"/bench")
		for _, imported := range p.Imports {
			if !own && within(imported, module+"/test/simrack") {
				t.Errorf("%s imports %s", p.ImportPath, imported)
			}
		}
	}
	for _, p := range goList(t, true, module+"/test/simrack") {
		if within(p.ImportPath, module) && !within(p.ImportPath, module+"/test/simrack") {
			t.Errorf("package simrack links %s", p.ImportPath)
		}
	}
}

// A metadata provider imports package metadata, and neither CSI nor another provider. The adapters of orchestrators
// import the contract and their provider's client.
func TestProvidersImportMetadataOnly(t *testing.T) {
	for _, name := range []string{"kubernetes", "nomad"} {
		for _, imported := range goList(t, false, module+"/orchestrator/"+name)[0].Imports {
			if within(imported, module) &&
				!slices.Contains([]string{module + "/metadata", module + "/metadata/" + name, module + "/orchestrator"}, imported) {
				t.Errorf("orchestrator/%s imports %s", name, imported)
			}
		}
	}
	providers := 0
	for _, p := range goList(t, false, module+"/metadata/...") {
		if p.ImportPath == module+"/metadata" {
			for _, imported := range p.Imports {
				if within(imported, module) {
					t.Errorf("package metadata imports %s", imported)
				}
			}
			continue
		}
		providers++
		own := []string{module + "/metadata"}
		if strings.HasSuffix(p.ImportPath, "test") {
			own = append(own, module+"/metadata/metadatatest", strings.TrimSuffix(p.ImportPath, "/kubetest"))
		}
		for _, imported := range p.Imports {
			if within(imported, module) && !slices.Contains(own, imported) {
				t.Errorf("%s imports %s", p.ImportPath, imported)
			}
			if within(imported, "google.golang.org/grpc") || within(imported, "github.com/container-storage-interface/spec") {
				t.Errorf("%s imports %s", p.ImportPath, imported)
			}
		}
	}
	if providers == 0 {
		t.Error("no provider was found")
	}
}
