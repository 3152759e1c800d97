#!/usr/bin/env bash
# go-systemd's unit parser fails on a comment inside a continued line, and on a line over 2048 bytes.
#
# Versions: github.com/coreos/go-systemd/v22 v22.7.0, systemd 252 (Debian 12).
# Guess:    the parser reads what systemd reads. systemd.syntax(7): a comment line within a continued line is ignored.
# Seen:     the comment becomes a part of the value, and the rest of the value an error. A value of 5000 bytes is an
#           error, too. systemd-analyze verifies both units without a complaint.
# Why:      a parser of systemd's own Go bindings is expected to read what systemd reads.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
cat >go.mod <<'EOF'
module finding

go 1.26

require github.com/coreos/go-systemd/v22 v22.7.0
EOF
cat >main.go <<'EOF'
package main

import (
	"fmt"
	"os"

	"github.com/coreos/go-systemd/v22/unit"
)

func main() {
	for _, name := range os.Args[1:] {
		file, err := os.Open(name)
		if err != nil {
			panic(err)
		}
		options, err := unit.DeserializeOptions(file)
		if len(options) > 0 {
			fmt.Printf("%q\n", options[0].Value)
		}
		fmt.Println(err)
	}
}
EOF
printf '[Service]\nExecStart=/bin/echo \\\n# a comment\n  word\n' >comment.service
printf '[Service]\nExecStart=/bin/echo\nEnvironment=A=%05000d\n' 0 >long.service
if command -v systemd-analyze >/dev/null; then
	complaints=$(SYSTEMD_LOG_LEVEL=warning systemd-analyze verify --man=no ./comment.service ./long.service 2>&1 | grep -F "$dir" || true)
	[ -z "$complaints" ] || { echo "changed: systemd complains: $complaints" >&2; exit 1; }
fi
diff - <(GOFLAGS=-mod=mod go run . comment.service long.service) <<'EOF'
"/bin/echo \\\n# a comment"
unexpected newline encountered while parsing option name
"/bin/echo"
line too long (max 2048 bytes)
EOF
echo "still so: valid units are refused"
