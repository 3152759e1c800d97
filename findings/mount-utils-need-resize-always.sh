#!/usr/bin/env bash
# mount-utils' NeedResize is always true for a writable ext4 or XFS.
#
# Versions: k8s.io/mount-utils v0.37.2, e2fsprogs 1.47.0, xfsprogs 6.1.0, btrfs-progs 6.2 (Debian 12). Needs root.
# Guess:    it compares the filesystem with its disk, so it is false for a filesystem that mkfs has just made.
# Seen:     true for ext4 and XFS, at each call. Only btrfs is compared. An ext2 is an error.
# Why:      the name asks a question, and the version of Kubernetes 1.29 compares the sizes. A driver that waits until
#           NeedResize is false never ends, and one that resizes if it is true starts a process at each mount.
set -euo pipefail
dir=$(mktemp -d)
device=''
finish() {
	umount "$dir/mnt" 2>/dev/null || true
	[ -z "$device" ] || losetup -d "$device"
	rm -rf "$dir"
}
trap finish EXIT
cd "$dir"
cat >go.mod <<'END'
module finding

go 1.26

require (
	k8s.io/mount-utils v0.37.2
	k8s.io/utils v0.0.0-20260626114624-be93311217bd
)
END
cat >main.go <<'END'
package main

import (
	"fmt"
	"os"

	"k8s.io/mount-utils"
	"k8s.io/utils/exec"
)

func main() {
	need, err := mount.NewResizeFs(exec.New()).NeedResize(os.Args[1], os.Args[2])
	fmt.Println(need, err)
}
END
GOFLAGS=-mod=mod go build -o need . 2>/dev/null
mkdir mnt
said=
for filesystem in ext2 ext4 xfs btrfs; do
	rm -f disk
	truncate -s 512M disk
	"mkfs.$filesystem" -q disk >/dev/null 2>&1
	device=$(losetup -f --show disk)
	mount "$device" mnt
	said+="$filesystem $(./need "$device" "$dir/mnt"); "
	umount mnt
	losetup -d "$device"
	device=''
done
[ "$said" = "ext2 false could not parse fs info of given filesystem format: ext2. Supported fs types are: xfs, ext3, ext4; ext4 true <nil>; xfs true <nil>; btrfs false <nil>; " ] || { echo "changed: $said" >&2; exit 1; }
echo "still so: $said"
