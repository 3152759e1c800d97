#!/usr/bin/env bash
# A filter of go-bexpr, which Nomad and Consul take at their APIs, compares a field with a word, never with another field.
#
# Version: github.com/hashicorp/go-bexpr v0.1.15
# Guess:   in "Controller == Node" both are fields, as both are written without quotes. If the right side cannot be a
#          field, the filter is refused.
# Seen:    the filter is accepted and false for a value whose two fields are equal. It is true where the left field holds
#          the text "Node". For numbers the same filter is refused, since the word is no number.
# Why:     quotes around a value are optional, so a word on the right is a string. On the left a word is always a field.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
cat >go.mod <<'END'
module finding

go 1.26

require github.com/hashicorp/go-bexpr v0.1.15
END
cat >main.go <<'END'
package main

import (
	"fmt"

	"github.com/hashicorp/go-bexpr"
)

type plugin struct {
	Controller, Node     string
	CreateIndex, ModifyIndex int
}

func main() {
	for _, filter := range []string{`Controller == Node`, `CreateIndex == ModifyIndex`} {
		for _, datum := range []plugin{{"1.0", "1.0", 7, 7}, {"Node", "1.0", 7, 8}} {
			evaluator, err := bexpr.CreateEvaluator(filter)
			if err != nil {
				panic(err)
			}
			matches, err := evaluator.Evaluate(datum)
			fmt.Println(filter, datum, matches, err != nil)
		}
	}
}
END
GOFLAGS=-mod=mod go run . >output 2>log || { cat log >&2; exit 1; }
diff - output <<'END' || { echo "changed: see above" >&2; exit 1; }
Controller == Node {1.0 1.0 7 7} false false
Controller == Node {Node 1.0 7 8} true false
CreateIndex == ModifyIndex {1.0 1.0 7 7} false true
CreateIndex == ModifyIndex {Node 1.0 7 8} false true
END
echo "still so: the right side of a comparison is a word"
