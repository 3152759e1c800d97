// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package diagnose

import (
	"fmt"

	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// ExitCode is the exit code of an examination: 0, 1 with warnings, or 2 with failures.
func ExitCode(findings []orchestrator.Finding) (code int) {
	for _, f := range findings {
		switch f.Status {
		case orchestrator.StatusFailure:
			return 2
		case orchestrator.StatusWarning:
			code = 1
		}
	}
	return code
}

// examination collects the findings of an area.
type examination struct {
	area     string
	of       string // the orchestrator whose words the next steps have
	findings []orchestrator.Finding
}

func (e *examination) ok(looked, format string, args ...any) {
	e.findings = append(e.findings, orchestrator.Finding{
		Area: e.area, Status: orchestrator.StatusOK, Looked: looked, Found: fmt.Sprintf(format, args...),
	})
}

func (e *examination) warn(looked, next, format string, args ...any) {
	e.findings = append(e.findings, orchestrator.Finding{
		Area: e.area, Status: orchestrator.StatusWarning, Looked: looked, Found: fmt.Sprintf(format, args...), Next: next,
	})
}

func (e *examination) fail(looked, next, format string, args ...any) {
	e.findings = append(e.findings, orchestrator.Finding{
		Area: e.area, Status: orchestrator.StatusFailure, Looked: looked, Found: fmt.Sprintf(format, args...), Next: next,
	})
}
