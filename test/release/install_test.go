// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build release

package release

import (
	"bytes"
	"debug/elf"
	"debug/macho"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// The tests of this file install from the files of the release alone, as far as this goes without a cluster.

// programsOf returns the folder of an unpacked archive of programs.
func programsOf(t *testing.T, platform string) string {
	t.Helper()
	name := "oxide-csi-VERSION-" + platform
	return filepath.Join(unpack(t, name+".tar.gz"), strings.ReplaceAll(name, "VERSION", version(t)))
}

// TestProgramsStart starts every program of the archive. The programs of other platforms are only read.
func TestProgramsStart(t *testing.T) {
	folder := programsOf(t, "linux-amd64")
	for name, says := range map[string]string{
		"oxide-csi": "Container Storage Interface", "oxide-cosi": "COSI driver", "oxide-sim": "simulated Oxide rack",
	} {
		out, err := exec.Command(filepath.Join(folder, name), "--help").CombinedOutput()
		if err != nil || !strings.Contains(string(out), says) {
			t.Errorf("%s --help: %v, %s", name, err, out)
		}
	}
	made := platforms(t)
	if slices.Contains(made, "linux-arm64") {
		for _, name := range []string{"oxide-csi", "oxide-sim"} {
			file, err := elf.Open(filepath.Join(programsOf(t, "linux-arm64"), name))
			must(t, err)
			if file.Machine != elf.EM_AARCH64 {
				t.Errorf("%s is for %s", name, file.Machine)
			}
			must(t, file.Close())
		}
	}
	if slices.Contains(made, "darwin-arm64") {
		file, err := macho.Open(filepath.Join(programsOf(t, "darwin-arm64"), "oxide-csi"))
		must(t, err)
		if file.Cpu != macho.CpuArm64 || !signed(file) {
			t.Errorf("oxide-csi is for %s, signed: %t", file.Cpu, signed(file))
		}
		must(t, file.Close())
	}
}

// signed reports whether a program of macOS has a code signature, without which macOS on arm64 ends it at once. Go's
// linker signs without a key.
func signed(file *macho.File) bool {
	const codeSignature = 0x1d // LC_CODE_SIGNATURE, in loader.h of macOS
	return slices.ContainsFunc(file.Loads, func(load macho.Load) bool {
		raw := load.Raw()
		return len(raw) >= 4 && file.ByteOrder.Uint32(raw) == codeSignature
	})
}

// TestUnitsStartTheProgram checks that systemd accepts the units with the program of the archive in its place.
func TestUnitsStartTheProgram(t *testing.T) {
	if _, err := exec.LookPath("systemd-analyze"); err != nil {
		t.Skip("needs systemd-analyze: install Debian's package systemd")
	}
	folder := programsOf(t, "linux-amd64")
	units, err := filepath.Glob(filepath.Join(folder, "systemd", "*.service"))
	must(t, err)
	if len(units) != 3 {
		t.Fatalf("units %q", units)
	}
	for _, unit := range units {
		text, err := os.ReadFile(unit)
		must(t, err)
		const installed = "/usr/local/bin/oxide-csi"
		if !bytes.Contains(text, []byte("="+installed+" ")) {
			t.Errorf("%s does not start %s", unit, installed)
		}
		text = bytes.ReplaceAll(text, []byte(installed), []byte(filepath.Join(folder, "oxide-csi")))
		must(t, os.WriteFile(unit, text, 0o600))
	}
	for _, unit := range units {
		name := strings.Replace(unit, "@", "@data", 1)
		if name != unit {
			must(t, os.Symlink(unit, name))
		}
		out, err := exec.Command("systemd-analyze", "verify", "--man=no", name).CombinedOutput()
		if err != nil || strings.Contains(string(out), folder) {
			t.Errorf("%s: %v, %s", name, err, out)
		}
	}
}

// TestImagesHaveThePrograms checks that each image starts the same program that the archive has.
func TestImagesHaveThePrograms(t *testing.T) {
	folder := programsOf(t, "linux-amd64")
	for name, program := range imagePrograms {
		image, err := tarball.ImageFromPath(path(t, name+"-VERSION.docker.tar"), nil)
		must(t, err)
		config, err := image.ConfigFile()
		must(t, err)
		if start := config.Config.Entrypoint; len(start) != 1 || start[0] != "/"+program {
			t.Fatalf("%s starts %q", name, start)
		}
		want, err := os.ReadFile(filepath.Join(folder, program))
		must(t, err)
		if !bytes.Equal(imageFiles(t, name)[program], want) {
			t.Errorf("%s does not have the %s of the archive", name, program)
		}
	}
}

// TestChartInstalls renders the packed chart with the values that it has for platforms.
func TestChartInstalls(t *testing.T) {
	platforms, err := filepath.Glob(filepath.Join(unpack(t, "oxide-csi-VERSION.tgz"), "oxide-csi", "platforms", "*.yaml"))
	must(t, err)
	if len(platforms) < 3 {
		t.Errorf("the chart has values for %q", platforms)
	}
	for _, values := range platforms {
		out, err := exec.Command(program(t, "helm"), "template", "oxide-csi", path(t, "oxide-csi-VERSION.tgz"),
			"--kube-version=1.36.0", "--set=clusterID=test", "--values="+values).CombinedOutput()
		if err != nil || !strings.Contains(string(out), "kind: DaemonSet") {
			t.Errorf("%s: %v, %s", values, err, out)
		}
	}
}

// TestJobsParse has Nomad's command parse the jobs. With docker they run the images of this release.
func TestJobsParse(t *testing.T) {
	nomad := filepath.Join(os.Getenv("OXIDE_CSI_PROGRAMS"), "nomad")
	if _, err := os.Stat(nomad); err != nil {
		t.Skip("needs nomad: run test/programs/build.sh nomad")
	}
	digests := digests(t)
	jobs, err := filepath.Glob(filepath.Join(unpack(t, "oxide-csi-VERSION-nomad.tar.gz"), "*", "*.nomad.hcl"))
	must(t, err)
	images := map[string]string{
		"controller": "oxidecomputer/oxide-csi-controller",
		"monolith":   "oxidecomputer/oxide-csi-plugin",
		"node":       "oxidecomputer/oxide-csi-plugin",
	}
	for _, job := range jobs {
		cmd := exec.Command(nomad, "job", "run", "-output", filepath.Base(job))
		cmd.Dir = filepath.Dir(job)
		cmd.Env = append(os.Environ(), "NOMAD_VAR_cluster_id=test", "NOMAD_VAR_driver=docker", "NOMAD_VAR_client=test",
			"NOMAD_VAR_oxide_host=https://rack.example.com", "NOMAD_VAR_oxide_project=test")
		out, err := cmd.CombinedOutput()
		name := strings.TrimSuffix(filepath.Base(job), ".nomad.hcl")
		var made struct {
			Job struct {
				TaskGroups []struct {
					Tasks []struct{ Config struct{ Image string } }
				}
			}
		}
		if err := errors.Join(err, json.Unmarshal(out, &made)); err != nil {
			t.Errorf("%s: %v, %s", name, err, out)
			continue
		}
		image := images[name]
		if image == "" {
			continue
		}
		delete(images, name)
		if got := made.Job.TaskGroups[0].Tasks[0].Config.Image; got != image+"@"+digests[image] {
			t.Errorf("%s runs %q, want %s", name, got, digests[image])
		}
	}
	if len(images) > 0 {
		t.Errorf("the archive lacks the jobs %v", images)
	}
}
