// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package diagnose

import (
	"fmt"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// ExitCode is the exit code of an examination: 0, 1 with warnings, or 2 with failures.
func ExitCode(findings []metadata.Finding) (code int) {
	for _, f := range findings {
		switch f.Status {
		case metadata.StatusFailure:
			return 2
		case metadata.StatusWarning:
			code = 1
		}
	}
	return code
}

// examination collects the findings of an area.
type examination struct {
	area     string
	findings []metadata.Finding
}

func (e *examination) ok(looked, format string, args ...any) {
	e.findings = append(e.findings, metadata.Finding{
		Area: e.area, Status: metadata.StatusOK, Looked: looked, Found: fmt.Sprintf(format, args...),
	})
}

func (e *examination) warn(looked, next, format string, args ...any) {
	e.findings = append(e.findings, metadata.Finding{
		Area: e.area, Status: metadata.StatusWarning, Looked: looked, Found: fmt.Sprintf(format, args...), Next: next,
	})
}

func (e *examination) fail(looked, next, format string, args ...any) {
	e.findings = append(e.findings, metadata.Finding{
		Area: e.area, Status: metadata.StatusFailure, Looked: looked, Found: fmt.Sprintf(format, args...), Next: next,
	})
}
