#!/usr/bin/env bash
# Nomad's Go client reads a socket's path as a URL, and then dials the escaped spelling.
#
# Version: github.com/hashicorp/nomad/api v0.0.0-20260907080526-08ef8f3d26da
# Guess:   unix:///run/PATH dials /run/PATH, byte for byte, whatever characters a file name may have.
# Seen:    "a b" dials "a%20b"; "a#b" and "a?b" dial "a"; only "a%20b" dials itself.
# Why:     what follows unix:// is parsed as a URL, so one expects either the text as it stands, or a path in which
#          escapes are decoded. The client does neither: it dials the escaped form, so that no spelling reaches "a b".
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
	"net"
	"net/http"
	"os"
	"path/filepath"

	"github.com/hashicorp/nomad/api"
)

func main() {
	for _, name := range []string{"a", "a b", "a%20b", "a#b", "a?b"} {
		dir, err := os.MkdirTemp(".", "socket")
		check(err)
		dir, err = filepath.Abs(dir)
		check(err)
		// Each socket answers with its own name.
		for _, listening := range []string{"a", "a b", "a%20b", "a#b", "a?b"} {
			listener, err := net.Listen("unix", filepath.Join(dir, listening))
			check(err)
			go http.Serve(listener, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				fmt.Fprintf(w, `{"stats": {"socket": {"name": %q}}}`, listening)
			}))
		}
		client, err := api.NewClient(&api.Config{Address: "unix://" + filepath.Join(dir, name)})
		check(err)
		self, err := client.Agent().Self()
		check(err)
		fmt.Printf("%q dials %q\n", name, self.Stats["socket"]["name"])
	}
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
EOF
diff - <(GOFLAGS=-mod=mod go run .) <<'EOF'
"a" dials "a"
"a b" dials "a%20b"
"a%20b" dials "a%20b"
"a#b" dials "a"
"a?b" dials "a"
EOF
echo "still so: the socket's path is parsed as a URL"
