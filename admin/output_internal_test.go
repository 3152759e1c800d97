// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package admin

import (
	"io"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"

	"github.com/oxidecomputer/oxide-csi-plugin/admin/client"
)

// A name cannot make up lines or cells of a table: any user of a rack can write it.
func TestNamesStayInTheirCell(t *testing.T) {
	var text strings.Builder
	mustWork(t, printTable(&text, func(w io.Writer) {
		printVolumes(w, client.VolumeList{Volumes: []client.Volume{
			{ID: "id", Name: "a\npostgres\t1GiB", NodeName: "node\nx", Mounts: []string{"/srv/a\nb"}},
		}})
	}))
	if lines := strings.Split(
		text.String(),
		"\n",
	); len(lines) != 3 ||
		!strings.HasPrefix(lines[1], `a\npostgres\t1GiB `) {
		t.Errorf("%q", lines)
	}
}

// The table of a list has at most 100 columns: long texts lose their middle, short ones nothing.
func TestListsFit(t *testing.T) {
	uuid := "6f3a1c9e-2b7d-4e58-9a41-0d5c8e7f1a23"
	list := client.VolumeList{Volumes: []client.Volume{
		{ID: uuid, Name: "pvc-" + uuid, SizeBytes: 1023 << 40, NodeName: strings.Repeat("node", 15), Mounts: []string{
			"/var/lib/kubelet/plugins/kubernetes.io/csi/csi.oxide.computer/globalmount", "/srv/é",
		}},
		{ID: uuid, DiskName: strings.Repeat("d", 63), SizeBytes: 1 << 30, NodeID: uuid},
		{ID: uuid, Name: "x\x1b[2J", Cluster: strings.Repeat("c", 63)},
	}}
	snapshots := []client.Snapshot{
		{ID: uuid, Name: strings.Repeat("s", 90), SourceVolumeID: uuid, SourceVolume: "pvc-" + uuid},
	}
	var text, wide strings.Builder
	for _, table := range []func(io.Writer){
		func(w io.Writer) { printVolumes(w, list) }, func(w io.Writer) { printSnapshots(w, snapshots) },
	} {
		text.Reset()
		mustWork(t, printTable(&text, table))
		widest := 0
		for row := range strings.Lines(text.String()) {
			widest = max(widest, utf8.RuneCountInString(strings.TrimRight(row, "\n")))
		}
		if widest != listColumns && widest != listColumns-1 { // the last column may end with a short text
			t.Errorf("%d columns:\n%s", widest, text.String())
		}
	}
	list.Volumes = list.Volumes[:1]
	text.Reset()
	mustWork(t, printTable(&text, func(w io.Writer) { printVolumes(w, list) }))
	if !strings.Contains(text.String(), "pvc-"+uuid+"  1023TiB  -    ") {
		t.Errorf("the name is cut before other columns:\n%s", text.String())
	}
	mustWork(t, printTable(&wide, func(w io.Writer) { printVolumesWide(w, list) }))
	mustWork(t, printTable(&wide, func(w io.Writer) { printSnapshotsWide(w, snapshots) }))
	if strings.Contains(wide.String(), "…") || strings.Count(wide.String(), uuid) != 4 {
		t.Errorf("the wide table lacks something:\n%s", wide.String())
	}
	for _, test := range []struct {
		text, want string
		width      int
	}{{"postgres", "postgres", 8}, {"postgres", "pos…res", 7}, {"postgres", "pos…es", 6}, {"ééééé", "é…é", 3}} {
		if got := shortened(test.text, test.width); got != test.want {
			t.Errorf("%s in %d columns is %s", test.text, test.width, got)
		}
	}
}

// YAML is the JSON output in another form.
func TestYAMLIsTheJSON(t *testing.T) {
	value := []client.Volume{{ID: "1", Name: "true", Cluster: "a: b\n\x1b[2J", SizeBytes: 1 << 53, Mounts: []string{"/a"}}}
	var asYAML, asJSON strings.Builder
	mustWork(t, printYAML(&asYAML, value))
	mustWork(t, printJSON(&asJSON, value))
	var fromYAML, fromJSON any
	mustWork(t, yaml.Unmarshal([]byte(asYAML.String()), &fromYAML))
	mustWork(t, yaml.Unmarshal([]byte(asJSON.String()), &fromJSON))
	if diff := cmp.Diff(fromJSON, fromYAML); diff != "" || !strings.HasPrefix(asYAML.String(), "- volumeID: \"1\"\n") {
		t.Errorf("%s\n%s", diff, asYAML.String())
	}
}

func mustWork(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
