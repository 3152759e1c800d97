#!/usr/bin/env bash
# busybox's fsfreeze takes long options only.
#
# Version: busybox-static 1:1.35.0-4+deb12u1 of Debian 12, with its rebuilds. Needs Debian 12 with apt-get.
# Guess:   the applet takes the options of util-linux, whose manual page gives -f and -u with --freeze and --unfreeze.
#          If it takes one kind only, then the short one, as losetup and fstrim there.
# Seen:    "fsfreeze -f" and "-u" are invalid options and end with 1, so nothing is frozen. --freeze and --unfreeze are
#          accepted.
# Why:     small applets usually leave out long options. A hook that freezes a filesystem before a snapshot works on a
#          full image and fails in a small one.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
(apt-get -qq download busybox-static) 2>log || { cat log >&2; exit 1; }
case $(echo busybox-static_*) in
*1.35.0-4+deb12u1*) ;;
*) echo "changed: another version: $(echo busybox-static_*)" >&2; exit 1 ;;
esac
dpkg-deb --extract busybox-static_*.deb .
for option in -f -u --freeze --unfreeze; do
	./bin/busybox fsfreeze "$option" ./none 2>&1 | head -n 1
done >output || true
diff - output <<'END' || { echo "changed: see above" >&2; exit 1; }
fsfreeze: invalid option -- 'f'
fsfreeze: invalid option -- 'u'
fsfreeze: can't open './none': No such file or directory
fsfreeze: can't open './none': No such file or directory
END
echo "still so: the short options are invalid"
