#!/usr/bin/env bash
# lsblk shows no filesystem, label or UUID where udev does not run, also to root.
#
# Versions: util-linux 2.38.1 (Debian 12), Linux 6.18. Needs root and a free loop device.
# Guess:    without udev lsblk reads the disk itself. Its manual page says so: "If the udev db is not available […], then
#           it tries to read LABELs, UUIDs and filesystem types from the block device."
# Seen:     without /run/udev, as in a container, FSTYPE, LABEL and UUID are empty and the status is 0. blkid finds all
#           three on the same disk.
# Why:      the disk's entry in /sys is enough for lsblk to take udev's empty answer. An empty FSTYPE reads as "blank", and
#           a program that formats blank disks is one step from formatting a full one.
set -euo pipefail
dir=$(mktemp -d)
device=''
finish() {
	[ -z "$device" ] || losetup -d "$device"
	rm -rf "$dir"
}
trap finish EXIT
cd "$dir"
(apt-get -qq download util-linux=2.38.1-5+deb12u3 e2fsprogs=1.47.0-2+b2) 2>log || { cat log >&2; exit 1; }
for package in *.deb; do dpkg-deb -x "$package" .; done
export PATH=$dir/sbin:$dir/bin:$dir/usr/bin:$PATH LC_ALL=C
truncate -s 30M disk
mke2fs -q -F -t ext4 -L data disk
device=$(losetup --find --show disk)
# A mount namespace of its own without udev's database, whatever runs on this machine.
# shellcheck disable=SC2016 # the shell inside expands it
unshare --mount --propagation private sh -ec '
	mount -t tmpfs none /run
	lsblk --noheadings --raw --output FSTYPE,LABEL,UUID "$1"
' sh "$device" >output
case $(blkid --probe "$device") in
*'LABEL="data"'*'TYPE="ext4"'*) ;;
*) echo "changed: blkid finds nothing" >&2; exit 1 ;;
esac
[ -z "$(tr -d ' \n' <output)" ] || { echo "changed: lsblk reads the disk: $(cat output)" >&2; exit 1; }
echo "still so: lsblk needs udev"
