// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/oxidecomputer/oxide-csi-plugin/admin"
	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// exitNotReady is the exit code if no source answered in time.
const exitNotReady = 3

const metadataHelp = `oxide-csi metadata finds the Oxide instance that it runs in, and the rack. It prints them, or writes them to a file that
the plugin reads (--metadata-file). In an init container it keeps an orchestrator's credentials out of the plugin's
container.

It uses the plugin's own settings for this, as flags, from the environment or from a file; see
docs/reference/configuration.md and docs/how-to/identity.md.

Exit codes: 0, the identity was printed or written; 1, it is invalid or could not be written; 2, the configuration is
wrong; 3, no source responded in time. It writes only with exit code 0.`

// metadataOptions are the command's own flags.
type metadataOptions struct {
	provider, output string
	timeout          time.Duration
}

func metadataCommand(environ []string, stdout, stderr io.Writer) *cobra.Command {
	var opts metadataOptions
	cmd := &cobra.Command{
		Use:   "metadata",
		Short: "Print or write which instance this is",
		Long:  metadataHelp,
		Example: `  oxide-csi metadata
  oxide-csi metadata --provider=kubernetes --node-name=worker-1 --output=/run/oxide-csi/metadata`,
		Args: admin.NoArgs,
	}
	flags := cmd.Flags()
	config.IdentityFlags(flags)
	flags.StringVar(&opts.provider, "provider", "", "the same as --metadata")
	flags.StringVar(&opts.output, "output", "", "file to write; print to stdout if empty")
	flags.DurationVar(&opts.timeout, "timeout", 30*time.Second, "how long to wait until a source responds; 0 tries once")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if opts.provider != "" {
			if err := flags.Set("metadata", opts.provider); err != nil {
				return err
			}
		}
		cfg, warnings, err := config.LoadIdentity(flags, environ)
		for _, warning := range warnings {
			fmt.Fprintf(stderr, "oxide-csi: warning: %s\n", warning)
		}
		var problems config.Problems
		if opts.timeout < 0 {
			problems = config.Problems{{Flag: "--timeout", What: fmt.Sprintf("%s is negative", opts.timeout)}}
		}
		var more config.Problems
		if errors.As(err, &more) {
			problems = append(problems, more...)
		}
		if len(problems) > 0 {
			return problems
		}
		instance, err := awaitInstance(cmd.Context(), cfg, opts.timeout, stderr)
		if err != nil {
			return err
		}
		text := encode(instance)
		if opts.output == "" {
			_, err := io.WriteString(stdout, text)
			return err
		}
		return writeFile(opts.output, text)
	}
	return cmd
}

// awaitInstance asks the provider until it knows the instance, returns ErrInvalid, or the timeout ends. A timeout of 0
// asks once.
func awaitInstance(
	ctx context.Context,
	cfg config.Config,
	timeout time.Duration,
	stderr io.Writer,
) (metadata.Instance, error) {
	log := newLogger(cfg, stderr)
	limit := timeout
	if limit == 0 {
		limit = singleAttemptTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var reason error // of the last attempt that the timeout did not interrupt
	instance, err := metadata.Await(ctx, provider(cfg, log), func(err error) (again bool) {
		again = timeout > 0 && errors.Is(err, metadata.ErrNotReady)
		if again && (reason == nil || reason.Error() != err.Error()) && ctx.Err() == nil {
			log.Info("this node is not known yet", "error", err)
		}
		if reason == nil || ctx.Err() == nil {
			reason = err
		}
		return again
	})
	if errors.Is(err, metadata.ErrNotReady) {
		return metadata.Instance{}, admin.Exit(exitNotReady, fmt.Errorf("no source responded: %w", reason))
	}
	return instance, err
}

// singleAttemptTimeout bounds the single attempt of --timeout=0.
const singleAttemptTimeout = 10 * time.Second

// encode returns the text to print or write. It leaves out an unknown rack, so that the reader uses its default.
func encode(instance metadata.Instance) string {
	text := "OXIDE_INSTANCE_ID=" + instance.ID + "\n"
	if instance.Rack != "" {
		text += "OXIDE_RACK=" + instance.Rack + "\n"
	}
	return text
}

// writeFile replaces a file atomically: a reader sees the old text or the new text, even after a power cut. Any user
// may read it, as the plugin may run as one.
func writeFile(name, text string) (err error) {
	dir := filepath.Dir(name)
	f, err := os.CreateTemp(dir, "."+filepath.Base(name)+".*")
	if err != nil {
		return fmt.Errorf("write %s: %w: check that its directory exists and is writable", name, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("write %s: %w", name, err), os.Remove(f.Name()))
		}
	}()
	_, err = f.WriteString(text)
	if err = errors.Join(err, f.Chmod(0o644), f.Sync(), f.Close()); err != nil {
		return err
	}
	if err = os.Rename(f.Name(), name); err != nil {
		return err
	}
	folder, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(folder.Sync(), folder.Close())
}
