// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package device

import (
	"crypto/sha256"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/test/pages"
)

// Since 0.1.0. A node of another version finds these markers on a disk. The checksums are those of the whole copies,
// with their padding.
func TestMarkersArePermanent(t *testing.T) {
	disk := uuid.MustParse("0f9c5a0e-8c1f-4c6b-9f58-5d2f0b6f2a11")
	format := formatMarker(Device{Disk: Disk{SizeBytes: 1 << 30}}, disk)
	if want := []int64{169537536, 395587584, 847687680, 960712704}; !slices.Equal(format.offsets, want) {
		t.Errorf("format marker at %d, want %d", format.offsets, want)
	}
	for name, test := range map[string]struct {
		m    marker
		want string
	}{
		"format":  {format, "4096 bytes fe804ee6460979586a9b5bccc046d4ba08d989bdab3736ecd086a2c2e4fc1ad0"},
		"growing": {workMarker(Growing, disk), "1024 bytes a1c9297377b297a14d09d7e9ce6330151a3e1448059de153fc1e463b24b3c2c8"},
		"check":   {workMarker(Checking, disk), "1024 bytes 95de6b5fc362b2439b5d1c7640757187f211becd6ff1c6aab212b81456b1c9ee"},
	} {
		if got := fmt.Sprintf("%d bytes %x", len(test.m.content), sha256.Sum256(test.m.content)); got != test.want {
			t.Errorf("%s marker: %s, want %s", name, got, test.want)
		}
		firstLine, _, _ := strings.Cut(string(test.m.content), "\n")
		pages.Shows(t, "../../docs/reference/formats.md", "`"+firstLine+"`")
	}
}
