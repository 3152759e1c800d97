#!/usr/bin/env bash
# go-systemd's reader of units refuses a long line that systemd reads, depending on where it stands in the file.
#
# Version: github.com/coreos/go-systemd/v22 v22.7.0; systemd 252
# Guess:   DeserializeOptions reads every unit that systemd reads, and the lines before a line do not matter.
# Seen:    a line of 3,000 bytes is an error, "line too long (max 2048 bytes)", and nothing after it is read. The same
#          line after 2,500 bytes of other lines is read. systemd-analyze verify accepts both files.
# Why:     the package guards against a limit that systemd had years ago. It compares the number of bytes in its read
#          buffer of 4,096 bytes, so a line passes if the buffer ends soon after the line's beginning.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
cat >go.mod <<'END'
module finding

go 1.26

require github.com/coreos/go-systemd/v22 v22.7.0
END
cat >main.go <<'END'
package main

import (
	"fmt"
	"os"
	"strings"

	"github.com/coreos/go-systemd/v22/unit"
)

func main() {
	for i, before := range []int{0, 2500} {
		text := "[Service]\n" + strings.Repeat("Environment=A=b\n", before/16) +
			"ExecStart=/bin/true " + strings.Repeat("a", 2980) + "\n"
		if err := os.WriteFile(fmt.Sprintf("%d.service", i), []byte(text), 0o644); err != nil {
			panic(err)
		}
		options, err := unit.DeserializeOptions(strings.NewReader(text))
		fmt.Println(before, len(options), err)
	}
}
END
GOFLAGS=-mod=mod go run . >output 2>log || { cat log >&2; exit 1; }
diff - output <<'END' || { echo "changed: see above" >&2; exit 1; }
0 0 line too long (max 2048 bytes)
2500 157 <nil>
END
if command -v systemd-analyze >/dev/null; then
	systemd-analyze verify --man=no ./0.service ./1.service || { echo "changed: systemd refuses a unit" >&2; exit 1; }
fi
echo "still so: whether a long line is read depends on the lines before it"
