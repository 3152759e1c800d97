#!/usr/bin/env bash
# mount-utils lists a mount point in the kernel's escaped spelling.
#
# Versions: k8s.io/mount-utils v0.37.2, Linux 6.18. Needs root.
# Guess:    List and ParseMountInfo return the path that was given to mount(2): "a b".
# Seen:     both return "a\040b", so a comparison with the real path finds no mount.
# Why:      the package documents these fields as paths, and its own functions compare them with paths from the caller.
#           IsMountPoint finds the same mount, since it asks the kernel before it reads the list.
set -euo pipefail
dir=$(mktemp -d)
trap 'umount "$dir/a b" 2>/dev/null || true; rm -rf "$dir"' EXIT
cd "$dir"
cat >go.mod <<'EOF'
module finding

go 1.26

require k8s.io/mount-utils v0.37.2
EOF
cat >main.go <<'EOF'
package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"k8s.io/mount-utils"
)

func main() {
	mounter := mount.New("")
	points, err := mounter.List()
	check(err)
	for _, point := range points {
		if strings.HasPrefix(point.Path, os.Args[1]+"/") {
			fmt.Println("List:", filepath.Base(point.Path))
		}
	}
	infos, err := mount.ParseMountInfo("/proc/self/mountinfo")
	check(err)
	for _, info := range infos {
		if strings.HasPrefix(info.MountPoint, os.Args[1]+"/") {
			fmt.Println("ParseMountInfo:", filepath.Base(info.MountPoint))
		}
	}
	mounted, err := mounter.IsMountPoint(filepath.Join(os.Args[1], "a b"))
	check(err)
	fmt.Println("IsMountPoint:", mounted)
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
EOF
mkdir "a b"
mount -t tmpfs tmpfs "$dir/a b"
diff - <(GOFLAGS=-mod=mod go run . "$dir") <<'EOF'
List: a\040b
ParseMountInfo: a\040b
IsMountPoint: true
EOF
echo "still so: mount points keep the escapes of mountinfo"
