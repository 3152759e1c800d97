#!/usr/bin/env bash
# Nomad's Go client drops the path of its address.
#
# Version: github.com/hashicorp/nomad/api v0.0.0-20260907080526-08ef8f3d26da
# Guess:   with the address http://HOST/nomad, of a proxy that publishes Nomad below a path, requests go to
#          http://HOST/nomad/v1/..., or NewClient refuses the address.
# Seen:    NewClient accepts it, and requests go to http://HOST/v1/..., with the token.
# Why:     an address that is accepted is expected to be used whole. Here the token goes to another service of that host.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
cat >go.mod <<'EOF'
module finding

go 1.26

require github.com/hashicorp/nomad/api v0.0.0-20260907080526-08ef8f3d26da
EOF
cat >main.go <<'EOF'
package main

import (
	"fmt"
	"net/http"
	"net/http/httptest"

	"github.com/hashicorp/nomad/api"
)

func main() {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Println(r.URL.Path, "with token:", r.Header.Get("X-Nomad-Token") != "")
		fmt.Fprint(w, "{}")
	}))
	defer server.Close()
	client, err := api.NewClient(&api.Config{Address: server.URL + "/nomad", SecretID: "a-token"})
	if err != nil {
		panic(err)
	}
	if _, err := client.Agent().Self(); err != nil {
		panic(err)
	}
}
EOF
diff - <(GOFLAGS=-mod=mod go run .) <<'EOF'
/v1/agent/self with token: true
EOF
echo "still so: the path of the address is dropped"
