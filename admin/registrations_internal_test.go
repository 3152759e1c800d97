// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package admin

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"

	"github.com/oxidecomputer/oxide-csi-plugin/admin/client"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// hostileVolumes have names and claims that would be something else than a name in YAML, in HCL or in a shell. The
// shell would make the file marker.
func hostileVolumes(marker string) (volumes []client.AdoptableVolume) {
	for i, name := range []string{
		"x\nEND\ntouch " + marker + "\n", "$(touch " + marker + ")", "`touch " + marker + "`", `"; x: y`, "a\n---\nkind: Secret", "../x",
	} {
		volumes = append(volumes, client.AdoptableVolume{
			Volume: client.Volume{
				Name: name, Claim: "shop/" + name, ID: fmt.Sprint("volume-", i), SizeBytes: 1 << 30, Rack: "default",
			},
			Context: map[string]string{rpc.KeyDiskName: "disk"},
		})
	}
	return volumes
}

// What is printed for Kubernetes has one PersistentVolume for each volume, whatever its names are.
func TestPersistentVolumesOfHostileNames(t *testing.T) {
	volumes := hostileVolumes("marker")
	var text bytes.Buffer
	printPersistentVolumes(&text, volumes, "fast")
	decoder := yaml.NewDecoder(&text)
	for _, volume := range volumes {
		var object struct {
			Kind     string
			Metadata struct{ Name string }
			Spec     map[string]any
		}
		if err := decoder.Decode(&object); err != nil {
			t.Fatal(err)
		}
		if object.Kind != "PersistentVolume" || object.Metadata.Name != volume.ID {
			t.Errorf("%+v", object)
		}
		if len(object.Spec) != 7 || object.Spec["claimRef"] != nil {
			t.Errorf("specification of %q: %v", volume.Name, object.Spec)
		}
	}
	if err := decoder.Decode(new(any)); err != io.EOF {
		t.Errorf("after the last object: %v", err)
	}
}

// What is printed for an encrypted volume names the Secret of its passphrase, as the storage class of the docs does. If
// the claim is not known, Kubernetes refuses the object until a person has filled in the name.
func TestRegistrationsOfEncryptedVolumes(t *testing.T) {
	volume := client.AdoptableVolume{
		Volume:  client.Volume{Name: "pvc-1", ID: "volume-1", SizeBytes: 1 << 30, Rack: "default"},
		Context: map[string]string{rpc.KeyEncryption: rpc.EncryptionLUKS2},
	}
	for claim, want := range map[string]map[string]string{
		"databases/postgres": {"namespace": "databases", "name": "postgres-luks"},
		"":                   {"namespace": "", "name": ""},
	} {
		volume.Claim = claim
		var text bytes.Buffer
		printPersistentVolumes(&text, []client.AdoptableVolume{volume}, "fast")
		var object struct {
			Spec struct {
				CSI struct {
					Secret map[string]string `yaml:"nodeStageSecretRef"`
				}
			}
		}
		if err := yaml.Unmarshal(text.Bytes(), &object); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, object.Spec.CSI.Secret); diff != "" {
			t.Errorf("claim %q (-want +got):\n%s", claim, diff)
		}
	}
	var text bytes.Buffer
	printNomadVolumes(&text, []client.AdoptableVolume{volume}, "disks")
	if !strings.Contains(text.String(), "\n# secrets { passphrase =") {
		t.Errorf("for Nomad: %s", &text)
	}
}

// What is printed for Nomad is a script that registers each volume and does nothing else, whatever its names are.
func TestNomadVolumesOfHostileNames(t *testing.T) {
	dir := t.TempDir()
	marker := filepath.Join(dir, "marker")
	volumes := hostileVolumes(marker)
	volumes[0].Name, volumes[0].Context[rpc.KeyRawBlock] = "data[0]", "true"
	text := bytes.NewBufferString("nomad() { echo \"$*\" >> calls; cat >> registrations; }\n")
	printNomadVolumes(text, volumes, "disks")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "sh", "-euc", text.String())
	cmd.Dir = dir
	if output, err := cmd.CombinedOutput(); err != nil || len(output) > 0 {
		t.Errorf("%v: %s", err, output)
	}
	read := func(name string) string {
		content, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		return string(content)
	}
	if diff := cmp.Diff(strings.Repeat("volume register -\n", len(volumes)), read("calls")); diff != "" {
		t.Errorf("calls of nomad (-want +got):\n%s", diff)
	}
	if _, err := os.Stat(marker); err == nil {
		t.Error("the script has run a command from a name")
	}
	registrations := read("registrations")
	for _, volume := range volumes[1:] {
		if want := `name        = "` + volume.ID + `"`; strings.Count(registrations, want) != 1 {
			t.Errorf("%q is not printed once for %q", want, volume.Name)
		}
	}
	for _, want := range []string{`id          = "data[0]"`, `attachment_mode = "block-device"`} {
		if strings.Count(registrations, want) != 1 {
			t.Errorf("%q is not printed once: %s", want, registrations)
		}
	}
}

// Only y and yes adopt anything.
func TestConfirmAdoption(t *testing.T) {
	for answer, want := range map[string]bool{
		"y\n": true, "Yes\n": true, "y": true, "": false, "\n": false, "n\n": false, "no\n": false, "yeah\n": false, "\ny\n": false,
	} {
		err := confirmAdoption(strings.NewReader(answer), io.Discard, "prod-1", hostileVolumes(""))
		if (err == nil) != want {
			t.Errorf("answer %q: %v", answer, err)
		}
	}
}
