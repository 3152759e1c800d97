#!/usr/bin/env bash
# go-containerregistry speaks HTTPS to "localhost", and HTTP to "localhost:5000" and to private addresses.
#
# Version: github.com/google/go-containerregistry v0.22.1
# Guess:   the scheme depends on the host, and not on a port: "localhost" is HTTP like "localhost:5000". Another machine
#          is HTTPS.
# Seen:    "localhost" without a port is HTTPS, "127.0.0.1" and "a.localhost" without a port are HTTP. A private address
#          of another machine is HTTP, with and without a port.
# Why:     the package looks for "localhost:" with its colon, for a suffix ".localhost", and for any address of RFC 1918.
#          Its comment says "except localhost". A registry at port 80 of this machine needs its number.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
cat >go.mod <<'END'
module finding

go 1.26

require github.com/google/go-containerregistry v0.22.1
END
cat >main.go <<'END'
package main

import (
	"fmt"

	"github.com/google/go-containerregistry/pkg/name"
)

func main() {
	for _, host := range []string{
		"localhost", "localhost:5000", "127.0.0.1", "a.localhost", "10.0.0.1", "10.0.0.1:5000", "registry:5000",
	} {
		registry, err := name.NewRegistry(host)
		if err != nil {
			panic(err)
		}
		fmt.Println(host, registry.Scheme())
	}
}
END
GOFLAGS=-mod=mod go run . >output 2>log || { cat log >&2; exit 1; }
diff - output <<'END' || { echo "changed: see above" >&2; exit 1; }
localhost https
localhost:5000 http
127.0.0.1 http
a.localhost http
10.0.0.1 http
10.0.0.1:5000 http
registry:5000 https
END
echo "still so: localhost is HTTPS without a port only"
