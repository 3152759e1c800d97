#!/usr/bin/env bash
# "fstrim" at once after "fstrim" reports nothing on ext4, everything on XFS, and a part on btrfs.
#
# Versions: util-linux 2.38.1 (Debian 12), Linux 6.18. Needs root, and mkfs.ext4, mkfs.xfs and mkfs.btrfs.
# Guess:    the second run reports 0 bytes: nothing became free in between. Then the figure shows that trimming works.
# Seen:     320 MiB each: ext4 289.9 MiB, then 0; XFS 320 MiB, then 320 MiB again; btrfs 318.6, then 87.6 MiB. After a
#           new mount ext4 reports all again.
# Why:      the figure is what the filesystem passed to the disk, and only ext4 remembers, in memory, which groups were
#           trimmed. An alert "less was trimmed than yesterday", or the freed space, cannot be made of it.
set -euo pipefail
dir=$(mktemp -d)
trap 'umount "$dir/mnt" 2>/dev/null || true; rm -rf "$dir"' EXIT
cd "$dir"
apt-get -qq download util-linux=2.38.1-5+deb12u3 2>/dev/null
dpkg-deb -x util-linux_*.deb .
mkdir mnt
trimmed() { # bytes that a run reports
	LC_ALL=C "$dir/sbin/fstrim" -v mnt | sed 's/.*(\([0-9]*\) bytes).*/\1/'
}
for kind in ext4 xfs btrfs; do
	truncate -s 320M $kind
	mkfs.$kind -q $kind >/dev/null 2>&1
	mount -o loop $kind mnt
	eval "$kind=\"$(trimmed) $(trimmed)\""
	umount mnt
done
[ "${ext4% *}" -gt 200000000 ] && [ "${ext4#* }" = 0 ] || { echo "changed: ext4 $ext4" >&2; exit 1; }
[ "${xfs% *}" = "${xfs#* }" ] && [ "${xfs#* }" -gt 200000000 ] || { echo "changed: XFS $xfs" >&2; exit 1; }
[ "${btrfs#* }" -gt 0 ] && [ "${btrfs#* }" -lt "${btrfs% *}" ] || { echo "changed: btrfs $btrfs" >&2; exit 1; }
mount -o loop ext4 mnt
[ "$(trimmed)" = "${ext4% *}" ] || { echo "changed: ext4 remembers beyond a mount" >&2; exit 1; }
echo "still so: ext4 $ext4, XFS $xfs, btrfs $btrfs"
