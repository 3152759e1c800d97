// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package admin

import (
	"context"
	"io"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/admin/client"
)

// late is a context on a busy machine: it has not ended although its deadline has passed.
type late struct {
	context.Context
	deadline time.Time
}

func (l late) Deadline() (time.Time, bool) { return l.deadline, true }

// A command with --wait whose time is up during an attempt ends with what it waits for, and not with the end of that
// attempt.
func TestTimeIsUpDuringAnAttempt(t *testing.T) {
	t.Parallel()
	cmd, attempts := &cobra.Command{}, 0
	cmd.SetContext(late{t.Context(), time.Now().Add(time.Second)})
	_, err := callPlugin(&storageCommands{stdout: io.Discard, stderr: io.Discard, wait: true}, cmd,
		func(context.Context, *client.Client) (int, error) {
			if attempts++; attempts == 1 {
				return 0, &client.Error{Code: codes.Aborted, Text: "the reason"}
			}
			return 0, &client.Error{Code: codes.DeadlineExceeded, Text: "no response within --timeout"}
		})
	if err == nil || err.Error() != "the reason" || attempts != 2 {
		t.Errorf("after %d attempts: %v", attempts, err)
	}
}
