#!/usr/bin/env bash
# "e2fsck -n" ends with 0 for a filesystem whose journal has to be replayed.
#
# Versions: e2fsprogs 1.47.0 (Debian 12), Linux 6.18. Needs root.
# Guess:    a filesystem that was copied while it was mounted is not clean, so -n, which answers "no" to each question,
#           ends with 4, "errors left uncorrected".
# Seen:     0. That the journal is skipped is only a line of text, and the contents that are checked are not those that
#           the next mount shows.
# Why:      the exit status is what scripts read, and 0 is documented as "no errors".
set -euo pipefail
dir=$(mktemp -d)
trap 'umount "$dir/mnt" 2>/dev/null || true; rm -rf "$dir"' EXIT
cd "$dir"
truncate -s 64M image
mkfs.ext4 -q image
mkdir mnt
mount -o loop image mnt
echo text >mnt/file
sync
cp --sparse=always image copy
dumpe2fs -h copy 2>/dev/null | grep needs_recovery >/dev/null
status=0
LC_ALL=C e2fsck -n copy >output 2>&1 || status=$?
grep -q "skipping journal recovery" output
[ "$status" = 0 ] || { echo "changed: exit status $status" >&2; exit 1; }
echo "still so: exit status 0 with a journal that is not replayed"
