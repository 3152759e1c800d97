#!/usr/bin/env bash
# "resize2fs" grows an unmounted ext4 with sparse_super2 and without flex_bg so that a used block counts as free.
#
# Versions: e2fsprogs 1.47.0 (Debian 12).
# Guess:    after an offline growth that ended with 0, "e2fsck -fn" finds nothing, as for each other choice of features.
# Seen:     "Block bitmap differences", and 4. A block of the last group before the growth is marked as free.
# Why:      mke2fs offers both features, resize2fs takes the filesystem without a word, and the next writer may get a
#           block that is in use. With flex_bg, or with sparse_super instead, the same growth is clean.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
apt-get -qq download e2fsprogs=1.47.0-2+b2 libext2fs2=1.47.0-2+b2 2>/dev/null
for package in *.deb; do dpkg-deb -x "$package" .; done
export LD_LIBRARY_PATH=$dir/usr/lib/$(uname -m)-linux-gnu:$dir/lib/$(uname -m)-linux-gnu
export MKE2FS_CONFIG=$dir/etc/mke2fs.conf PATH=$dir/sbin:$dir/usr/sbin:$PATH LC_ALL=C
grown() { # FEATURES: what e2fsck says of a filesystem with them that has grown
	rm -f disk
	truncate -s 1G disk
	mke2fs -q -t ext4 -O "$1" disk
	truncate -s 2G disk
	e2fsck -fp disk >/dev/null
	resize2fs disk >/dev/null 2>&1
	status=0
	e2fsck -fn disk >output 2>&1 || status=$?
}
grown sparse_super2
[ "$status" = 0 ] || { echo "changed: with flex_bg: $(cat output)" >&2; exit 1; }
grown ^flex_bg
[ "$status" = 0 ] || { echo "changed: with sparse_super: $(cat output)" >&2; exit 1; }
grown sparse_super2,^flex_bg
[ "$status" = 4 ] && grep -q "Block bitmap differences" output || { echo "changed: $status" >&2; exit 1; }
echo "still so: $(grep 'Block bitmap differences' output)"
