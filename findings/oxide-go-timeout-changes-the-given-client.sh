#!/usr/bin/env bash
# The Oxide SDK's WithTimeout changes the http.Client that the caller gave it.
#
# Version: github.com/oxidecomputer/oxide.go v0.10.0
# Guess:   WithTimeout sets the timeout of this Oxide client. Its documentation says only that a later WithHTTPClient
#          overrides it. After an earlier one the SDK works on a copy.
# Seen:    the given http.Client has the new timeout afterwards. Two Oxide clients that share one http.Client share the
#          timeout of the one that was made last, and http.DefaultClient gets it for the whole process.
# Why:     options of a client are expected to change that client. Sharing one http.Client for its connections is what
#          its documentation advises, so two timeouts on it look possible.
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
	"net/http"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"
)

func main() {
	shared := &http.Client{}
	for _, timeout := range []time.Duration{5 * time.Second, time.Hour} {
		_, err := oxide.NewClient(oxide.WithHost("https://127.0.0.1"), oxide.WithToken("t"),
			oxide.WithHTTPClient(shared), oxide.WithTimeout(timeout))
		if err != nil {
			panic(err)
		}
		fmt.Println(shared.Timeout)
	}
}
END
GOFLAGS=-mod=mod go run . >output 2>log || { cat log >&2; exit 1; }
diff - output <<'END' || { echo "changed: see above" >&2; exit 1; }
5s
1h0m0s
END
echo "still so: the timeout is set in the http.Client of the caller"
