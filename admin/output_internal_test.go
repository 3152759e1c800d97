// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package admin

import (
	"io"
	"strings"
	"testing"

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

func mustWork(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
