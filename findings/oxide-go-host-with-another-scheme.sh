#!/usr/bin/env bash
# The Oxide SDK takes a host with any scheme, and asks a host that is named as the scheme.
#
# Version: github.com/oxidecomputer/oxide.go v0.10.0
# Guess:   NewClient, which checks that the host can be parsed, takes HTTPS://rack as it takes https://rack, since schemes
#          have no case, and refuses ftp://rack.
# Seen:    it takes both. What does not begin with http:// or https:// in small letters gets https:// in front, so that
#          the host of the URL is "HTTPS" or "ftp". Only the first call fails, and its error is about that host.
# Why:     the prefix is compared as text, and https://HTTPS://rack is a valid URL: an empty port, and the path //rack.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
cat >go.mod <<'END'
module finding

go 1.26

require github.com/oxidecomputer/oxide.go v0.10.0
END
cat >main.go <<'END'
package main

import (
	"fmt"
	"net/url"

	"github.com/oxidecomputer/oxide.go/oxide"
)

func main() {
	for _, host := range []string{"rack.example.com", "https://rack.example.com", "HTTPS://rack.example.com", "ftp://rack.example.com"} {
		client, err := oxide.NewClient(oxide.WithHost(host), oxide.WithToken("t"))
		if err != nil {
			panic(err)
		}
		used, err := url.Parse(client.Host())
		if err != nil {
			panic(err)
		}
		fmt.Printf("%s: host %q\n", host, used.Hostname())
	}
}
END
GOFLAGS=-mod=mod go run . >output 2>log || { cat log >&2; exit 1; }
diff - output <<'END' || { echo "changed: see above" >&2; exit 1; }
rack.example.com: host "rack.example.com"
https://rack.example.com: host "rack.example.com"
HTTPS://rack.example.com: host "HTTPS"
ftp://rack.example.com: host "ftp"
END
echo "still so: another scheme becomes the name of the host"
