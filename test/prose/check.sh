#!/usr/bin/env bash
# Checks the pages with the vale that is given. First it checks that the rules still find what bad.md has. THIRTY stands
# there for so many words.
set -euo pipefail
cd "$(dirname "$0")/../.."
vale=$1

thirty=$(printf 'word %.0s' {1..30})
found=$(sed "s/THIRTY/${thirty% }/g" test/prose/bad.md | "$vale" --no-wrap --output=line --ext=.md |
    sed -E "s/^[^:]*:([0-9]+):[0-9]+:([^:]*):(.*(avoid|instead of) '(.*)'.*|.*)/\1 \2 \5/; s/ $//" || true)
diff --unified - <(echo "$found") <<'EOT' || { echo 'prose: what the rules find in test/prose/bad.md differs' >&2; exit 1; }
3 Plain.Sentences
8 Plain.Words Whoever
9 Plain.Words is to be
10 Plain.Sentences
15 Plain.Sentences
19 Plain.Field folder
19 Plain.Field folders
20 Plain.Field answers
20 Plain.Field answered
20 Plain.Field answer
20 Plain.Field answering
21 Plain.Field by hand
21 Plain.Field in clear
21 Plain.Field program
21 Plain.Field Programs
21 Plain.Field process ended
21 Plain.Field processes have ended
21 Plain.Field process ends
22 Plain.Field a text
22 Plain.Field an empty text
22 Plain.Field anew
22 Plain.Field also a repeated one
22 Plain.Field meanwhile
23 Plain.Field map has
23 Plain.Field field says
23 Plain.Field function knows
23 Plain.Field records have
EOT

"$vale" --no-wrap --output=line README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md docs deploy/helm/oxide-csi/README.md findings
