// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package admin

import (
	"io"
	"regexp"
	"strings"
	"text/template"

	"github.com/oxidecomputer/oxide-csi-plugin/admin/client"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// This file prints what an orchestrator needs in order to use a volume that it did not create.

// Names that the orchestrators accept. Every user of the project can write the description that a name comes from, and
// the output goes to kubectl or to a shell.
var (
	kubernetesName  = regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$`)
	kubernetesClaim = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?/[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$`)
	nomadName       = regexp.MustCompile(`^[-a-zA-Z0-9_.\[\]]{1,128}$`)
)

// registration is the data of the templates below.
type registration struct {
	client.AdoptableVolume
	// Name is the volume's name, or its ID if the orchestrator does not accept the name.
	Name string
	// Namespace and ClaimName are empty if the claim is not known.
	Namespace, ClaimName   string
	StorageClass, PluginID string
}

func (registration) Driver() string      { return rpc.PluginName }
func (registration) TopologyKey() string { return rpc.TopologySegmentRack }
func (r registration) RawBlock() bool    { return r.Context[rpc.KeyRawBlock] == "true" }
func (r registration) Encrypted() bool   { return r.Context[rpc.KeyEncryption] != "" }

// printPersistentVolumes prints the PersistentVolumes of all volumes that are not deleted.
func printPersistentVolumes(w io.Writer, volumes []client.AdoptableVolume, storageClass string) {
	for _, v := range volumes {
		r := registration{AdoptableVolume: v, Name: v.ID, StorageClass: storageClass}
		if kubernetesName.MatchString(v.Name) {
			r.Name = v.Name
		}
		if kubernetesClaim.MatchString(v.Claim) {
			r.Namespace, r.ClaimName, _ = strings.Cut(v.Claim, "/")
		}
		printRegistration(w, persistentVolume, r)
	}
}

// printNomadVolumes prints a script that registers all volumes that are not deleted.
func printNomadVolumes(w io.Writer, volumes []client.AdoptableVolume, pluginID string) {
	for _, v := range volumes {
		r := registration{AdoptableVolume: v, Name: v.ID, PluginID: pluginID}
		if nomadName.MatchString(v.Name) {
			r.Name = v.Name
		}
		printRegistration(w, nomadVolume, r)
	}
}

// printRegistration writes to a table, which returns write errors when it is flushed.
func printRegistration(w io.Writer, format *template.Template, r registration) {
	if !r.Deleted {
		_ = format.Execute(w, r)
	}
}

// persistentVolume keeps the disk when its claim is deleted. The annotation lets the plugin delete the disk if a user
// changes the reclaim policy (sig-storage-lib-external-provisioner, controller/controller.go, shouldDelete).
var persistentVolume = template.Must(template.New("PersistentVolume").Parse(`---
apiVersion: v1
kind: PersistentVolume
metadata:
  name: {{printf "%q" .Name}}
  annotations:
    pv.kubernetes.io/provisioned-by: {{.Driver}}
spec:
  capacity:
    storage: "{{.SizeBytes}}"
  volumeMode: {{if .RawBlock}}Block{{else}}Filesystem{{end}}
  accessModes: [ReadWriteOnce]
  persistentVolumeReclaimPolicy: Retain
  storageClassName: {{printf "%q" .StorageClass}}
{{- if .ClaimName}}
  claimRef:
    apiVersion: v1
    kind: PersistentVolumeClaim
    namespace: {{printf "%q" .Namespace}}
    name: {{printf "%q" .ClaimName}}
{{- end}}
  csi:
    driver: {{.Driver}}
    volumeHandle: {{.ID}}
    volumeAttributes:
{{- range $key, $value := .Context}}
      {{$key}}: {{printf "%q" $value}}
{{- end}}
{{- if .Encrypted}}
    # The volume is encrypted. This is the Secret with its passphrase, as docs/how-to/encrypt-volumes.md names it.
{{- if .ClaimName}}
    nodeStageSecretRef:
      namespace: {{printf "%q" .Namespace}}
      name: {{printf "%q" (print .ClaimName "-luks")}}
{{- else}}
    # The claim is not known: fill in both.
    nodeStageSecretRef:
      namespace: ""
      name: ""
{{- end}}
{{- end}}
  nodeAffinity:
    required:
      nodeSelectorTerms:
        - matchExpressions:
            - key: {{.TopologyKey}}
              operator: In
              values: [{{printf "%q" .Rack}}]
`))

// nomadVolume is a here-document. No quoted text spans lines, so none can end it.
var nomadVolume = template.Must(template.New("volume").Parse(`nomad volume register - <<'END'
id          = {{printf "%q" .Name}}
name        = {{printf "%q" .Name}}
type        = "csi"
plugin_id   = {{printf "%q" .PluginID}}
external_id = "{{.ID}}"

capability {
  access_mode     = "single-node-writer"
  attachment_mode = "{{if .RawBlock}}block-device{{else}}file-system{{end}}"
}

context {
{{- range $key, $value := .Context}}
  {{$key}} = {{printf "%q" $value}}
{{- end}}
}
{{- if .Encrypted}}

# The volume is encrypted: put its passphrase here, as docs/how-to/encrypt-volumes.md says.
# secrets { passphrase = "" }
{{- end}}

topology_request {
  required {
    topology {
      segments = {
        "{{.TopologyKey}}" = {{printf "%q" .Rack}}
      }
    }
  }
}
END
`))
