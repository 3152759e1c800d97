// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package redact_test

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/core/redact"
)

func TestUserInfo(t *testing.T) {
	for in, want := range map[string]string{
		"https://user:canary@host:4646/":                      "https://(redacted)@host:4646/",
		"https://canary@host":                                 "https://(redacted)@host",
		"https://user:ca/na?ry#@host":                         "https://(redacted)@host",
		"https://user:can@ary@host":                           "https://(redacted)@host",
		"{NomadAddress:http://u:canary@h:4646 MaxDisks:8}":    "{NomadAddress:http://(redacted)@h:4646 MaxDisks:8}",
		`"https://u:canary@a" and "http://v:canary@b"`:        `"https://(redacted)@a" and "http://(redacted)@b"`,
		"HTTPS_PROXY=user:canary@proxy:3128":                  "HTTPS_PROXY=(redacted)@proxy:3128",
		"user:canary@[fe80::1]:3128":                          "(redacted)@[fe80::1]:3128",
		`invalid proxy address "user:canary@proxy"`:           `invalid proxy address "(redacted)@proxy"`,
		"https://host:4646/path":                              "https://host:4646/path",
		"write to root@host":                                  "write to root@host",
		"registry/oxide-csi-plugin:v0.1.0@sha256:0123":        "registry/oxide-csi-plugin:v0.1.0@sha256:0123",
		"time=2026-01-01T10:00:00Z volume_id=0f9c level=INFO": "time=2026-01-01T10:00:00Z volume_id=0f9c level=INFO",
	} {
		if got := redact.UserInfo(in); got != want {
			t.Errorf("%s: got %s, want %s", in, got, want)
		}
	}
}

// A log line has no password, neither in a text nor in an error.
func TestAttribute(t *testing.T) {
	var text bytes.Buffer
	log := slog.New(slog.NewJSONHandler(&text, &slog.HandlerOptions{ReplaceAttr: redact.Attribute}))
	log.Info(
		"at http://u:canary@host",
		"address",
		"http://u:canary@host",
		"error",
		errors.New("dial http://u:canary@host"),
	)
	if strings.Contains(text.String(), "canary") || strings.Count(text.String(), redact.Redacted) != 3 {
		t.Error(text.String())
	}
}
