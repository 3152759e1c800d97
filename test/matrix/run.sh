#!/usr/bin/env bash
# Runs the tests of the node with the tools of another release of Debian, in a root folder made from its packages.
#
#     test/matrix/run.sh trixie                                  the tests of all packages
#     test/matrix/run.sh trixie -test.run=TestFeatures           some of them
#
# The kernel is this machine's: guests.sh has others. Needs root, and a Debian machine with the keys of its archive.
set -euo pipefail
release=$1
shift
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
tested=(core/filesystem core/luks core/device core/mount core/node)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/bin"
test/matrix/debian.sh root "$release" "$work/root"

failed=
for package in "${tested[@]}"; do
    CGO_ENABLED=0 go test -c -o "$work/bin/" "./$package" # cgo would need this machine's libc
    echo "== $package with the tools of $release"
    # shellcheck disable=SC2016 # the inner shell expands it
    unshare --mount --propagation=private bash -euc '
        root=$1 package=$2
        shift 2
        mount --bind "$root/root" "$root/root"
        for folder in dev sys; do mount --rbind "/$folder" "$root/root/$folder"; done
        mount -t proc proc "$root/root/proc"
        mount -t tmpfs tmpfs "$root/root/tmp"
        mount --bind "$PWD" "$root/root/repo"
        mount --bind "$root/bin" "$root/root/tests"
        exec env -i PATH=/usr/sbin:/usr/bin HOME=/tmp chroot "$root/root" bash -c "cd /repo/$package && exec /tests/${package##*/}.test \"\$@\"" bash "$@"
    ' bash "$work" "$package" -test.timeout=30m "$@" || failed="$failed $package"
done
[ -z "$failed" ] || { echo "failed with the tools of $release:$failed" >&2; exit 1; }
