#!/usr/bin/env bash
# The Oxide SDK does not find a profile whose name has a dot.
#
# Version: github.com/oxidecomputer/oxide.go v0.10.0
# Guess:   WithProfile takes the name of any profile in credentials.toml. TOML allows each character in a quoted key, so
#          [profile."lab.east"] is the profile "lab.east".
# Seen:    "profile not found". The profile [profile.lab.east], which is "east" inside of "lab", is found in its place.
# Why:     the name is put behind "profile." and read as a dotted key. Quotes in the name do not help: they are not read.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
cat >go.mod <<'END'
module finding

go 1.26

require github.com/oxidecomputer/oxide.go v0.10.0
END
cat >main.go <<'END'
package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/oxidecomputer/oxide.go/oxide"
)

func main() {
	for _, heading := range []string{`[profile.lab]`, `[profile."lab.east"]`, `[profile.lab.east]`} {
		dir, err := os.MkdirTemp("", "")
		if err != nil {
			panic(err)
		}
		credentials := heading + "\nhost = \"https://rack.example.com\"\ntoken = \"t\"\n"
		if err := os.WriteFile(filepath.Join(dir, "credentials.toml"), []byte(credentials), 0o600); err != nil {
			panic(err)
		}
		for _, name := range []string{"lab", "lab.east", `"lab.east"`} {
			_, err := oxide.NewClient(oxide.WithConfigDir(dir), oxide.WithProfile(name))
			result := "found"
			if err != nil {
				result = err.Error()[strings.LastIndex(err.Error(), ": ")+2:]
			}
			fmt.Println(heading, name, result)
		}
	}
}
END
GOFLAGS=-mod=mod go run . >output 2>log || { cat log >&2; exit 1; }
diff - output <<'END' || { echo "changed: see above" >&2; exit 1; }
[profile.lab] lab found
[profile.lab] lab.east profile not found
[profile.lab] "lab.east" profile not found
[profile."lab.east"] lab profile not found
[profile."lab.east"] lab.east profile not found
[profile."lab.east"] "lab.east" profile not found
[profile.lab.east] lab host not found
[profile.lab.east] lab.east found
[profile.lab.east] "lab.east" profile not found
END
echo "still so: a dot in the name of a profile divides it"
