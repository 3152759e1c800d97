#!/bin/sh
# Installs the missing ones of the Debian packages named as arguments, and says so. As an ordinary user it only names
# the missing packages: tests that need them say so themselves.
set -eu

command -v dpkg-query >/dev/null || { echo "deps: this is no Debian; needed are the tools of: $*"; exit 0; }
missing=
for package; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)" = installed ] || missing="$missing $package"
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ]; then
    echo "deps: missing Debian packages (not root, so not installed):$missing"
    exit 0
fi
echo "deps: installing the Debian packages:$missing"
exec 9>/run/lock/oxide-csi-deps # two apt processes cannot run at the same time
flock 9
export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086 # the argument is a list of words
{ apt-get update -qq && apt-get install -y -qq --no-install-recommends $missing; } >/dev/null
echo "deps: installed"
