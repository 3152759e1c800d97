#!/usr/bin/env bash
# "losetup --nooverlap --read-only" returns a writable device if the file has one already.
#
# Versions: util-linux 2.38.1 (Debian 12), Linux 6.18. Needs root and a free loop device.
# Guess:    --nooverlap reuses the device of the file if it is what was asked for. A device that differs is an error, as
#           for another offset.
# Seen:     --read-only, --sector-size 4096 and --direct-io=on are dropped: it prints the device that exists, which is
#           writable, has sectors of 512 bytes and is cached, and ends with 0. The opposite, a request for a writable
#           device where a read-only one exists, is an error.
# Why:      the check in the other direction shows that the two are compared. What should protect a disk from writes is
#           the option that is lost.
set -euo pipefail
dir=$(mktemp -d)
device=''
finish() {
	[ -z "$device" ] || losetup -d "$device"
	rm -rf "$dir"
}
trap finish EXIT
cd "$dir"
(apt-get -qq download mount=2.38.1-5+deb12u3) 2>log || { cat log >&2; exit 1; }
dpkg-deb -x mount_*.deb .
export PATH=$dir/sbin:$PATH LC_ALL=C
truncate -s 16M disk
device=$(losetup --find --show disk)
before=$(losetup --noheadings --output RO,LOG-SEC,DIO "$device")
for option in --read-only --sector-size=4096 --direct-io=on; do
	again=$(losetup --nooverlap --find --show "$option" disk) || { echo "changed: refused with $option" >&2; exit 1; }
	[ "$again" = "$device" ] || { losetup -d "$again"; echo "changed: another device with $option" >&2; exit 1; }
	[ "$(losetup --noheadings --output RO,LOG-SEC,DIO "$device")" = "$before" ] ||
		{ echo "changed: $option is applied" >&2; exit 1; }
done
losetup -d "$device"
device=$(losetup --read-only --find --show disk)
! losetup --nooverlap --find --show disk >/dev/null 2>output || { echo "changed: read-only is reused" >&2; exit 1; }
grep -q 'overlapping read-only' output
echo "still so: --nooverlap drops the other options"
