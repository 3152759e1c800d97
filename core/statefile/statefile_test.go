// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package statefile_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/core/statefile"
)

func TestWriteKeepsTheOldContentIfItFails(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "state", "file")
	for _, content := range []string{"the first", "second"} { // the second is shorter
		if err := statefile.Write(path, []byte(content)); err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(path); err != nil || string(got) != content {
			t.Errorf("%q, %v, want %q", got, err, content)
		}
	}
	// A folder is in the way of the temporary file.
	if err := os.Mkdir(path+".new", 0o700); err != nil {
		t.Fatal(err)
	}
	if err := statefile.Write(path, []byte("lost")); err == nil {
		t.Error("no error")
	}
	if got, err := os.ReadFile(path); err != nil || string(got) != "second" {
		t.Errorf("%q, %v after a failed write, want the second content", got, err)
	}
}
