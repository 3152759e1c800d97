// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package hostexec_test

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device/devicetest"
	"github.com/oxidecomputer/oxide-csi-plugin/core/hostexec"
	"github.com/oxidecomputer/oxide-csi-plugin/test/iohang"
)

// A program that waits for a disk does not end when it is killed. Run leaves it behind, and says when it has ended.
func TestRunLeavesAHungProgramBehind(t *testing.T) {
	disk := devicetest.New(t).Add("csi-hung", 1<<20)
	release := iohang.Start(t, os.Getpid(), disk.Number.Major, disk.Number.Minor)
	// Real time, because dd is a program. On a busy machine it needs a while until it reads, and before that it can be
	// killed.
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	_, err := hostexec.Run(ctx, "dd", "if="+disk.Loop, "of=/dev/null", "iflag=direct", "bs=4096", "count=1")
	var left *hostexec.LeftBehindError
	if !errors.As(err, &left) || !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("%v, want a program that was left behind", err)
	}
	select {
	case <-left.Ended:
		t.Error("Run waited until the program had ended")
	default:
	}
	release()
	select {
	case <-left.Ended:
	case <-time.After(time.Minute):
		t.Error("the program has not ended although the disk answers")
	}
}
