#!/usr/bin/env bash
# "mkfs.btrfs -m dup -m single" keeps two copies of the metadata: the second -m does not replace the first.
#
# Versions: btrfs-progs 6.2 (Debian 12). 6.14 (Debian 13) does the same, 5.10 (Debian 11) takes the last -m.
# Guess:    the last -m counts. A program can give its default first, and append the options of its user.
# Seen:     0 without a warning. The profiles add up, and single is the profile without a bit: DUP stays, whatever is
#           the order. -d does the same. -n is different: its last value counts.
# Why:      the same command had the guessed result in 5.10, and other options of the same program have it still.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
apt-get -qq download btrfs-progs=6.2-1+deb12u2 2>/dev/null
for package in *.deb; do dpkg-deb -x "$package" .; done
export PATH=$dir/sbin:$dir/usr/sbin:$dir/bin:$dir/usr/bin:$PATH

make() {
	rm -f disk
	truncate -s 1G disk
	mkfs.btrfs -q "$@" disk >/dev/null 2>&1 || { echo "changed: mkfs.btrfs refuses $*" >&2; exit 1; }
}
profiles() { make "$@" && btrfs inspect-internal dump-tree -t chunk disk | sed -n 's/.*type \(METADATA\|DATA\)/\1/p' | sort; }

for options in "-m dup -m single" "-m single -m dup"; do
	# shellcheck disable=SC2086 # words
	profiles $options >found
	grep -qx 'METADATA|DUP' found || { echo "changed: $options makes $(tr '\n' ' ' <found)" >&2; exit 1; }
done
profiles -m single >found
grep -qx 'METADATA|single' found || { echo "changed: -m single makes $(tr '\n' ' ' <found)" >&2; exit 1; }
profiles -d dup -d single >found
grep -qx 'DATA|DUP' found || { echo "changed: -d dup -d single makes $(tr '\n' ' ' <found)" >&2; exit 1; }
make -n 65536 -n 16384
btrfs inspect-internal dump-super disk | grep -qE '^nodesize[[:space:]]+16384$' || { echo "changed: -n" >&2; exit 1; }
echo "still so: the profiles of several -m and -d add up"
