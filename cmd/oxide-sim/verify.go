// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/test/verify"
)

const verifyHelp = `verify plays cases on a rack and compares its responses with what the plugin assumes: docs/how-to/verify-a-rack.md.

It works in one project. That must be empty, and you repeat its name with --empty-project. verify makes disks of 1 or 2 GiB,
snapshots, groups and stopped instances there, whose names begin with csi-verify-. It removes them at the end, also after
Ctrl-C. If it was killed, the next run removes what is left. It touches nothing else.

The report is Markdown without token, host names and IDs. Progress goes to stderr.

Exit codes: 0, all is as assumed; 1, something differs; 2, verify could not begin, or could not go to its end.`

// exitError is an error with its own exit code. Its text is already on stderr.
type exitError struct{ code int }

func (e exitError) Error() string { return fmt.Sprintf("exit code %d", e.code) }

// rackFlags are the settings of the plugin that verify uses, with their help.
var rackFlags = map[string]string{
	"oxide-host":       "URL of the rack's API, such as https://silo.sys.example.com",
	"oxide-project":    "name or ID of an empty project",
	"oxide-token-file": "file with an API token; OXIDE_TOKEN is used if empty",
	"oxide-ca-file":    "PEM file with the only CA certificates to trust; the system's CAs if empty",
}

// verifyFlags are the command's own flags.
type verifyFlags struct {
	emptyProject, budget, instance, guestCommand, record string
	only                                                 []string
	start, json                                          bool
	wait, pause                                          time.Duration
}

func verifyCommand(stdout, stderr io.Writer) *cobra.Command {
	var f verifyFlags
	cmd := &cobra.Command{
		Use:   "verify",
		Short: "Compare a rack with what the plugin assumes",
		Long:  verifyHelp,
		Example: `  oxide-sim verify --oxide-host=https://silo.sys.example.com --oxide-token-file=token \
    --oxide-project=csi-test --empty-project=csi-test --start-instances > report.md`,
		Args: noArgs,
	}
	flags := cmd.Flags()
	config.OperatorFlags(flags)
	flags.VisitAll(func(flag *pflag.Flag) {
		usage, used := rackFlags[flag.Name]
		flag.Hidden, flag.Usage = !used, usage
	})
	f.define(flags)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		options, err := f.options(flags, stderr)
		if err != nil {
			return err
		}
		return f.run(cmd.Context(), options, stdout)
	}
	return cmd
}

func (f *verifyFlags) define(flags *pflag.FlagSet) {
	flags.SortFlags = false
	flags.StringVar(
		&f.emptyProject,
		"empty-project",
		"",
		"`NAME` of the project once more: it is empty and may be used (required)",
	)
	flags.StringVar(&f.budget, "budget", "16GiB", "at most `SIZE` of disks and snapshots at the same time")
	flags.BoolVar(
		&f.start,
		"start-instances",
		false,
		"also start instances of its own, each with one processor and 1 GiB, without a network",
	)
	flags.StringVar(
		&f.instance,
		"instance",
		"",
		"also stop and start the instance `NAME`, the only other object of the project, and give it disks",
	)
	flags.StringVar(
		&f.guestCommand,
		"guest-command",
		"",
		"`COMMAND` that runs oxide-csi verify-guest in that instance, such as \"ssh root@node oxide-csi verify-guest\"",
	)
	flags.StringVar(&f.record, "record", "", "keep all requests and responses, without secrets, in `FILE`")
	flags.BoolVar(&f.json, "json", false, "print the report as JSON")
	flags.StringSliceVar(&f.only, "only", nil, "play only these cases, as `ID,ID`")
	flags.DurationVar(&f.wait, "wait", 10*time.Minute, "how long a state of a disk or an instance may take")
	flags.DurationVar(&f.pause, "pause", time.Second, "time between two looks at a state")
}

// options checks all flags, and returns all problems together.
func (f *verifyFlags) options(flags *pflag.FlagSet, stderr io.Writer) (o verify.Options, err error) {
	var problems config.Problems
	// The plugin's settings need a cluster ID, which verify does not use.
	if err := flags.Set("cluster-id", "verify"); err != nil {
		return o, err
	}
	if err := flags.Set("mode", "controller"); err != nil {
		return o, err
	}
	cfg, _, err := config.LoadOperator(flags, os.Environ())
	if err != nil && !errors.As(err, &problems) {
		return o, err
	}
	problem := func(flag string, err error) {
		if err != nil {
			problems = append(problems, config.Problem{Flag: flag, What: err.Error()})
		}
	}
	if f.emptyProject == "" {
		problem(
			"--empty-project",
			errors.New("is required: repeat the project's name, so that verify works in no other project"),
		)
	}
	o.Budget, err = parseSize(f.budget)
	problem("--budget", err)
	if f.guestCommand != "" && f.instance == "" {
		problem("--guest-command", errors.New("needs --instance"))
	}
	problem("--only", verify.CheckIDs(f.only))
	if len(problems) > 0 {
		return o, problems
	}
	one := cfg.RackList()[0]
	if o.Token = one.Token.Reveal(); one.TokenFile != "" {
		if o.Token, err = rack.TokenFile(one.TokenFile, slog.New(slog.DiscardHandler))(); err != nil {
			return o, err
		}
	}
	roots, err := config.ReadCAs(one.CAFile)
	if err != nil {
		return o, err
	}
	o.HTTPClient = rack.NewHTTPClient(roots)
	o.HTTPClient.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	o.Host, o.Project, o.EmptyProject, o.Version = one.Host, one.Project, f.emptyProject, version
	o.StartInstances, o.Instance, o.GuestCommand = f.start, f.instance, f.guestCommand
	o.Only, o.Wait, o.Pause, o.Progress = f.only, f.wait, f.pause, stderr
	return o, nil
}

// run plays the cases and prints the report. After the first signal the run ends in order; after the second at once.
func (f *verifyFlags) run(ctx context.Context, o verify.Options, stdout io.Writer) (err error) {
	if f.record != "" {
		file, err := os.OpenFile(f.record, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, file.Close()) }()
		o.Record = file
	}
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	go func() {
		<-ctx.Done()
		stop()
	}()
	defer surviveBrokenPipes()()
	report := verify.Run(ctx, o)
	if f.json {
		e := json.NewEncoder(stdout)
		e.SetEscapeHTML(false)
		e.SetIndent("", "  ")
		err = e.Encode(report)
	} else {
		var text strings.Builder
		report.Markdown(&text)
		_, err = io.WriteString(stdout, text.String())
	}
	if err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	if code := report.ExitCode(); code != 0 {
		return exitError{code}
	}
	return nil
}
