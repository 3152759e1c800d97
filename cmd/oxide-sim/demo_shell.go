// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// shell runs the commands of the story. A reader can run them too: env is a file for any shell that sets folder and
// variables.
type shell struct {
	prompt string
	// env is the path of that file.
	env string
}

const envFile = "env"

// exitBlocked is the exit code of oxide-csi for FAILED_PRECONDITION (docs/reference/cli.md).
const exitBlocked = 5

// newShell creates a shell in a folder, with the variables set.
func (d *demo) newShell(prompt, dir string, variables ...string) (*shell, error) {
	var text strings.Builder
	for _, variable := range append(variables, "PATH="+filepath.Dir(d.programs.Plugin)) {
		name, value, _ := strings.Cut(variable, "=")
		value = quoted(value)
		if name == "PATH" {
			value += `:"$PATH"`
		}
		fmt.Fprintf(&text, "export %s=%s\n", name, value)
	}
	fmt.Fprintf(&text, "cd %s\n", quoted(dir))
	s := &shell{prompt: prompt, env: filepath.Join(dir, envFile)}
	return s, os.WriteFile(s.env, []byte(text.String()), 0o644)
}

var plain = regexp.MustCompile(`^[\w./=-]+$`)

// quoted quotes a text as one word of the shell.
func quoted(text string) string {
	if plain.MatchString(text) {
		return text
	}
	return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'"
}

// run runs a command of oxide-csi, and returns its output and its exit code.
func (s *shell) run(ctx context.Context, line string) (printed string, code int, err error) {
	cmd := exec.CommandContext(ctx, "sh", "-c", ". "+quoted(s.env)+" && exec "+line)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // so that a Ctrl-C reaches only the demo, which ends the command
	var output bytes.Buffer
	cmd.Stdout, cmd.Stderr = &output, &output
	err = cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.Exited() {
		err = nil
	}
	if err != nil {
		return "", 0, fmt.Errorf("%s: %w", line, err)
	}
	return strings.TrimSuffix(output.String(), "\n"), cmd.ProcessState.ExitCode(), nil
}

// variables are the variables of a shell on a node, or of a shell with the controller only.
func (d *demo) variables(m *machine) []string {
	variables := []string{"OXIDE_CSI_CONTROLLER_ENDPOINT=" + d.processes.controller.Socket}
	if m == nil {
		for _, instance := range d.processes.sim.Instances {
			variables = append(variables, variableOf(instance)+"="+instance.ID)
		}
		return variables
	}
	return append(variables,
		"OXIDE_CSI_NODE_ENDPOINT="+m.plugin.Socket,
		"OXIDE_CSI_STAGING_DIR="+m.staging,
		"OXIDE_CSI_SYS_ROOT="+filepath.Join(m.instance.Guest, "sys"))
}

// variableOf is the name of the variable with the ID of a node.
func variableOf(instance simtest.Instance) string { return strings.ReplaceAll(instance.Name, "-", "_") }

// named is the flag that names the node. A command on a node without a plugin needs it.
func (m *machine) named() string {
	if m.plugin != nil {
		return ""
	}
	return " --node=$" + variableOf(m.instance)
}
