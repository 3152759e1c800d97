#!/usr/bin/env bash
# moby/sys/mountinfo finds nothing below a prefix that ends with a slash.
#
# Version: github.com/moby/sys/mountinfo v0.7.3
# Guess:   PrefixFilter("/a/") keeps the mounts below /a, since "/a/b" begins with "/a/".
# Seen:    it keeps none, and there is no error. PrefixFilter("/a") keeps /a and /a/b, and not /ab.
# Why:     the filter appends a slash to its argument and does not clean it first. Directories from a configuration often
#          end with a slash, and an empty list reads as "nothing is mounted there".
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
cat >go.mod <<'END'
module finding

go 1.26

require github.com/moby/sys/mountinfo v0.7.3
END
cat >main.go <<'END'
package main

import (
	"fmt"
	"strings"

	"github.com/moby/sys/mountinfo"
)

const table = "36 35 98:0 / /a rw - ext4 /dev/a rw\n37 35 98:0 / /ab rw - ext4 /dev/a rw\n38 36 98:0 / /a/b rw - ext4 /dev/a rw\n"

func main() {
	for _, prefix := range []string{"/a", "/a/"} {
		mounts, err := mountinfo.GetMountsFromReader(strings.NewReader(table), mountinfo.PrefixFilter(prefix))
		fmt.Print(prefix, " ", err)
		for _, mount := range mounts {
			fmt.Print(" ", mount.Mountpoint)
		}
		fmt.Println()
	}
}
END
GOFLAGS=-mod=mod go run . >output 2>log || { cat log >&2; exit 1; }
diff - output <<'END' || { echo "changed: see above" >&2; exit 1; }
/a <nil> /a /a/b
/a/ <nil>
END
echo "still so: a prefix with a slash at its end matches nothing"
