#!/usr/bin/env bash
# go-retryablehttp waits as long as a server's Retry-After says, whatever RetryWaitMax is.
#
# Version: github.com/hashicorp/go-retryablehttp v0.7.8
# Guess:   RetryWaitMax bounds each wait, as its name and its comment say, also one that a server asks for.
# Seen:    with RetryWaitMax of 50 ms and "Retry-After: 2", a call takes two seconds.
# Why:     the default backoff returns the server's time before it looks at the bounds. Only the caller's context ends
#          such a wait; a client without one stands still for as long as any proxy in between says.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
cat >go.mod <<'EOF'
module finding

go 1.26

require github.com/hashicorp/go-retryablehttp v0.7.8
EOF
cat >main.go <<'EOF'
package main

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"time"

	"github.com/hashicorp/go-retryablehttp"
)

func main() {
	busy := true
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if busy {
			w.Header().Set("Retry-After", "2")
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		busy = false
	}))
	client := retryablehttp.NewClient()
	client.Logger, client.RetryWaitMin, client.RetryWaitMax = nil, time.Millisecond, 50*time.Millisecond
	begun := time.Now()
	answer, err := client.Get(server.URL)
	if err != nil {
		panic(err)
	}
	fmt.Println(answer.StatusCode, time.Since(begun) >= 2*time.Second)
}
EOF
diff - <(GOFLAGS=-mod=mod go run .) <<'EOF'
200 true
EOF
echo "still so: Retry-After outweighs RetryWaitMax"
