#!/usr/bin/env bash
# "fsck disk" with a relative path ends with 0 and does not look at the disk.
#
# Versions: util-linux 2.38.1, e2fsprogs 1.47.0 (Debian 12).
# Guess:    a path means the same with and without a directory in front, as for e2fsck, mount and mkfs.
# Seen:     "fsck disk", "fsck ./disk" and "fsck -t ext4 disk" print nothing and end with 0 for a filesystem with a wiped
#           superblock. The absolute path ends with 8, and "e2fsck disk" does. A name of nothing ends with 0, too.
# Why:      only an argument that begins with "/" or contains "=" is a device. Anything else is an option for the checker,
#           and without a device fsck goes through /etc/fstab. Its exit status of 0 is documented as "no errors".
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
(apt-get -qq download util-linux=2.38.1-5+deb12u3 e2fsprogs=1.47.0-2+b2) 2>log || { cat log >&2; exit 1; }
for package in *.deb; do dpkg-deb -x "$package" .; done
export PATH=$dir/sbin:$dir/usr/sbin:$PATH LC_ALL=C
# So that only the argument counts.
: >fstab
export FSTAB_FILE=$dir/fstab
truncate -s 30M disk
mke2fs -q -F -t ext4 disk
dd if=/dev/zero of=disk bs=1024 seek=1 count=1 conv=notrunc status=none
# The backup superblock is wiped, too, so that there is nothing to go on with.
dd if=/dev/zero of=disk bs=1024 seek=8193 count=1 conv=notrunc status=none

status() { local status=0; "$@" >output 2>&1 || status=$?; echo "$status, $(wc -l <output) lines"; }
for arguments in disk ./disk '-t ext4 disk' '-p disk' nothing; do
	# shellcheck disable=SC2086 # several arguments
	got=$(status fsck -T $arguments)
	[ "$got" = '0, 0 lines' ] || { echo "changed: fsck $arguments: $got" >&2; exit 1; }
done
got=$(status fsck -T -p "$dir/disk")
case $got in 0,*) echo "changed: fsck -p with the absolute path: $got" >&2; exit 1 ;; esac
got=$(status e2fsck -p disk)
case $got in 0,*) echo "changed: e2fsck -p disk: $got" >&2; exit 1 ;; esac
echo "still so: fsck ignores a relative path"
