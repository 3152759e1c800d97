#!/usr/bin/env bash
# koanf's Unmarshal stores a number that is too large for its field as another number, and refuses the same number as
# text.
#
# Version: github.com/knadh/koanf/v2 v2.4.1
# Guess:   300 for a field of type int8 is an error in each notation, as it is for encoding/json.
# Seen:    300 is stored as 44, -1 in a uint16 as 65535, both without an error. "300" and "-1" are errors.
# Why:     only texts are parsed with the size of the field. Settings from YAML or JSON are numbers, and those from the
#          environment or flags are texts, so the same wrong setting starts a program in one place and not in the other.
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
	for _, settings := range []map[string]any{{"small": 300}, {"small": "300"}, {"positive": -1}, {"positive": "-1"}} {
		k := koanf.New(".")
		if err := k.Load(confmap.Provider(settings, "."), nil); err != nil {
			panic(err)
		}
		var into struct {
			Small    int8   `koanf:"small"`
			Positive uint16 `koanf:"positive"`
		}
		err := k.Unmarshal("", &into)
		fmt.Println(into.Small, into.Positive, err != nil)
	}
}
EOF
diff - <(GOFLAGS=-mod=mod go run .) <<'EOF'
44 0 false
0 0 true
0 65535 false
0 0 true
EOF
echo "still so: a number wraps, and the same number as text is an error"
