#!/usr/bin/env bash
# Builds oxide-csi of another revision into the cache of programs, and runs TestSkew with it and this tree:
#
#   test/blackbox/skew.sh REVISION
#
# The other program's version is v0.0.0-COMMIT, so that of HEAD differs from this tree by its version alone.
set -euo pipefail
cd "$(dirname "$0")/../.."
commit=$(git rev-parse --verify "${1:-HEAD}^{commit}")
programs=${OXIDE_CSI_PROGRAMS:-${XDG_CACHE_HOME:-$HOME/.cache}/oxide-csi-plugin/programs}
old=$programs/skew/$commit/oxide-csi
if [ ! -x "$old" ]; then
    echo "skew: building oxide-csi of $commit"
    tree=$(mktemp -d)
    trap 'rm -rf "$tree"' EXIT
    git archive "$commit" | tar -x -C "$tree"
    (cd "$tree" && CGO_ENABLED=0 go build -trimpath -buildvcs=false \
        -ldflags "-s -w -X main.version=v0.0.0-${commit:0:12}" -o bin/oxide-csi ./cmd/oxide-csi)
    install -D "$tree/bin/oxide-csi" "$old"
fi
OXIDE_SKEW=$old go run ./test/all -tags=skew -count=1 -run='^TestSkew$' ./test/blackbox
