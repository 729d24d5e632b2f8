#!/usr/bin/env bash
# Installs the router smg, for `make test-routers`, into .venv-smg beside the repository's own .venv. Nothing in
# stepwell needs it. About 150 MB of disk and ten seconds; no time when run again.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
venv="$(cd "$here/../.." && pwd)/.venv-smg"
requirements="$here/smg_requirements.txt"
stamp="$venv/installed.txt"

if [[ -f "$stamp" ]] && cmp --silent "$stamp" "$requirements"; then
    echo "smg is installed in $venv"
    exit 0
fi
rm -f "$stamp"
"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/pip" install --disable-pip-version-check --requirement "$requirements"
cp "$requirements" "$stamp"
echo "smg is installed in $venv"
