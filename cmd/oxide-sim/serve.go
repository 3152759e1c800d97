// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/guest"
)

const (
	// drainTime is how long requests may continue after the signal to end.
	drainTime = 3 * time.Second
	// haltTime is how long guests may take to halt after the signal to end.
	haltTime = 4 * time.Second
	// endTime is the total time to end.
	endTime = 9 * time.Second
)

func serveCommand(stdout, stderr io.Writer) *cobra.Command {
	var flags serveFlags
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Simulate a rack until it gets a signal",
		Long: "serve simulates a rack on a loopback address. Once it serves, it prints what a client needs; logs go to stderr.\n\n" +
			"SIZE is a number of bytes, or one with a unit such as 10GiB.",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := flags.parse()
			if err != nil {
				return err
			}
			return serve(cmd.Context(), c, stdout, slog.New(slog.NewTextHandler(stderr, nil)))
		},
	}
	flags.define(cmd.Flags())
	return cmd
}

// serve runs until SIGTERM or SIGINT. A second signal ends the process at once. Nil means that nothing is left behind.
func serve(ctx context.Context, c serveConfig, stdout io.Writer, log *slog.Logger) (err error) {
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	defer surviveBrokenPipes()()
	var s server
	defer func() {
		stop()
		err = errors.Join(err, s.end())
	}()
	if err := s.begin(c, log); err != nil {
		return err
	}
	if _, err := io.WriteString(stdout, s.announcement(c)); err != nil {
		return fmt.Errorf("write to stdout: %w", err)
	}
	select {
	case <-ctx.Done():
		log.Info("ending on a signal")
		return nil
	case err := <-s.failed:
		return err
	}
}

// server is the running simulated rack.
type server struct {
	rack         *simrack.Rack
	api, control net.Listener // control may be nil
	secure       *tls.Config  // nil for plain HTTP
	// failed receives an error that ended a server early.
	failed chan error
	// undo reverts what begin did; the last function is called first.
	undo []func() error
}

// begin opens the sockets first. So it reports an address in use before it starts any guest.
func (s *server) begin(c serveConfig, log *slog.Logger) (err error) {
	s.failed = make(chan error, 2)
	if s.api, err = s.listen(c.listen); err != nil {
		return err
	}
	if c.control != "" {
		if s.control, err = s.listen(c.control); err != nil {
			return err
		}
	}
	c.rack.Log = log
	c.rack.StateDir = c.state
	if c.guestRoot == "" {
		c.rack.GuestsOff = "the simulator was started without --guest-root"
	} else {
		guests, err := s.guests(c, log)
		if err != nil {
			return err
		}
		c.rack.Guests = guests
	}
	if s.rack, err = simrack.New(c.rack); err != nil {
		return err
	}
	s.undo = append(s.undo, s.rack.Close)
	if c.tls != "" {
		if s.secure, err = loadTLS(c.tls); err != nil {
			return err
		}
	}
	s.serve(simrack.Listener(s.api), &http.Server{
		Handler: s.rack.API(), ConnContext: simrack.ConnContext, TLSConfig: s.secure,
	}, log)
	if s.control != nil {
		s.serve(s.control, &http.Server{Handler: checkHost(s.rack.Control())}, log)
	}
	return nil
}

// checkHost rejects requests for another host than a loopback address or the address that received them. So no web page
// in a browser on this machine can send requests to the control endpoint under a name of its own (DNS rebinding).
func checkHost(control http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		host, _, err := net.SplitHostPort(req.Host)
		if err != nil {
			host = strings.Trim(req.Host, "[]")
		}
		local, _ := req.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr)
		if !isLoopback(host) && (local == nil || host != local.IP.String()) {
			http.Error(w, fmt.Sprintf("the host %q is not the control endpoint's", host), http.StatusForbidden)
			return
		}
		control.ServeHTTP(w, req)
	})
}

// Files of the certificate and its private key in the folder of --tls.
const (
	certificateFile = "ca.pem"
	keyFile         = "key.pem"
)

