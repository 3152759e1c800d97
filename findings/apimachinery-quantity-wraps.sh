#!/usr/bin/env bash
# The Value of a Kubernetes quantity that is too large for an int64 is 0 or negative, where its documentation says that
# it is capped.
#
# Version: k8s.io/apimachinery v0.37.2
# Guess:   Value of "10E" is the largest int64. The type's documentation: "No matter which of the three exponent forms is
#          used, no quantity may represent a number greater than 2^63-1 in magnitude […]. Numbers larger or more precise
#          will be capped or rounded up."
# Seen:    "8Ei" is capped. "10E" and "100E" are 0, and 9223372036854775808 is the smallest int64. All are accepted, and
#          compared as what they are: "10E" is greater than "1E".
# Why:     only binary suffixes are capped. The documentation of MilliValue says to call Value first, to see whether a
#          number is small enough; 0 is. A size that is far too large becomes none at all, which often means "the default".
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
cat >go.mod <<'END'
module finding

go 1.26

require k8s.io/apimachinery v0.37.2
END
cat >main.go <<'END'
package main

import (
	"fmt"

	"k8s.io/apimachinery/pkg/api/resource"
)

func main() {
	one := resource.MustParse("1E")
	for _, text := range []string{"8Ei", "10E", "100E", "9223372036854775807", "9223372036854775808"} {
		q := resource.MustParse(text)
		_, exact := q.AsInt64()
		fmt.Println(text, q.Value(), exact, q.Cmp(one))
	}
}
END
GOFLAGS=-mod=mod go run . >output 2>log || { cat log >&2; exit 1; }
diff - output <<'END' || { echo "changed: see above" >&2; exit 1; }
8Ei 9223372036854775807 false 1
10E 0 false 1
100E 0 false 1
9223372036854775807 9223372036854775807 false 1
9223372036854775808 -9223372036854775808 false 1
END
echo "still so: Value wraps"
