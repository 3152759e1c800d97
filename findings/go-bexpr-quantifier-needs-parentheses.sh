#!/usr/bin/env bash
# In a filter of go-bexpr, which Nomad and Consul take at their APIs, "any" and "all" need parentheses beside anything else.
#
# Version: github.com/hashicorp/go-bexpr v0.1.15
# Guess:   a quantifier is an expression like any other: what stands alone can be joined with "and", and "not" can stand
#          before it.
# Seen:    "any Tags as t { … }" is accepted alone. Before "and", after "and" and after "not" it is a syntax error, which
#          names the position of the word after it and not the quantifier. In parentheses all three are accepted.
# Why:     the grammar takes a quantifier only as the whole of an expression or of a parenthesis. Comparisons need none.
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

type volume struct {
	Name string
	Tags []string
}

func main() {
	datum := volume{Name: "data", Tags: []string{"fast"}}
	for _, filter := range []string{
		`any Tags as t { t == "fast" }`,
		`any Tags as t { t == "fast" } and Name == "data"`,
		`Name == "data" and any Tags as t { t == "fast" }`,
		`not any Tags as t { t == "slow" }`,
		`(any Tags as t { t == "fast" }) and Name == "data"`,
		`Name == "data" and (any Tags as t { t == "fast" })`,
		`not (any Tags as t { t == "slow" })`,
		`not Name == "other" and Name == "data"`,
	} {
		result := "syntax error"
		if evaluator, err := bexpr.CreateEvaluator(filter); err == nil {
			matches, err := evaluator.Evaluate(datum)
			if err != nil {
				panic(err)
			}
			result = fmt.Sprint(matches)
		}
		fmt.Printf("%s: %s\n", result, filter)
	}
}
END
GOFLAGS=-mod=mod go run . >output 2>log || { cat log >&2; exit 1; }
diff - output <<'END' || { echo "changed: see above" >&2; exit 1; }
true: any Tags as t { t == "fast" }
syntax error: any Tags as t { t == "fast" } and Name == "data"
syntax error: Name == "data" and any Tags as t { t == "fast" }
syntax error: not any Tags as t { t == "slow" }
true: (any Tags as t { t == "fast" }) and Name == "data"
true: Name == "data" and (any Tags as t { t == "fast" })
true: not (any Tags as t { t == "slow" })
true: not Name == "other" and Name == "data"
END
echo "still so: a quantifier beside anything else needs parentheses"
