// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package diagnose_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/admin/client"
	"github.com/oxidecomputer/oxide-csi-plugin/admin/diagnose"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// A restart that waits for an operator is a warning, with the reason. A restart that begins by itself is none.
func TestExamineRestarts(t *testing.T) {
	now := time.Now()
	for reason, want := range map[rpc.RestartReason]orchestrator.Status{
		rpc.ReasonWindow: orchestrator.StatusOK, rpc.ReasonCoolDown: orchestrator.StatusOK,
		rpc.ReasonOthers: orchestrator.StatusOK, rpc.ReasonUnderWay: orchestrator.StatusOK, "": orchestrator.StatusOK,
		rpc.ReasonHours: orchestrator.StatusWarning, rpc.ReasonManual: orchestrator.StatusWarning,
		rpc.ReasonRefused: orchestrator.StatusWarning, rpc.ReasonSelf: orchestrator.StatusWarning,
		rpc.ReasonState: orchestrator.StatusWarning,
	} {
		found := diagnose.ExamineRestarts([]client.Restart{
			{NodeID: "id", NodeName: "node-a", Reason: reason, Message: "the message", Since: now.Add(-time.Minute)},
		}, now)
		checkComplete(t, found)
		if len(found) != 1 || found[0].Status != want {
			t.Fatalf("%q: %+v", reason, found)
		}
		text := found[0].Looked + " " + found[0].Found
		told := strings.Contains(text, "instance node-a") && strings.Contains(text, "1m0s") &&
			strings.Contains(text, "the message")
		if told != (reason != "") {
			t.Errorf("%q: %s", reason, text)
		}
	}
	if found := diagnose.RestartsUnknown("/csi.sock", errors.New("no answer")); len(notOK(found)) != 1 {
		t.Errorf("%+v", found)
	}
}
