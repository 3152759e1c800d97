#!/usr/bin/env bash
# The YAML decoder of Kubernetes drops what follows "...", and refuses a directive and a value beside "---".
#
# Version: k8s.io/apimachinery v0.37.2
# Guess:   NewYAMLOrJSONDecoder reads a stream of YAML documents as YAML defines it. What it does not support is an error.
# Seen:    "a: 1", "...", "b: 2" is one document: the second is lost, without an error. "%YAML 1.1" before "---" is an
#          error, and so is "--- {a: 1}". A comment behind "---" is fine.
# Why:     the stream is cut as text, at lines that begin with "---", and each piece goes to a parser that reads one
#          document. kubectl and client programs read manifests in this way, so half a manifest can be applied.
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
	"errors"
	"fmt"
	"io"
	"strings"

	"k8s.io/apimachinery/pkg/util/yaml"
)

func main() {
	for _, stream := range []string{
		"a: 1\n---\nb: 2\n",
		"a: 1\n--- # two\nb: 2\n",
		"a: 1\n...\nb: 2\n",
		"%YAML 1.1\n---\na: 1\n",
		"--- {a: 1}\n--- {b: 2}\n",
	} {
		fmt.Printf("%q", stream)
		decoder := yaml.NewYAMLOrJSONDecoder(strings.NewReader(stream), 4096)
		for {
			var document any
			err := decoder.Decode(&document)
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				fmt.Print(" error")
				break
			}
			fmt.Print(" ", document)
		}
		fmt.Println()
	}
}
END
GOFLAGS=-mod=mod go run . >output 2>log || { cat log >&2; exit 1; }
diff - output <<'END' || { echo "changed: see above" >&2; exit 1; }
"a: 1\n---\nb: 2\n" map[a:1] map[b:2]
"a: 1\n--- # two\nb: 2\n" map[a:1] map[b:2]
"a: 1\n...\nb: 2\n" map[a:1]
"%YAML 1.1\n---\na: 1\n" error
"--- {a: 1}\n--- {b: 2}\n" error
END
echo "still so: documents are cut as text"
