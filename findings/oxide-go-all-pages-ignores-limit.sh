#!/usr/bin/env bash
# The Oxide SDK's AllPages methods ignore the caller's limit and page token.
#
# Version: github.com/oxidecomputer/oxide.go v0.10.0
# Guess:   with Limit 1000, DiskListAllPages asks for pages of 1000; with a PageToken it goes on from that page.
# Seen:    every page is asked for with limit=100, and the list begins at its start, whatever the two fields say.
# Why:     the parameters are the type that DiskList takes, where both fields count. A list of 20,000 disks takes 200
#          requests one after the other, and nothing that the caller sets makes them fewer.
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
		fmt.Printf("limit %q, token %q\n", r.URL.Query().Get("limit"), r.URL.Query().Get("page_token"))
		w.Header().Set("Content-Type", "application/json")
		if r.URL.Query().Get("page_token") == "" {
			fmt.Fprint(w, `{"items": [], "next_page": "second"}`)
		} else {
			fmt.Fprint(w, `{"items": []}`)
		}
	}))
	defer server.Close()
	client, err := oxide.NewClient(oxide.WithHost(server.URL), oxide.WithToken("a-token"))
	check(err)
	limit := 1000
	parameters := oxide.DiskListParams{Project: "data", Limit: &limit, PageToken: "mine"}
	fmt.Println("DiskList")
	_, err = client.DiskList(context.Background(), parameters)
	check(err)
	fmt.Println("DiskListAllPages")
	_, err = client.DiskListAllPages(context.Background(), parameters)
	check(err)
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
EOF
diff - <(GOFLAGS=-mod=mod go run .) <<'EOF'
DiskList
limit "1000", token "mine"
DiskListAllPages
limit "100", token ""
limit "100", token "second"
EOF
echo "still so: limit and page token are ignored"
