#!/usr/bin/env bash
# The Oxide SDK does not wrap the context's error.
#
# Version: github.com/oxidecomputer/oxide.go v0.10.0
# Guess:   when the caller's context ends, errors.Is(err, context.DeadlineExceeded) is true, as with net/http.
# Seen:    false for a deadline and for a cancellation. Only the text names the cause.
# Why:     net/http, on which the SDK is built, returns an error that unwraps to the context's. The SDK formats that into
#          a new error. A caller who tells "my own deadline" from "the rack is away" must look at the context itself.
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
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"
)

func main() {
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
	defer server.Close()
	client, err := oxide.NewClient(oxide.WithHost(server.URL), oxide.WithToken("a-token"))
	if err != nil {
		panic(err)
	}
	late, stop := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer stop()
	report(late, client, context.DeadlineExceeded)
	cancelled, cancel := context.WithCancel(context.Background())
	time.AfterFunc(50*time.Millisecond, cancel)
	report(cancelled, client, context.Canceled)
}

func report(ctx context.Context, client *oxide.Client, cause error) {
	_, err := client.DiskView(ctx, oxide.DiskViewParams{Disk: "data"})
	var request *url.Error
	fmt.Println(cause, "errors.Is:", errors.Is(err, cause), "url.Error:", errors.As(err, &request),
		"in the text:", strings.Contains(err.Error(), cause.Error()))
}
EOF
diff - <(GOFLAGS=-mod=mod go run .) <<'EOF'
context deadline exceeded errors.Is: false url.Error: false in the text: true
context canceled errors.Is: false url.Error: false in the text: true
EOF
echo "still so: the context's error is only in the text"
