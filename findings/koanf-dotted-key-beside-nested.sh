#!/usr/bin/env bash
# koanf chooses at random between a key that holds the delimiter and the nested key of the same path.
#
# Version: github.com/knadh/koanf/v2 v2.4.1
# Guess:   {"a.b": 1, "a": {"b": 2}} gives the same a.b each time: an error, the first one, or the nested one.
# Seen:    some loads give 1, others 2, in one process, with the same input.
# Why:     the result depends on the order in which Go walks a map, which changes with each walk. A settings file with
#          both spellings starts well and has another setting after the next restart.
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
	seen := map[int]bool{}
	for range 1000 {
		k := koanf.New(".")
		settings := map[string]any{"a.b": 1, "a": map[string]any{"b": 2}}
		if err := k.Load(confmap.Provider(settings, "."), nil); err != nil {
			panic(err)
		}
		seen[k.Int("a.b")] = true
	}
	fmt.Println(seen)
}
EOF
diff - <(GOFLAGS=-mod=mod go run .) <<'EOF'
map[1:true 2:true]
EOF
echo "still so: one of the two values is chosen at random"
