#!/usr/bin/env bash
# Builds the release of the last commit twice, in two clones. The second build has another folder, HOME, umask, time zone,
# language, and other times of its files. Both must be equal byte for byte. Then package test/release checks what is in it,
# and the tests of deploy/release check the program that made it.
#
# PLATFORMS names the platforms of the programs; make passes it on.
#
# Both builds use Go's caches, which saves ten minutes on two cores. With FRESH=1 the second build compiles everything again.
set -euo pipefail
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
GOCACHE=$(go env GOCACHE) GOMODCACHE=$(go env GOMODCACHE)
OXIDE_CSI_PROGRAMS=${OXIDE_CSI_PROGRAMS:-${XDG_CACHE_HOME:-$HOME/.cache}/oxide-csi-plugin/programs}
export GOCACHE GOMODCACHE OXIDE_CSI_PROGRAMS

git clone --quiet . "$work/first"
git clone --quiet . "$work/a-second/folder"
find "$work/a-second/folder" -type f -exec touch -d '2001-02-03 04:05:06' {} +
mkdir "$work/home"

(umask 022 && make -C "$work/first" release)
(
    umask 077
    export HOME=$work/home TZ=Asia/Tokyo LC_ALL=C.UTF-8 USER=another
    [ -z "${FRESH:-}" ] || export GOCACHE=$work/cache
    make -C "$work/a-second/folder" release
)

diff -r "$work/first/dist" "$work/a-second/folder/dist"
echo "verify: $(find "$work/first/dist" -type f | wc -l) files are equal in both builds"
OXIDE_RELEASE=$work/first/dist go test -tags=release -count=1 -v ./deploy/release ./test/release
