#!/usr/bin/env bash
# godbus stores a number of a message that is too large for the variable as another number, without an error.
#
# Version: github.com/godbus/dbus/v5 v5.2.2
# Guess:   Store returns an error, as it does for a text in the place of a number.
# Seen:    2^40 is stored in an int32 as 0, and 300 in a uint8 as 44, without an error.
# Why:     numbers are converted as Go converts them. systemd's times are 64-bit microseconds: a delay of 72 minutes,
#          stored in a 32-bit variable, is 25 s.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
cat >go.mod <<'EOF'
module finding

go 1.26

require github.com/godbus/dbus/v5 v5.2.2
EOF
cat >main.go <<'EOF'
package main

import (
	"fmt"

	"github.com/godbus/dbus/v5"
)

func main() {
	var small int32
	err := dbus.Store([]any{int64(1) << 40}, &small)
	fmt.Println(small, err)
	var tiny uint8
	err = dbus.Store([]any{uint64(300)}, &tiny)
	fmt.Println(tiny, err)
	var delay uint32
	err = dbus.Store([]any{uint64(72 * 60 * 1_000_000)}, &delay)
	fmt.Println(delay, err)
	err = dbus.Store([]any{"300"}, &tiny)
	fmt.Println(tiny, err != nil)
}
EOF
diff - <(GOFLAGS=-mod=mod go run .) <<'EOF'
0 <nil>
44 <nil>
25032704 <nil>
44 true
EOF
echo "still so: numbers wrap, and Store reports success"
