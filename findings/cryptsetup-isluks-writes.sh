#!/usr/bin/env bash
# "cryptsetup isLuks" writes to the device that it asks about.
#
# Versions: cryptsetup 2.6.1 (Debian 12). Needs root, for /run/cryptsetup.
# Guess:    isLuks is a question, so it changes nothing. If the first copy of a LUKS2 header is gone, it fails or warns.
# Seen:     it ends with 0 and no word, and writes the first copy anew from the second. With --disable-locks it also ends
#           with 0 and no word, but leaves the device on one copy, as all other commands then do.
# Why:      its manual page says that it "returns true, if the device is a LUKS device, false otherwise". luksDump and
#           open --test-passphrase write in the same way.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
apt-get -qq download cryptsetup-bin=2:2.6.1-4~deb12u2 libcryptsetup12=2:2.6.1-4~deb12u2 2>/dev/null
for package in *.deb; do dpkg-deb -x "$package" .; done
export LD_LIBRARY_PATH=$dir/usr/lib/$(uname -m)-linux-gnu:$dir/lib/$(uname -m)-linux-gnu
cryptsetup=$(find . -name cryptsetup -path '*sbin*' -type f)
printf secret >key
truncate -s 64M disk
"$cryptsetup" luksFormat -q --type=luks2 --pbkdf-memory=1024 --pbkdf-force-iterations=4 --key-file=key disk
dd if=/dev/zero of=disk bs=4096 count=1 conv=notrunc status=none
sum() { sha256sum <disk; }
damaged=$(sum)
"$cryptsetup" isLuks --disable-locks disk >output 2>&1
[ "$(sum)" = "$damaged" ] || { echo "changed: --disable-locks writes" >&2; exit 1; }
"$cryptsetup" isLuks disk >>output 2>&1
[ "$(sum)" != "$damaged" ] || { echo "changed: isLuks writes nothing" >&2; exit 1; }
[ ! -s output ] || { echo "changed: it says $(cat output)" >&2; exit 1; }
[ "$(head -c 4 disk)" = LUKS ]
echo "still so: isLuks mends the header in silence, and with --disable-locks hides that a copy is gone"
