// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package nomad

import (
	"errors"
	"fmt"
	"net/url"
	"path/filepath"
	"strings"
)

// maxSocketPath is the kernel's limit for the path of a unix socket, in bytes.
const maxSocketPath = 107

// defaultAddress is the default address of an agent.
const defaultAddress = "http://127.0.0.1:4646"

// agentAddress is where requests to an agent go: to a URL, and over the socket with this path unless it is empty.
type agentAddress struct{ url, socket string }

// parseAddress reads the address of an agent. What follows unix:// is a path and not part of a URL: Nomad writes it
// without escapes into NOMAD_UNIX_ADDR. An address has no path on its host, because Nomad's client would leave it out:
// the token would go to another service. The error does not quote the address, which may hold a password.
func parseAddress(address string) (agentAddress, error) {
	if path, is := strings.CutPrefix(address, "unix:"); is {
		path = strings.TrimPrefix(path, "//")
		switch {
		case !filepath.IsAbs(path) || strings.ContainsRune(path, 0):
			return agentAddress{}, errors.New("it names no absolute path of a socket, as unix:///path does")
		case len(path) > maxSocketPath:
			return agentAddress{}, fmt.Errorf(
				"the path of its socket has %d bytes, more than the limit of %d: shorten Nomad's data_dir", len(path),
				maxSocketPath)
		}
		return agentAddress{url: "http://127.0.0.1", socket: path}, nil
	}
	parsed, err := url.Parse(address)
	switch {
	case strings.Contains(address, "@"):
		return agentAddress{}, errors.New("it must not hold a user or a password: access comes from the token")
	case err != nil || parsed.Scheme != "http" && parsed.Scheme != "https" || parsed.Hostname() == "":
		return agentAddress{}, errors.New("it is not http://host:port, https://host:port or unix:///path")
	case parsed.Path != "" && parsed.Path != "/" || parsed.RawQuery != "" || parsed.ForceQuery || strings.Contains(address, "#"):
		return agentAddress{}, errors.New("it is not http://host:port: it has more than a host and a port")
	}
	return agentAddress{url: address}, nil
}
