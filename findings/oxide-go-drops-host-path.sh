#!/usr/bin/env bash
# The Oxide SDK accepts a host with a path and drops the path.
#
# Version: github.com/oxidecomputer/oxide.go v0.10.0
# Guess:   WithHost("https://HOST/rack-1"), of a gateway in front of several racks, sends requests below /rack-1, or
#          NewClient refuses it.
# Seen:    NewClient accepts it, and every request goes to https://HOST/v1/..., with the token.
# Why:     a host that is accepted is expected to be used whole. Here the token goes to whatever answers at the root.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
cat >go.mod <<'EOF'
module finding

go 1.26

require github.com/oxidecomputer/oxide.go v0.10.0
EOF
cat >main.go <<'EOF'
package main

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"

	"github.com/oxidecomputer/oxide.go/oxide"
)

func main() {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Println(r.URL.Path, "with token:", r.Header.Get("Authorization") != "")
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, "{}")
	}))
	defer server.Close()
	client, err := oxide.NewClient(oxide.WithHost(server.URL+"/rack-1"), oxide.WithToken("a-token"))
	if err != nil {
		panic(err)
	}
	if _, err := client.Ping(context.Background()); err != nil {
		panic(err)
	}
}
EOF
diff - <(GOFLAGS=-mod=mod go run .) <<'EOF'
/v1/ping with token: true
EOF
echo "still so: the path of the host is dropped"
