#!/usr/bin/env bash
# "dumpe2fs" ends with the low byte of an error number of its library.
#
# Versions: e2fsprogs 1.47.0 (Debian 12).
# Guess:    1 for each failure, as tune2fs does, or one of the numbers of fsck(8).
# Seen:     19 for a file without a filesystem, 2 for a missing file. 19 is 2133571347 modulo 256, the library's "bad
#           magic number"; 2 is ENOENT. tune2fs ends with 1 for both.
# Why:      the manual page names no exit status, and a script that takes the numbers of e2fsck reads 2 as "corrected,
#           reboot" and 19 as several of them at once.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
apt-get -qq download e2fsprogs=1.47.0-2+b2 libext2fs2=1.47.0-2+b2 2>/dev/null
for package in *.deb; do dpkg-deb -x "$package" .; done
export LD_LIBRARY_PATH=$dir/usr/lib/$(uname -m)-linux-gnu:$dir/lib/$(uname -m)-linux-gnu
export PATH=$dir/sbin:$dir/usr/sbin:$PATH LC_ALL=C
truncate -s 16M none
status() { # COMMAND...: its exit status
	local status=0
	"$@" >/dev/null 2>&1 || status=$?
	echo "$status"
}
seen="$(status dumpe2fs -h none) $(status dumpe2fs -h missing) $(status tune2fs -l none) $(status tune2fs -l missing)"
[ "$seen" = "19 2 1 1" ] || { echo "changed: $seen" >&2; exit 1; }
echo "still so: dumpe2fs 19 and 2, tune2fs 1 and 1"
