// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package admin

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"regexp"

	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
	"github.com/oxidecomputer/oxide-csi-plugin/core/redact"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator/choice"
)

// logParts are the files of a bundle with the last lines of the plugin's logs: those that the orchestrator has, and
// this host's journal.
func logParts(ctx context.Context, cfg config.Config) (parts []bundlePart) {
	if reader := choice.Of(cfg).Logs; reader != nil {
		logs, err := reader.Logs(ctx)
		if err != nil {
			parts = append(parts, bundlePart{"logs", func(context.Context) ([]byte, error) { return nil, err }})
		}
		for _, log := range logs {
			parts = append(parts, bundlePart{
				"logs/" + log.Name + ".txt", func(context.Context) ([]byte, error) { return []byte(log.Text), log.Err },
			})
		}
	}
	return append(parts, bundlePart{"logs/journal.txt", readJournal})
}

// readJournal returns the last lines that the services of deploy/systemd have logged on this host.
func readJournal(ctx context.Context) ([]byte, error) {
	lines, err := exec.CommandContext(ctx, "journalctl", "--unit=oxide-csi-controller", "--unit=oxide-csi-node",
		"--lines=600", "--no-pager", "--quiet", "--output=short-iso").Output()
	if err == nil && len(lines) == 0 {
		err = errors.New("it has no lines of oxide-csi-controller and oxide-csi-node that this user may read")
	}
	return lines, err
}

// secretForms match what looks like a token: one of a rack, a JSON web token as Kubernetes and Nomad give them, and the
// value of a header with credentials, also in JSON and as Go prints it. The plugin logs none of them; other programs
// could.
var secretForms = regexp.MustCompile(
	config.TokenPrefix + `[\w.~+/=-]+|\beyJ[\w-]+\.[\w-]+\.[\w-]+|` +
		`(?i:bearer|basic|x-nomad-token)["'\\:=\[\s]+[\w.~+/=-]+`,
)

// redactor returns the function that takes secrets out of a file of a bundle.
func redactor(cfg config.Config) func([]byte) []byte {
	secrets := []string{cfg.NomadToken.Reveal()}
	if text, err := os.ReadFile(cfg.NomadTokenFile); err == nil {
		secrets = append(secrets, string(bytes.TrimSpace(text)))
	}
	return func(text []byte) []byte {
		for _, secret := range secrets {
			if secret != "" {
				text = bytes.ReplaceAll(text, []byte(secret), []byte(redact.Redacted))
			}
		}
		return []byte(redact.UserInfo(string(secretForms.ReplaceAll(text, []byte(redact.Redacted)))))
	}
}
