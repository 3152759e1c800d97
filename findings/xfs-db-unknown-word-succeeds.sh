#!/usr/bin/env bash
# "xfs_db -c" ends with 0 for a command or a field that it does not know.
#
# Versions: xfsprogs 6.1.0 (Debian 12).
# Guess:    not 0, as for a filesystem that it cannot read: scripts read single fields of the superblock with it.
# Seen:     "command nonsense not found" or "field nonsense not found" on stdout, and 0. Only a file that is no XFS
#           ends with 1.
# Why:      the words are on stdout, where the value would be. A misspelt field, or one that an older release calls
#           otherwise, gives a script a text in the place of a number.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
apt-get -qq download xfsprogs=6.1.0-1 2>/dev/null
dpkg-deb -x xfsprogs_*.deb .
export PATH=$dir/sbin:$dir/usr/sbin:$PATH LC_ALL=C
truncate -s 320M disk none
mkfs.xfs -q disk
for said in 'command nonsense not found=nonsense' 'field nonsense not found=print nonsense'; do
	got=$(xfs_db -r -c 'sb 0' -c "${said#*=}" disk 2>/dev/null) || { echo "changed: it ends with $?" >&2; exit 1; }
	[ "$got" = "${said%=*}" ] || { echo "changed: stdout has '$got'" >&2; exit 1; }
done
! xfs_db -r -c 'sb 0' -c 'print dblocks' none >/dev/null 2>&1 || { echo "changed: no XFS is no error" >&2; exit 1; }
echo "still so: an unknown command and an unknown field end with 0"
