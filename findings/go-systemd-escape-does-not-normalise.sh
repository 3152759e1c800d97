#!/usr/bin/env bash
# go-systemd escapes "." and ".." in a path, where systemd-escape drops the one and refuses the other.
#
# Versions: github.com/coreos/go-systemd/v22 v22.7.0, systemd 252 (Debian 12).
# Guess:    UnitNamePathEscape(p) is what "systemd-escape --path p" prints, for each path.
# Seen:     equal for "/", "/a//b/", "/.a" and "/a-b". "/a/./b" is "a-.-b" and not "a-b"; "/a/../b" is "a-..-b", where
#           systemd-escape fails.
# Why:      the function trims slashes as systemd does, so it seems to normalise. A mount unit that is looked up by the
#           name that it returns does not exist.
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
	for _, path := range os.Args[1:] {
		fmt.Println(path, unit.UnitNamePathEscape(path))
	}
}
EOF
paths=(/ /a//b/ /.a /a-b /a/./b /a/../b)
diff - <(GOFLAGS=-mod=mod go run . "${paths[@]}") <<'EOF'
/ -
/a//b/ a-b
/.a \x2ea
/a-b a\x2db
/a/./b a-.-b
/a/../b a-..-b
EOF
diff - <(for path in "${paths[@]}"; do echo "$path $(systemd-escape --path "$path" 2>/dev/null || echo refused)"; done) <<'EOF'
/ -
/a//b/ a-b
/.a \x2ea
/a-b a\x2db
/a/./b a-b
/a/../b refused
EOF
echo "still so: the two differ for . and .."
