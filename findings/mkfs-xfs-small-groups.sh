#!/usr/bin/env bash
# "mkfs.xfs -d agsize=64m" is refused with words about the log, on a disk of any size.
#
# Versions: xfsprogs 6.1.0 (Debian 12).
# Guess:    it works: the manual page says that an allocation group has at least 16 MiB.
# Seen:     "Log size must be at least 64MB.", also with 1 TiB and if the log's size is not given. 68m works. The log
#           is inside one group and has at least 64 MiB, and the group has its own headers.
# Why:      the documented minimum of one option cannot be used with the default of another, and the message names
#           neither the option that was given nor its real minimum.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
apt-get -qq download xfsprogs=6.1.0-1 2>/dev/null
dpkg-deb -x xfsprogs_*.deb .
mkfs=$(find . -name mkfs.xfs -type f)
for size in 1G 1T; do
	truncate -s "$size" image
	if LC_ALL=C "$mkfs" -q -f -N -d agsize=64m image >output 2>&1; then
		echo "changed: agsize=64m passes on $size" >&2
		exit 1
	fi
	grep -q "Log size must be at least 64MB" output || { echo "changed: it says $(head -1 output)" >&2; exit 1; }
done
truncate -s 1G image
"$mkfs" -q -f -N -d agsize=68m image >/dev/null
echo "still so: agsize=64m is refused because of the log"
