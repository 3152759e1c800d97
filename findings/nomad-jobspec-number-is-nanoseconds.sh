#!/usr/bin/env bash
# "kill_timeout = 30" in a Nomad job is 30 nanoseconds.
#
# Version: github.com/hashicorp/nomad v1.11.1
# Guess:   a number without a unit is refused, as the text "30" is; or it means seconds, the unit of the default.
# Seen:    30 is accepted as 30 ns, for kill_timeout and for health_timeout of a CSI plugin. "30" is an error that asks
#          for a duration.
# Why:     the parser takes a text and a number, and the number is the one of Go's time.Duration. What looks like half a
#          minute for a clean end is none.
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

const text = `
job "example" {
  group "g" {
    task "t" {
      driver       = "raw_exec"
      kill_timeout = %[1]s
      csi_plugin {
        id             = "p"
        health_timeout = %[1]s
      }
    }
  }
}
`

func main() {
	for _, value := range []string{`"30s"`, `30`, `"30"`} {
		job, err := jobspec2.ParseWithConfig(&jobspec2.ParseConfig{Path: "job", Body: fmt.Appendf(nil, text, value)})
		if err != nil {
			fmt.Println(value, "error")
			continue
		}
		task := job.TaskGroups[0].Tasks[0]
		fmt.Println(value, *task.KillTimeout, task.CSIPluginConfig.HealthTimeout)
	}
}
END
GOFLAGS=-mod=mod go run . >output 2>log || { cat log >&2; exit 1; }
diff - output <<'END' || { echo "changed: see above" >&2; exit 1; }
"30s" 30s 30s
30 30ns 30ns
"30" error
END
echo "still so: a number is a number of nanoseconds"
