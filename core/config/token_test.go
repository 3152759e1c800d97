// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package config

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

func TestTokenIsNotPrinted(t *testing.T) {
	secret := NewToken(token)
	config := Config{OxideToken: secret, Racks: []Rack{{Name: "east", Token: secret}}}
	hidden := struct{ config *Config }{&config}
	deep := struct{ config Config }{config}
	var out bytes.Buffer
	for _, v := range []any{secret, &secret, config, &config, config.Racks, hidden, deep, map[string]Token{"t": secret}, []any{secret}} {
		for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "%d", "%T", "%p", "%t", "%10.3s"} {
			fmt.Fprintf(&out, verb+"\n", v)
		}
		fmt.Fprintln(&out, v)
		text, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		out.Write(text)
		text, err = yaml.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		out.Write(text)
		for _, handler := range []slog.Handler{slog.NewTextHandler(&out, nil), slog.NewJSONHandler(&out, nil)} {
			slog.New(handler).Info("configured", "value", v)
		}
	}
	fmt.Fprintln(&out, secret.String(), secret.GoString(), fmt.Errorf("token %s", secret))
	hex := fmt.Sprintf("%x", token)
	for _, leak := range []string{token, hex, strings.ToUpper(hex), "canary"} {
		if strings.Contains(out.String(), leak) {
			t.Errorf("prints %q", leak)
		}
	}
	if !strings.Contains(out.String(), redacted) {
		t.Error("prints no placeholder")
	}
	if secret.Reveal() != token || secret.Empty() || !(Token{}).Empty() || (Token{}).Reveal() != "" ||
		!NewToken("").Empty() {
		t.Error("Reveal or Empty is wrong")
	}
}

// A token that an operator put into another setting is shown in no error and no warning.
func TestTokenInTheWrongPlace(t *testing.T) {
	const junk = "hunter2-hunter2" // a token that has no token's prefix
	dir := t.TempDir()
	file := func(name, text string) string {
		name = filepath.Join(dir, name)
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return name
	}
	type input struct {
		args, environ []string
		yaml          string
	}
	inputs := []input{
		{environ: []string{"OXIDE_TOKEN=" + junk}},
		{environ: []string{"OXIDE_TOKEN= " + junk + " x"}},
		{environ: []string{"OXIDE_CSI_" + token + "=" + token}},
		{args: []string{"--oxide-token-file=" + file("junk", junk+" "+token)}},
		{args: []string{"--config=" + file("token", token)}},
		{args: []string{"--config=" + file("bare", "[ "+token)}},
		{yaml: "oxideToken: " + token + "\n"},
		{yaml: token + ": x\n"},
		{yaml: "mode: *" + token + "\n"},
		{yaml: "mode: {" + token + ": {}}\n"},
		{yaml: "racks: " + token + "\n"},
		{yaml: "racks: [{token: " + token + "}]\n"},
		{yaml: "racks: [{" + token + ": x}]\n"},
	}
	for _, secret := range []string{token, junk} {
		for _, s := range settings() {
			for _, text := range []string{secret, "https://x:" + secret + "@h", "${" + secret + "}", strings.ToUpper(secret), "\t" + secret + "\n" + secret} {
				if s.flag != "" {
					inputs = append(inputs, input{args: []string{"--" + s.flag + "=" + text}})
				}
				if s.env != "" && s.key != "oxideToken" {
					inputs = append(inputs, input{environ: []string{s.env + "=" + text}})
				}
				inputs = append(inputs, input{yaml: fmt.Sprintf("%s: %q\n", s.key, text)})
				inputs = append(
					inputs,
					input{yaml: fmt.Sprintf("racks: [{name: %q, host: %q, tokenFile: %q, project: %q}]\n", text, text, text, text)},
				)
			}
		}
	}
	rejected := 0
	for _, in := range inputs {
		fs := pflag.NewFlagSet("oxide-csi", pflag.ContinueOnError)
		Flags(fs)
		if in.yaml != "" {
			in.args = append(in.args, "--config="+file("c", in.yaml))
		}
		if err := fs.Parse(in.args); err != nil {
			t.Fatal(err)
		}
		_, warnings, err := Load(fs, append([]string{"OXIDE_TOKEN=" + junk}, in.environ...))
		text := strings.Join(warnings, "\n")
		if err != nil {
			rejected++
			text += err.Error()
		}
		for _, leak := range []string{token, strings.ToUpper(token), junk} {
			if strings.Contains(text, leak) {
				t.Errorf("%+v: shows %q:\n%s", in, leak, text)
			}
		}
	}
	if rejected < len(inputs)/2 {
		t.Errorf("only %d of %d inputs were rejected: the test checks too few errors", rejected, len(inputs))
	}
}

func TestScrub(t *testing.T) {
	for in, want := range map[string]string{
		"set --oxide-token-file or OXIDE_TOKEN_FILE": "set --oxide-token-file or OXIDE_TOKEN_FILE",
		"one begins with oxide-token-":               "one begins with oxide-token-",
		`"oxide-token-a_b" twice "Oxide-Token-c"`:    `"(redacted)" twice "(redacted)"`,
		"oxide-token-file":                           "oxide-token-file",
		"oxide-token-file2":                          "(redacted)",
		"oxide-token-file=x":                         "oxide-token-file=x",
		"two\nlines\r\nand  space":                   "two lines and space",
		"a s3cr3t here":                              "a (redacted) here",
	} {
		if got := redactTokens(in, NewToken(" s3cr3t\n")); got != want {
			t.Errorf("scrub(%q) = %q, want %q", in, got, want)
		}
	}
}

func FuzzFile(f *testing.F) {
	for _, s := range []string{
		"mode: all\n", "racks: [{name: a, host: b}]\n", "a: &a [*a]\n", "? x\n: y\n", "racks:\n- *a\n", "- 1\n", "\xff", "mode: !!binary aGk=\n",
		"<<: {mode: all}\n", "racks: &r [*r]\n", "mode: &m {x: *m}\n", token + ": " + token,
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, yaml string) {
		fs := pflag.NewFlagSet("oxide-csi", pflag.ContinueOnError)
		Flags(fs)
		if err := fs.Parse([]string{"--config=" + write(t, yaml)}); err != nil {
			t.Fatal(err)
		}
		_, _, err := Load(fs, tokenEnv)
		if err == nil {
			t.Fatalf("%q holds a whole configuration?", yaml)
		}
		for _, line := range problemsOf(t, err) {
			if strings.Contains(line, token) {
				t.Errorf("%q shows a token: %s", yaml, line)
			}
		}
	})
}
