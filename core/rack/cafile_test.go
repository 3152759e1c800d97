// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

// readCAs reads a file of certificates, as config.ReadCAs does.
func readCAs(path string) (*x509.CertPool, error) {
	text, err := os.ReadFile(path)
	pool := x509.NewCertPool()
	if err == nil && !pool.AppendCertsFromPEM(text) {
		err = errors.New("no certificate")
	}
	return pool, err
}

// The CA of a rack is replaced while the plugin runs, and no call fails when the file is broken meanwhile.
func TestCARotation(t *testing.T) {
	var current atomic.Pointer[tls.Certificate]
	var certificates [2][]byte
	renew := func(n int) {
		certificate, key, err := simrack.NewCertificate()
		must(t, err)
		pair, err := tls.X509KeyPair(certificate, key)
		must(t, err)
		certificates[n] = certificate
		current.Store(&pair)
	}
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, 0)
	server.TLS = &tls.Config{
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			return &tls.Config{Certificates: []tls.Certificate{*current.Load()}}, nil
		},
	}
	server.StartTLS()
	t.Cleanup(server.Close)
	renew(0)
	path := filepath.Join(t.TempDir(), "ca.pem")
	must(t, os.WriteFile(path, certificates[0], 0o600))
	log := &logBuffer{}
	client, err := NewHTTPClientWithCAs(path, readCAs, slog.New(slog.NewTextHandler(log, nil)))
	must(t, err)
	t.Cleanup(client.CloseIdleConnections)
	call := func() error {
		resp, err := client.Get(server.URL)
		if err == nil {
			drain(resp)
		}
		return err
	}
	must(t, call())
	for range 3 {
		must(t, os.WriteFile(path, nil, 0o600))
		must(t, call())
	}
	renew(1)
	client.CloseIdleConnections()
	if err := call(); err == nil {
		t.Error("a certificate of another CA was trusted")
	}
	must(t, os.WriteFile(path, certificates[1], 0o600))
	must(t, call())
	if got := strings.Count(log.String(), "keeping the last CA certificates"); got != 1 {
		t.Errorf("the broken file was logged %d times, want once:\n%s", got, log)
	}
}