// loadTLS reads the certificate of a folder. It makes folder, certificate and key if there is no certificate, so that a
// rack that is started again keeps its certificate.
func loadTLS(dir string) (*tls.Config, error) {
	certificate, key := filepath.Join(dir, certificateFile), filepath.Join(dir, keyFile)
	if _, err := os.Stat(certificate); errors.Is(err, fs.ErrNotExist) {
		certificatePEM, keyPEM, err := simrack.NewCertificate()
		if err != nil {
			return nil, err
		}
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return nil, err
		}
		if err := os.WriteFile(key, keyPEM, 0o600); err != nil {
			return nil, err
		}
		if err := os.WriteFile(certificate, certificatePEM, 0o644); err != nil {
			return nil, err
		}
	}
	pair, err := tls.LoadX509KeyPair(certificate, key)
	if err != nil {
		return nil, fmt.Errorf("--tls: %w", err)
	}
	return &tls.Config{Certificates: []tls.Certificate{pair}}, nil
}

func (s *server) listen(address string) (net.Listener, error) {
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, err
	}
	s.undo = append(s.undo, func() error {
		if err := l.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			return err
		}
		return nil
	})
	return l, nil
}

// guests prepares the guests. Without a state directory their disks are removed at the end.
func (s *server) guests(c serveConfig, log *slog.Logger) (*guest.Guests, error) {
	stateDir := filepath.Join(c.state, "disks")
	if c.state == "" {
		var err error
		if stateDir, err = os.MkdirTemp("", "oxide-sim-"); err != nil {
			return nil, err
		}
		s.undo = append(s.undo, func() error { return os.RemoveAll(stateDir) })
	}
	guests, err := guest.New(
		guest.Options{Root: c.guestRoot, StateDir: stateDir, Boot: c.guestBoot, HaltTime: haltTime, Log: log},
	)
	if err != nil {
		return nil, err
	}
	s.undo = append(s.undo, guests.Close)
	return guests, nil
}

func (s *server) serve(l net.Listener, web *http.Server, log *slog.Logger) {
	web.ReadHeaderTimeout = 10 * time.Second
	web.ErrorLog = slog.NewLogLogger(log.Handler(), slog.LevelWarn)
	start := func() error { return web.Serve(l) }
	if web.TLSConfig != nil {
		start = func() error { return web.ServeTLS(l, "", "") }
	}
	go func() {
		if err := start(); !errors.Is(err, http.ErrServerClosed) {
			s.failed <- err
		}
	}()
	s.undo = append(s.undo, func() error {
		ctx, cancel := context.WithTimeout(context.Background(), drainTime)
		defer cancel()
		err := web.Shutdown(ctx)
		if errors.Is(err, context.DeadlineExceeded) {
			return web.Close() // the rack cancels what its handlers wait for
		}
		return err
	})
}

// end reverts begin. It does not wait longer than endTime for anything that hangs, for example a write to a disk that
// does not answer.
func (s *server) end() error {
	done := make(chan error, 1)
	go func() {
		var errs []error
		for i := len(s.undo) - 1; i >= 0; i-- {
			errs = append(errs, s.undo[i]())
		}
		done <- errors.Join(errs...)
	}()
	select {
	case err := <-done:
		return err
	case <-time.After(endTime):
		return fmt.Errorf("not everything has ended within %s: look for what is left with losetup and in mountinfo", endTime)
	}
}

// announcement is the text for stdout once everything is served.
func (s *server) announcement(c serveConfig) string {
	var b strings.Builder
	if s.secure == nil {
		fmt.Fprintf(&b, "OXIDE_HOST=http://%s\n", s.api.Addr())
	} else {
		fmt.Fprintf(&b, "OXIDE_HOST=https://%s\n", s.api.Addr())
		fmt.Fprintf(&b, "OXIDE_CSI_CA_FILE=%s\n", filepath.Join(c.tls, certificateFile))
	}
	fmt.Fprintf(&b, "OXIDE_TOKEN=%s\n", c.rack.Token)
	fmt.Fprintf(&b, "OXIDE_PROJECT=%s\n", c.rack.Project)
	if s.control != nil {
		fmt.Fprintf(&b, "OXIDE_SIM_CONTROL=http://%s\n", s.control.Addr())
	}
	for _, instance := range s.rack.Instances() {
		dir := instance.Dir
		if dir == "" {
			dir = "-"
		}
		fmt.Fprintf(&b, "# %s %s %s\n", instance.Name, instance.ID, dir)
	}
	b.WriteString("# ready\n")
	return b.String()
}
