#!/usr/bin/env bash
# "mkfs.ext4 -L" cuts a label of more than 16 bytes and reports success.
#
# Versions: e2fsprogs 1.47.0, xfsprogs 6.1.0 (Debian 12).
# Guess:    it fails, as mkfs.xfs does for a label of more than its 12 characters: a mount by that label would not find it.
# Seen:     0, with a warning on stderr. The filesystem has the first 16 bytes, so two long labels can become the same.
# Why:      the other mkfs programs refuse, and the manual page only says that the maximum length is 16 bytes.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
apt-get -qq download e2fsprogs=1.47.0-2+b2 libext2fs2=1.47.0-2+b2 xfsprogs=6.1.0-1 2>/dev/null
for package in *.deb; do dpkg-deb -x "$package" .; done
export LD_LIBRARY_PATH=$dir/usr/lib/$(uname -m)-linux-gnu:$dir/lib/$(uname -m)-linux-gnu
export MKE2FS_CONFIG=$dir/etc/mke2fs.conf
mke2fs=$(find . -name mke2fs -type f)
for label in database-primary-1 database-primary-2; do
	truncate -s 16M "$label"
	"$mke2fs" -q -t ext4 -L "$label" "$label" 2>/dev/null || { echo "changed: $label is refused" >&2; exit 1; }
	"$(find . -name dumpe2fs -type f)" -h "$label" 2>/dev/null | sed -n 's/^Filesystem volume name: *//p' >>labels
done
[ "$(uniq labels)" = database-primary ] || { echo "changed: $(cat labels)" >&2; exit 1; }
truncate -s 400M xfs
if "$(find . -name mkfs.xfs -type f)" -q -L database-primary xfs >/dev/null 2>&1; then
	echo "changed: mkfs.xfs cuts its label, too" >&2
	exit 1
fi
echo "still so: two ext4 with the label database-primary"
