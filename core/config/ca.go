// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package config

import (
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
)

// maxCABytes is a limit above the size of a system's CA bundle.
const maxCABytes = 1 << 20

// ReadCAs reads a file of PEM certificates: the only CAs that may sign the rack's certificate. For an empty name it
// returns nil, which means the CAs that the system trusts.
func ReadCAs(file string) (*x509.CertPool, error) {
	if file == "" {
		return nil, nil
	}
	text, err := readFile(file, maxCABytes)
	if err != nil {
		return nil, fmt.Errorf("%w; name a file with the CA's certificate that the plugin may read", err)
	}
	pool, found := x509.NewCertPool(), 0
	for block, rest := pem.Decode(text); block != nil; block, rest = pem.Decode(rest) {
		if block.Type != "CERTIFICATE" {
			continue
		}
		certificate, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("%s: certificate %d: %w", file, found+1, err)
		}
		pool.AddCert(certificate)
		found++
	}
	if found == 0 {
		return nil, fmt.Errorf("%s %w", file, errNoCA)
	}
	return pool, nil
}

var errNoCA = errors.New(
	"holds no certificate; write the CA's certificates in PEM, which begin with -----BEGIN CERTIFICATE-----",
)
