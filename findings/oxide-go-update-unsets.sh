#!/usr/bin/env bash
# An instance update of the Oxide SDK that names two fields also unsets the others.
#
# Version: github.com/oxidecomputer/oxide.go v0.10.0
# Guess:   InstanceUpdate{Memory: ..., Ncpus: ...} sends these two fields. Fields that are left at their zero value are
#          omitted, and stay as they are on the rack.
# Seen:    boot_disk, auto_restart_policy, cpu_platform and others are sent as null, which the API's description calls
#          "unset". enable_jumbo_frames is sent as null, too, although the API's schema does not allow null there.
# Why:     in Go a field at its zero value usually means "not given". Here it is an order: who only wants more memory
#          takes the designation of the boot disk away.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
cat >go.mod <<'EOF'
module finding

go 1.26

require github.com/oxidecomputer/oxide.go v0.10.0
EOF
cat >main.go <<'EOF'
package main

import (
	"encoding/json"
	"os"

	"github.com/oxidecomputer/oxide.go/oxide"
)

func main() {
	json.NewEncoder(os.Stdout).Encode(oxide.InstanceUpdate{Memory: 1 << 30, Ncpus: 2})
}
EOF
diff - <(GOFLAGS=-mod=mod go run .) <<'EOF'
{"auto_restart_policy":null,"boot_disk":null,"cpu_platform":null,"enable_jumbo_frames":null,"memory":1073741824,"multicast_groups":null,"ncpus":2}
EOF
echo "still so: fields that are not set are sent as null"
