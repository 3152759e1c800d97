// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package admin

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/oxidecomputer/oxide-csi-plugin/admin/diagnose"
	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
)

const bundleHelp = `support-bundle writes one tar file for a question to the maintainers, and prints what is in it: the version, the
settings, what doctor finds, the orphans, metrics and readiness of the plugin at --http-endpoint, and the last lines of the
plugin's logs: of up to 20 pods or allocations (docs/reference/rights.md), controllers and unhealthy nodes first, and of
this host's journal. What cannot be read is left out, with the reason. No token and no password is in it, but IDs, names
and addresses are: look at it before you pass it on. FILE must not exist yet.

` + operatorHelp

func bundleCommand(p Program) *cobra.Command {
	o := newOperator(p)
	cmd := &cobra.Command{
		Use:     "support-bundle FILE",
		Short:   "Write what maintainers need to see into one tar file",
		Long:    bundleHelp,
		Example: `  oxide-csi support-bundle oxide-csi.tar --kubeconfig=$HOME/.kube/config`,
		Args:    exactly("FILE"),
	}
	return o.command(cmd, func(cmd *cobra.Command, cfg config.Config, args []string) (err error) {
		ctx, cancel := context.WithTimeout(cmd.Context(), doctorTimeout)
		defer cancel()
		file, err := os.OpenFile(args[0], os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		if errors.Is(err, fs.ErrExist) {
			return Usage("%s exists already: name another FILE", args[0])
		}
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, file.Close()) }()
		bundle := tar.NewWriter(file)
		redact := redactor(cfg)
		for _, part := range append(o.bundleParts(cfg), logParts(ctx, cfg)...) {
			content, err := part.read(ctx)
			if err != nil {
				_, _ = fmt.Fprintf(o.stdout, "%s is left out: %s\n", part.name, err)
				continue
			}
			content = redact(content)
			header := tar.Header{Name: part.name, Mode: 0o600, Size: int64(len(content)), ModTime: time.Now()}
			if err := bundle.WriteHeader(&header); err != nil {
				return err
			}
			if _, err := bundle.Write(content); err != nil {
				return err
			}
			_, _ = fmt.Fprintf(o.stdout, "%s, %d bytes\n", part.name, len(content))
		}
		return errors.Join(bundle.Close(), file.Sync())
	})
}

// bundlePart is a file of a bundle.
type bundlePart struct {
	name string
	read func(context.Context) ([]byte, error)
}

func (o *operator) bundleParts(cfg config.Config) []bundlePart {
	return []bundlePart{
		{"version.txt", func(context.Context) ([]byte, error) { return []byte(o.program.Version + "\n"), nil }},
		{"settings.txt", func(context.Context) ([]byte, error) {
			return fmt.Appendf(nil, "%+v\n", cfg), nil // a token prints as redacted
		}},
		{"doctor.json", func(ctx context.Context) ([]byte, error) {
			return indented(o.examine(ctx, cfg))
		}},
		{"orphans.json", func(ctx context.Context) ([]byte, error) {
			orchestrator, err := inventorist(cfg)
			if err != nil {
				return nil, err
			}
			racks, err := o.racks(cfg, slog.New(slog.DiscardHandler))
			if err != nil {
				return nil, err
			}
			return indented(diagnose.FindOrphans(ctx, racks, cfg.ClusterID, orchestrator, time.Now()))
		}},
		{"metrics.txt", func(ctx context.Context) ([]byte, error) { return fetch(ctx, cfg.HTTPEndpoint, "/metrics") }},
		{"readyz.txt", func(ctx context.Context) ([]byte, error) { return fetch(ctx, cfg.HTTPEndpoint, "/readyz") }},
	}
}

func indented[T any](value T, err error) ([]byte, error) {
	if err != nil {
		return nil, err
	}
	var text bytes.Buffer
	encoder := json.NewEncoder(&text)
	encoder.SetIndent("", "  ")
	err = encoder.Encode(value)
	return text.Bytes(), err
}

// maxFetched is more than the metrics of any plugin.
const maxFetched = 16 << 20

// fetch reads a page of the plugin's HTTP endpoint. An address without a host is on this machine.
func fetch(ctx context.Context, address, path string) ([]byte, error) {
	if address == "" {
		return nil, errors.New("--http-endpoint is not set")
	}
	client := http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, network, address)
		},
	}}
	defer client.CloseIdleConnections()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://localhost"+path, nil)
	if err != nil {
		return nil, err
	}
	answer, err := client.Do(request)
	if err != nil {
		return nil, err
	}
	text, err := io.ReadAll(io.LimitReader(answer.Body, maxFetched))
	return text, errors.Join(err, answer.Body.Close())
}
