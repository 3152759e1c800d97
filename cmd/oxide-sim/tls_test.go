// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"crypto/tls"
	"crypto/x509"
	"net/http"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// With --tls the API has TLS and HTTP/2. A rack that is started again has the same certificate.
func TestTLS(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "made", "here")
	roots := x509.NewCertPool()
	for round := range 2 {
		s := start(t, "--listen=127.0.0.1:0", "--tls="+dir)
		if round == 0 {
			text, err := os.ReadFile(s.value("OXIDE_CSI_CA_FILE"))
			must(t, err)
			roots.AppendCertsFromPEM(text)
		}
		transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}, ForceAttemptHTTP2: true}
		resp, err := (&http.Client{Transport: transport}).Get(s.value("OXIDE_HOST") + "/v1/ping")
		must(t, err)
		must(t, resp.Body.Close())
		if resp.StatusCode != http.StatusOK || resp.ProtoMajor != 2 {
			t.Errorf("%s over %s", resp.Status, resp.Proto)
		}
		transport.CloseIdleConnections()
		if _, code := s.end(syscall.SIGTERM); code != 0 {
			t.Errorf("exit code %d:\n%s", code, s.stderr.String())
		}
	}
	info, err := os.Stat(filepath.Join(dir, keyFile))
	must(t, err)
	if info.Mode().Perm() != 0o600 {
		t.Errorf("the key's mode is %v", info.Mode())
	}
}
