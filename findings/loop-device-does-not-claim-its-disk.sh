#!/usr/bin/env bash
# A loop device does not claim the block device below it.
#
# Versions: util-linux 2.38.1, e2fsprogs 1.47.0 (Debian 12), Linux 6.18. Needs root, and python3.
# Guess:    while a mounted filesystem reaches disk A through a loop device on A, an exclusive open of A fails with
#           EBUSY, as it does below device-mapper, and mkfs.ext4 refuses A as in use.
# Seen:     the exclusive open succeeds, and mkfs.ext4 writes a new filesystem below the mounted one, with exit code 0.
# Why:      below a mount or a mapping, O_EXCL is the kernel's own answer to "is it in use?". A loop device opens its file
#           without a claim, also when that file is a block device. Only /sys/block/loop*/loop/backing_file and
#           LOOP_GET_STATUS64 tell.
set -euo pipefail
dir=$(mktemp -d)
lower='' upper=''
finish() {
	umount "$dir/mnt" 2>/dev/null || true
	for device in $upper $lower; do losetup -d "$device"; done
	rm -rf "$dir"
}
trap finish EXIT
truncate -s 64M "$dir/image"
mkdir "$dir/mnt"
lower=$(losetup -f --show "$dir/image")
upper=$(losetup -f --show "$lower")
mkfs.ext4 -q "$upper"
mount "$upper" "$dir/mnt"
before=$(blkid -p -s UUID -o value "$lower")

python3 -c "import os, sys; os.close(os.open(sys.argv[1], os.O_RDWR | os.O_EXCL))" "$lower" || { echo "changed: the exclusive open fails" >&2; exit 1; }
mkfs.ext4 -q "$lower" </dev/null || { echo "changed: mkfs.ext4 refuses the disk" >&2; exit 1; }
sync
[ "$before" != "$(blkid -p -s UUID -o value "$lower")" ] || { echo "changed: mkfs.ext4 wrote nothing" >&2; exit 1; }
mountpoint -q "$dir/mnt"
echo "still so: an exclusive open succeeds below a loop device that is mounted"
