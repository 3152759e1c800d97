// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package orchestrator_test

import (
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

func TestRestartAnswerText(t *testing.T) {
	for name, answer := range map[string]orchestrator.RestartReply{
		"accepted": {State: orchestrator.RestartAccepted, Boot: "b"},
		"refused":  {State: orchestrator.RestartRefused, Reason: "a \"block\" inhibitor\n${x}", Boot: "b"},
		"back":     {State: orchestrator.RestartBack},
	} {
		text := answer.Text("1")
		if got := orchestrator.ParseRestartReply(text, "1"); got != answer {
			t.Errorf("%s: read %+v from %s", name, got, text)
		}
		if got := orchestrator.ParseRestartReply(text, "2"); got != (orchestrator.RestartReply{}) {
			t.Errorf("%s: says %+v about another restart", name, got)
		}
	}
	for _, text := range []string{"", "{", "null", `"accepted"`, `{"restart":"1"}`, `{"restart":"1","state":"maybe"}`, `{"state":"accepted"}`} {
		if got := orchestrator.ParseRestartReply(text, "1"); got != (orchestrator.RestartReply{}) {
			t.Errorf("read %+v from %s", got, text)
		}
	}
}

func TestRestartID(t *testing.T) {
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	id := orchestrator.NewRestartID(now)
	if got, ok := orchestrator.RestartPlannedAt(id); !ok || !got.Equal(now) || id[:8] != "69a42a40" {
		t.Errorf("%s was planned at %s, want %s", id, got, now)
	}
	if other := orchestrator.NewRestartID(now); other == id {
		t.Errorf("%s names two restarts", id)
	}
	for _, id := range []string{
		"", "true", "7-prod-0001", "0123456789abcde", "not a number at all", "69a42a40nonsense", "69A42A4000000001",
		"69a42a40000000011", "+9a42a4000000001", "0x69a42a40000001", "69a42a40_0000001", " 69a42a400000000", "69a42a4000000001\n",
	} {
		if at, ok := orchestrator.RestartPlannedAt(id); ok {
			t.Errorf("%q was planned at %s", id, at)
		}
	}
}
