#!/usr/bin/env bash
# "cryptsetup luksFormat" ends with 0 on a disk that is smaller than the header that it writes.
#
# Version: cryptsetup 2.6.1 (Debian 12). Needs root, for a loop device and /run/cryptsetup.
# Guess:   a LUKS2 header has 16 MiB. On a disk of 8 MiB, or of exactly 16 MiB, luksFormat fails and changes nothing.
# Seen:    it prints that there is "no remaining space for data", and ends with 0. The disk has a header of which
#          isLuks, luksDump and "open --test-passphrase" say that it is fine. A regular file of 1 MiB grows to 16 MiB.
# Why:     a program that formats and then opens learns of it at the second step, when the disk's old contents are gone.
set -euo pipefail
dir=$(mktemp -d)
device=''
finish() {
	[ -z "$device" ] || losetup -d "$device"
	rm -rf "$dir"
}
trap finish EXIT
cd "$dir"
(apt-get -qq download cryptsetup-bin=2:2.6.1-4~deb12u2 libcryptsetup12=2:2.6.1-4~deb12u2) 2>log || { cat log >&2; exit 1; }
for package in *.deb; do dpkg-deb -x "$package" .; done
export LC_ALL=C
luks() { LD_LIBRARY_PATH=$(dirname "$dir"/usr/lib/*/libcryptsetup.so.12) "$dir/sbin/cryptsetup" "$@"; }
# Cheap on purpose: the key is of no use.
format=(--batch-mode luksFormat --type luks2 --pbkdf pbkdf2 --pbkdf-force-iterations 1000)
printf key >key
for size in 8M 16M; do
	truncate -s "$size" disk
	device=$(losetup --find --show disk)
	luks "${format[@]}" "$device" key >output 2>&1 || { echo "changed: $size is refused: $(cat output)" >&2; exit 1; }
	grep -q 'no remaining space for data' output
	luks isLuks "$device"
	luks open --test-passphrase --key-file key "$device"
	losetup -d "$device"
	device=''
	rm disk
done
truncate -s 1M file
luks "${format[@]}" file key >output 2>&1 || { echo "changed: a file of 1 MiB is refused" >&2; exit 1; }
[ "$(stat -c %s file)" = 16777216 ] || { echo "changed: the file has $(stat -c %s file) bytes" >&2; exit 1; }
echo "still so: luksFormat succeeds without room for data"
