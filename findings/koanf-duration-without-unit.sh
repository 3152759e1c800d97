#!/usr/bin/env bash
# koanf's Duration takes a text without a unit as nanoseconds, cuts fractions, and knows days.
#
# Version: github.com/knadh/koanf/v2 v2.4.1
# Guess:   Duration parses texts as time.ParseDuration does: "5" and "3d" are errors, which its getter shows as 0.
# Seen:    "5" is 5ns, the number 1.9 is 1ns, and "3d" is 72h.
# Why:     time.ParseDuration refuses all three. A timeout of "5" that was meant in seconds becomes 5ns without a word,
#          and a setting that works here ("3d") fails in every program that uses the standard parser.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
cat >go.mod <<'EOF'
module finding

go 1.26

require (
	github.com/knadh/koanf/providers/confmap v1.0.1
	github.com/knadh/koanf/v2 v2.4.1
)
EOF
cat >main.go <<'EOF'
package main

import (
	"fmt"

	"github.com/knadh/koanf/providers/confmap"
	"github.com/knadh/koanf/v2"
)

func main() {
	k := koanf.New(".")
	settings := map[string]any{"text": "5", "number": 1.9, "days": "3d", "wrong": "5 s"}
	if err := k.Load(confmap.Provider(settings, "."), nil); err != nil {
		panic(err)
	}
	for _, key := range []string{"text", "number", "days", "wrong"} {
		fmt.Println(key, k.Duration(key))
	}
}
EOF
diff - <(GOFLAGS=-mod=mod go run .) <<'EOF'
text 5ns
number 1ns
days 72h0m0s
wrong 0s
EOF
echo "still so: a text without a unit is nanoseconds"
