#!/usr/bin/env bash
# go-humanize reads "1,5GiB" as 15 GiB.
#
# Version: github.com/dustin/go-humanize v1.0.1, github.com/docker/go-units v0.5.0
# Guess:   it is an error, or 1.5 GiB for those who write a comma there.
# Seen:    ParseBytes drops each comma, wherever it is, and returns 15 GiB: ten times as much, without an error.
#          RAMInBytes of go-units refuses the same text.
# Why:     commas are taken for those that separate thousands, and their places are not checked. Nomad reads
#          capacity_min and capacity_max of a volume specification with this function.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
cat >go.mod <<'EOF'
module finding

go 1.26

require (
	github.com/docker/go-units v0.5.0
	github.com/dustin/go-humanize v1.0.1
)
EOF
cat >main.go <<'EOF'
package main

import (
	"fmt"

	"github.com/docker/go-units"
	"github.com/dustin/go-humanize"
)

func main() {
	for _, text := range []string{"1.5GiB", "1,5GiB", "1,,5,GiB"} {
		size, err := humanize.ParseBytes(text)
		_, strict := units.RAMInBytes(text)
		fmt.Println(text, size>>20, err, strict != nil)
	}
}
EOF
diff - <(GOFLAGS=-mod=mod go run .) <<'EOF'
1.5GiB 1536 <nil> false
1,5GiB 15360 <nil> true
1,,5,GiB 15360 <nil> true
EOF
echo "still so: 1,5GiB is 15 GiB"
