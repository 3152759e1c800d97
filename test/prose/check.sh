#!/usr/bin/env bash
# Checks the pages with the vale that is given. First it checks that the rules still find what bad.md has.
set -euo pipefail
cd "$(dirname "$0")/../.."
vale=$1

found=$("$vale" --no-wrap --output=line test/prose/bad.md | cut -d: -f2,4 || true)
want=$'3:Plain.Sentences\n8:Plain.Words\n9:Plain.Words\n10:Plain.Sentences\n15:Plain.Sentences'
[ "$found" = "$want" ] || { printf 'prose: the rules find in test/prose/bad.md:\n%s\nwant:\n%s\n' "$found" "$want" >&2; exit 1; }

"$vale" --no-wrap --output=line README.md CONTRIBUTING.md docs deploy/helm/oxide-csi/README.md
