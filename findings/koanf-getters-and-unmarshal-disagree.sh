#!/usr/bin/env bash
# koanf's getters and its Unmarshal read the same value in different ways.
#
# Version: github.com/knadh/koanf/v2 v2.4.1
# Guess:   Duration("x"), Strings("x") and Unmarshal agree: "5" without a unit is refused, "a,b" is a list of one text.
# Seen:    for "5" Duration returns 5ns and Unmarshal an error. For "a,b" Strings returns an empty list and Unmarshal
#          ["a,b"]. Both take "3d" as 72h, which time.ParseDuration refuses.
# Why:     both are ways to read one configuration. A timeout of "5" that was meant in seconds becomes 5ns without a
#          word, and a list that one half of a program sees is empty in the other.
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
	"time"

	"github.com/knadh/koanf/providers/confmap"
	"github.com/knadh/koanf/v2"
)

func main() {
	k := koanf.New(".")
	if err := k.Load(confmap.Provider(map[string]any{"text": "5", "days": "3d", "list": "a,b"}, "."), nil); err != nil {
		panic(err)
	}
	var text struct {
		Text time.Duration `koanf:"text"`
	}
	fmt.Println("text", k.Duration("text"), "Unmarshal refuses it:", k.Unmarshal("", &text) != nil)
	var days struct {
		Days time.Duration `koanf:"days"`
	}
	fmt.Println("days", k.Duration("days"), k.Unmarshal("", &days), days.Days)
	var list struct {
		List []string `koanf:"list"`
	}
	fmt.Printf("list %q %v %q\n", k.Strings("list"), k.Unmarshal("", &list), list.List)
}
EOF
diff - <(GOFLAGS=-mod=mod go run .) <<'EOF'
text 5ns Unmarshal refuses it: true
days 72h0m0s <nil> 72h0m0s
list [] <nil> ["a,b"]
EOF
echo "still so: getters and Unmarshal differ"
