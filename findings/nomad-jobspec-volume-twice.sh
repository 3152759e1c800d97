#!/usr/bin/env bash
# Two "volume" blocks of one name in a Nomad job are no error: the last one counts.
#
# Version: github.com/hashicorp/nomad v1.11.1
# Guess:   a second block with the name of the first is refused, as a second csi_plugin of a task or a second
#          mount_options of a volume is.
# Seen:    the group has one volume: the second. Nothing of the first is kept or merged, and nothing is said.
# Why:     a job with a copied block, whose name was left as it was, runs with the wrong volume in the right place.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
cat >go.mod <<'END'
module finding

go 1.26

require (
	github.com/hashicorp/nomad v1.11.1
	github.com/hashicorp/nomad/api v0.0.0-20260907080526-08ef8f3d26da
)
END
cat >main.go <<'END'
package main

import (
	"fmt"

	"github.com/hashicorp/nomad/jobspec2"
)

func main() {
	for _, text := range []string{`
job "example" {
  group "g" {
    volume "data" {
      type      = "csi"
      source    = "first"
      read_only = true
    }
    volume "data" {
      type   = "csi"
      source = "second"
    }
  }
}
`, `
job "example" {
  group "g" {
    volume "data" {
      type   = "csi"
      source = "first"
      mount_options {
        fs_type = "ext4"
      }
      mount_options {
        fs_type = "xfs"
      }
    }
  }
}
`} {
		job, err := jobspec2.ParseWithConfig(&jobspec2.ParseConfig{Path: "job", Body: []byte(text)})
		if err != nil {
			fmt.Println("error")
			continue
		}
		volumes := job.TaskGroups[0].Volumes
		fmt.Println(len(volumes), volumes["data"].Source, volumes["data"].ReadOnly)
	}
}
END
GOFLAGS=-mod=mod go run . >output 2>log || { cat log >&2; exit 1; }
diff - output <<'END' || { echo "changed: see above" >&2; exit 1; }
1 second false
error
END
echo "still so: the last volume of a name counts"
