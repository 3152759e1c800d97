#!/usr/bin/env bash
# "xfs_growfs -D" with a smaller size shrinks a mounted XFS, and ends with 0.
#
# Versions: xfsprogs 6.1.0 (Debian 12), Linux 6.18. Needs root.
# Guess:    XFS cannot be shrunk, and a program named "growfs" refuses a smaller size or does nothing.
# Seen:     as long as the last allocation group keeps enough blocks, the filesystem gets smaller at once, without a
#           question, with one line about "EXPERIMENTAL" on stderr. A size below that group is refused with 1.
# Why:      its manual page says that it expands a filesystem, and names shrinking only where it says what cannot be
#           shrunk. A script that passes an old, smaller size takes the 0 for "nothing to do".
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
apt-get -qq download xfsprogs=6.1.0-1 2>/dev/null
dpkg-deb -x xfsprogs_*.deb .
export PATH=$dir/sbin:$dir/usr/sbin:$PATH LC_ALL=C
truncate -s 1G disk
mkfs.xfs -q disk
mkdir mnt
device=$(losetup -f --show disk)
mount "$device" mnt
blocks() { xfs_db -r -c 'sb 0' -c 'p dblocks' "$device"; }

xfs_growfs -D 262000 mnt >output 2>&1 || { echo "changed: it refuses: $(tail -1 output)" >&2; exit 1; }
grep -q EXPERIMENTAL output
umount mnt
[ "$(blocks)" = 'dblocks = 262000' ] || { echo "changed: $(blocks)" >&2; exit 1; }
mount "$device" mnt
! xfs_growfs -D 131072 mnt >output 2>&1 || { echo "changed: it drops whole groups" >&2; exit 1; }
echo "still so: xfs_growfs shrinks inside the last allocation group"
