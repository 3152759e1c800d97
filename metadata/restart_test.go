package metadata_test

import (
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

func TestRestartAnswerText(t *testing.T) {
	for name, answer := range map[string]metadata.RestartAnswer{
		"accepted": {State: metadata.RestartAccepted, Boot: "b"},
		"refused":  {State: metadata.RestartRefused, Reason: "a \"block\" inhibitor\n${x}", Boot: "b"},
		"back":     {State: metadata.RestartBack},
	} {
		text := answer.Text("1")
		if got := metadata.ParseRestartAnswer(text, "1"); got != answer {
			t.Errorf("%s: read %+v from %s", name, got, text)
		}
		if got := metadata.ParseRestartAnswer(text, "2"); got != (metadata.RestartAnswer{}) {
			t.Errorf("%s: says %+v about another restart", name, got)
		}
	}
	for _, text := range []string{"", "{", "null", `"accepted"`, `{"restart":"1"}`, `{"restart":"1","state":"maybe"}`, `{"state":"accepted"}`} {
		if got := metadata.ParseRestartAnswer(text, "1"); got != (metadata.RestartAnswer{}) {
			t.Errorf("read %+v from %s", got, text)
		}
	}
}
