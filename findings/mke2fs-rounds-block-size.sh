#!/usr/bin/env bash
# "mkfs.ext4 -b 3000" makes blocks of 2048 bytes and reports success.
#
# Versions: e2fsprogs 1.47.0 (Debian 12).
# Guess:    it fails: the manual page allows powers of two from 1024, and mkfs.xfs refuses "-b size=3000".
# Seen:     0, no word, and blocks of 2048 bytes: 3000 is rounded down to a power of two.
# Why:      a script that passes a block size believes the exit status. "-b 512" is refused by the same check.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
apt-get -qq download e2fsprogs=1.47.0-2+b2 libext2fs2=1.47.0-2+b2 2>/dev/null
for package in *.deb; do dpkg-deb -x "$package" .; done
export LD_LIBRARY_PATH=$dir/usr/lib/$(uname -m)-linux-gnu:$dir/lib/$(uname -m)-linux-gnu
export MKE2FS_CONFIG=$dir/etc/mke2fs.conf
mke2fs=$(find . -name mke2fs -type f)
truncate -s 64M image
"$mke2fs" -q -t ext4 -b 3000 image >output 2>&1 || { echo "changed: it fails: $(cat output)" >&2; exit 1; }
[ ! -s output ] || { echo "changed: it says $(cat output)" >&2; exit 1; }
"$(find . -name dumpe2fs -type f)" -h image 2>/dev/null | grep -q '^Block size: *2048$' ||
	{ echo "changed: another block size" >&2; exit 1; }
if "$mke2fs" -q -F -t ext4 -b 512 image 2>/dev/null; then echo "changed: 512 passes" >&2; exit 1; fi
echo "still so: -b 3000 makes blocks of 2048 bytes"
