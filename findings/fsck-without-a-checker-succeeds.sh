#!/usr/bin/env bash
# fsck ends with 0 if the program that checks the filesystem is not there, and its -t does not choose that program.
#
# Versions: util-linux 2.38.1, e2fsprogs 1.47.0 (Debian 12).
# Guess:    "fsck -t vfat DISK" runs fsck.vfat, as "mkfs -t vfat" runs mkfs.vfat. If fsck.vfat is not installed, fsck ends
#           with 8, "operational error".
# Seen:     a disk that is found to be ext4 is checked as ext4, whatever -t says. A disk whose type cannot be found takes
#           the type of -t, and if there is no program for that type, fsck prints nothing and ends with 0.
# Why:      a small image that has fsck and not the checkers passes each check. The 0 is documented as "no errors".
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
(apt-get -qq download util-linux=2.38.1-5+deb12u3 e2fsprogs=1.47.0-2+b2) 2>log || { cat log >&2; exit 1; }
for package in *.deb; do dpkg-deb -x "$package" .; done
export PATH=$PATH:$dir/sbin LC_ALL=C FSTAB_FILE=$dir/fstab
: >fstab
truncate -s 30M unknown ext4
sbin/mke2fs -q -F -t ext4 ext4

check() { local status=0; sbin/fsck -T "$@" >output 2>&1 || status=$?; echo "$status $(cat output)"; }
# fsck searches /sbin of this machine, too, so the type is one that no machine has. "nosuch" would mean "not such".
got=$(check -t absent "$dir/unknown")
[ "$got" = '0 ' ] || { echo "changed: a type without a checker: $got" >&2; exit 1; }
got=$(check -N -t absent "$dir/ext4")
case $got in *fsck.ext4*) ;; *) echo "changed: -t chooses: $got" >&2; exit 1 ;; esac
echo "still so: fsck succeeds without a checker"
