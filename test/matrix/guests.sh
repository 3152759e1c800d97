#!/usr/bin/env bash
# Takes volumes from each guest to each guest, in QEMU: guests with the kernels of KERNELS, each with the tools of
# RELEASES. Both are releases of Debian.
#
#     KERNELS="bullseye sid" test/matrix/guests.sh
#
# Needs root, and a Debian machine with the keys of its archive.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
MATRIX_KERNELS= MATRIX_TOOLS=
for release in ${KERNELS:-bullseye bookworm trixie sid}; do
    test/matrix/debian.sh kernel "$release" "$work/kernels/$release"
    MATRIX_KERNELS="$MATRIX_KERNELS $work/kernels/$release"
done
for release in ${RELEASES:-bookworm trixie}; do
    test/matrix/debian.sh root "$release" "$work/tools/$release"
    MATRIX_TOOLS="$MATRIX_TOOLS $work/tools/$release"
done
export MATRIX_KERNELS MATRIX_TOOLS
go run ./test/all -tags=vm,matrix -count=1 -timeout=3h -run='^TestMatrix$' ./test/vm
