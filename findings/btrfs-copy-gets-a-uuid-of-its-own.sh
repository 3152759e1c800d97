#!/usr/bin/env bash
# A copy of a mounted btrfs mounts beside it, under a UUID that is on neither disk.
#
# Versions: btrfs-progs 6.2 (Debian 12), Linux 6.18. Needs root.
# Guess:    the mount is refused, as for XFS, because both have one UUID; or it shows the files of the first one, as the
#           kernel takes all devices of a UUID for one filesystem.
# Seen:     it is a filesystem of its own, with a random UUID that lasts until the unmount: "btrfs filesystem show" and
#           /sys/fs/btrfs have it. blkid and findmnt name the UUID on the disk, for both.
# Why:      Linux 6.7 brought it for btrfs on one device, without a mount option. What finds a filesystem's directory in
#           /sys/fs/btrfs by the UUID that blkid prints reads that of another disk.
set -euo pipefail
dir=$(mktemp -d)
trap 'umount "$dir/first" "$dir/second" 2>/dev/null || true; rm -rf "$dir"' EXIT
cd "$dir"
apt-get -qq download btrfs-progs=6.2-1+deb12u2 2>/dev/null
dpkg-deb -x btrfs-progs_*.deb .
export PATH=$dir/sbin:$dir/bin:$dir/usr/sbin:$dir/usr/bin:$PATH LC_ALL=C
truncate -s 320M disk
mkfs.btrfs -q disk >/dev/null 2>&1
mkdir first second
mount -o loop disk first
echo first >first/file
sync
cp --sparse=always disk copy
mount -o loop copy second 2>/dev/null || { echo "changed: the copy is refused" >&2; exit 1; }
echo second >second/file
[ "$(cat first/file)" = first ] || { echo "changed: both mounts show one filesystem" >&2; exit 1; }
on_disk() { blkid -p -s UUID -o value "$(findmnt -n -o SOURCE "$1")"; }
mounted() { btrfs filesystem show "$1" | sed -n 's/.*uuid: //p'; }
[ "$(on_disk first)" = "$(on_disk second)" ] || { echo "changed: the UUID on the disk" >&2; exit 1; }
[ "$(mounted first)" = "$(on_disk first)" ] || { echo "changed: the first one's UUID" >&2; exit 1; }
[ "$(mounted second)" != "$(on_disk second)" ] || { echo "changed: both have the UUID on the disk" >&2; exit 1; }
echo "still so: $(on_disk second) on the disk, $(mounted second) while it is mounted"
