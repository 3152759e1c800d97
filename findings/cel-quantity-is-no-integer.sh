#!/usr/bin/env bash
# In CEL of Kubernetes, a quantity is an integer or not, depending on how it is written.
#
# Version: k8s.io/apiserver v0.37.2
# Guess:   quantity("1.5Gi").isInteger() is true, since it is a whole number of bytes, and asInteger() is 1610612736, as
#          for quantity("1536Mi"), which is equal to it.
# Seen:    the two are equal, but isInteger() is false for "1.5Gi", and asInteger() ends with an error. The same holds for
#          "1000m" beside "1". "0.5G" is an integer, as "500M" is.
# Why:     the documentation names overflow and a loss of precision as the reasons. It is an error as well
#          if AsInt64 of the Go type has no fast way to read the text. A rule of a custom resource sees a text as its user
#          wrote it, so a limit by asInteger refuses 1.5Gi with words about a conversion. isGreaterThan works.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
cat >go.mod <<'END'
module finding

go 1.26

require (
	github.com/google/cel-go v0.29.2
	k8s.io/apiserver v0.37.2
)
END
cat >main.go <<'END'
package main

import (
	"fmt"

	"github.com/google/cel-go/cel"
	"k8s.io/apiserver/pkg/cel/library"
)

func main() {
	env, err := cel.NewEnv(library.Quantity())
	check(err)
	for _, expression := range []string{
		`quantity("1.5Gi") == quantity("1536Mi")`,
		`quantity("1536Mi").asInteger()`,
		`quantity("1.5Gi").isInteger()`,
		`quantity("1.5Gi").asInteger()`,
		`quantity("1.5Gi").isGreaterThan(quantity("1Gi"))`,
		`quantity("1000m") == quantity("1")`,
		`quantity("1000m").isInteger()`,
		`quantity("0.5G") == quantity("500M")`,
		`quantity("0.5G").isInteger()`,
		`quantity("500M").isInteger()`,
	} {
		ast, issues := env.Compile(expression)
		check(issues.Err())
		program, err := env.Program(ast)
		check(err)
		if value, _, err := program.Eval(cel.NoVars()); err != nil {
			fmt.Println(expression, "error")
		} else {
			fmt.Println(expression, value)
		}
	}
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
END
GOFLAGS=-mod=mod go run . >output 2>log || { cat log >&2; exit 1; }
diff - output <<'END' || { echo "changed: see above" >&2; exit 1; }
quantity("1.5Gi") == quantity("1536Mi") true
quantity("1536Mi").asInteger() 1610612736
quantity("1.5Gi").isInteger() false
quantity("1.5Gi").asInteger() error
quantity("1.5Gi").isGreaterThan(quantity("1Gi")) true
quantity("1000m") == quantity("1") true
quantity("1000m").isInteger() false
quantity("0.5G") == quantity("500M") true
quantity("0.5G").isInteger() true
quantity("500M").isInteger() true
END
echo "still so: isInteger depends on the spelling"
