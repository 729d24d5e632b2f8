#!/usr/bin/env bash
# Installs the router smg, for `make demo-cluster` and `make test-routers`, into .venv-smg. Nothing in stepwell needs it.
# About 150 MB of disk and ten seconds; no time when run again.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$here/../.." && pwd)"
venv="$root/.venv-smg"
requirements="$here/smg_requirements.txt"
stamp="$venv/installed.txt"

if [[ -f "$stamp" ]] && cmp --silent "$stamp" "$requirements"; then
    echo "smg is installed in $venv"
    exit 0
fi
echo "==> installing the router smg, once: 40 MB to download, 150 MB of disk"
rm -f "$stamp"
"${PYTHON:-python3}" -m venv "$venv"
"$root/install/pip.sh" "$venv/bin/python" --requirement "$requirements"
cp "$requirements" "$stamp"
echo "smg is installed in $venv"
