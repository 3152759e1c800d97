#!/usr/bin/env bash
# "xfs_admin -L" on a filesystem whose log has to be replayed succeeds, and the next mount takes the label back.
#
# Versions: xfsprogs 6.1.0 (Debian 12), Linux 6.18. Needs root.
# Guess:    it refuses, as "xfs_admin -U" does on the same disk; or the label stays, as tune2fs makes it stay by replaying
#           the journal first. Whoever refuses ends with another status than 0.
# Seen:     -L writes the label into each superblock and ends with 0. The replay then writes the first superblock again,
#           without the label; the copies keep it. -U prints "ERROR" and changes nothing, and ends with 0, too.
# Why:      both options change the same superblock, and a log that makes one of them unsafe makes the other one so.
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
apt-get -qq download xfsprogs=6.1.0-1 2>/dev/null
dpkg-deb -x xfsprogs_*.deb .
export PATH=$dir/sbin:$dir/usr/sbin:$PATH LC_ALL=C
truncate -s 512M disk
mkfs.xfs -q disk
mkdir mnt
device=$(losetup -f --show disk)
mount "$device" mnt
for i in $(seq 200); do echo "$i" >"mnt/$i"; done
sync -f mnt
cp --sparse=always disk copy
umount mnt
losetup -d "$device"
device=''
field() { xfs_db -r -c "sb $1" -c "p $2" copy | tr -d '\\0'; }

before=$(field 0 uuid)
xfs_admin -U generate copy >output 2>&1 || { echo "changed: a refused -U ends with another status than 0" >&2; exit 1; }
grep -q '^ERROR: The filesystem has valuable metadata changes' output
[ "$(field 0 uuid)" = "$before" ] || { echo "changed: -U changes the UUID" >&2; exit 1; }
xfs_admin -L fresh copy >output 2>&1 || { echo "changed: -L refuses" >&2; exit 1; }
[ "$(field 0 fname)" = 'fname = "fresh"' ]
device=$(losetup -f --show copy)
mount -o nouuid "$device" mnt
umount mnt
losetup -d "$device"
device=''
[ "$(field 0 fname)" = 'fname = ""' ] || { echo "changed: the label is $(field 0 fname)" >&2; exit 1; }
[ "$(field 1 fname)" = 'fname = "fresh"' ] || { echo "changed: the copy is $(field 1 fname)" >&2; exit 1; }
echo "still so: the replay takes the new label back"
