#!/usr/bin/env bash
# "wipefs -a" leaves a copy of a btrfs superblock, from which one command brings the whole filesystem back.
#
# Versions: util-linux 2.38.1, btrfs-progs 6.2 (Debian 12), Linux 6.18. Needs root.
# Guess:    "wipefs -a" erases every signature of every copy, since it does so for the backup table of GPT. After it
#           nothing of the filesystem can be found.
# Seen:     it erases the first copy only. wipefs and "blkid -p" then find nothing, but the copy at 64 MiB is whole:
#           "btrfs-select-super -s 1" restores the first one, and the filesystem mounts with its files.
# Why:      its manual page speaks of all available signatures. Both tools read btrfs's first copy only, so what they
#           report as empty is one command away from a filesystem.
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
apt-get -qq download util-linux=2.38.1-5+deb12u3 btrfs-progs=6.2-1+deb12u2 2>/dev/null
for package in *.deb; do dpkg-deb -x "$package" .; done
export PATH=$dir/sbin:$dir/usr/sbin:$dir/bin:$dir/usr/bin:$PATH
truncate -s 512M disk
mkfs.btrfs -q disk >/dev/null 2>&1
mkdir mnt
device=$(losetup -f --show disk)
mount "$device" mnt
echo kept >mnt/file
umount mnt

wipefs -q -a "$device"
[ -z "$(wipefs "$device")" ] || { echo "changed: wipefs finds something" >&2; exit 1; }
! blkid -p "$device" >/dev/null || { echo "changed: blkid finds something" >&2; exit 1; }
! mount "$device" mnt 2>/dev/null || { echo "changed: it mounts without its first copy" >&2; exit 1; }
btrfs-select-super -s 1 "$device" >/dev/null || { echo "changed: no copy is left" >&2; exit 1; }
mount "$device" mnt
[ "$(cat mnt/file)" = kept ]
echo "still so: wipefs -a leaves the second superblock of btrfs"
