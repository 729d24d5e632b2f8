#!/usr/bin/env bash
# Installs SGLang 0.5.23, for measurement and `make test-sglang`, into .venv-sglang beside the repository's own
# .venv. Nothing in stepwell needs it. Needs Python 3.11 or newer and about 3 GB of disk;
# takes a few minutes, and no time when run again.
#
#   benchmarks/peers/install_sglang.sh                       # python3
#   PYTHON=python3.12 benchmarks/peers/install_sglang.sh     # another interpreter
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$here/../.." && pwd)"
venv="$root/.venv-sglang"
python="${PYTHON:-python3}"
torch="torch==2.13.0"
requirements="$here/sglang_requirements.txt"
stamp="$venv/installed.txt"

# The stamp holds what was asked for, so a changed list or torch installs again.
wanted() { echo "$torch"; cat "$requirements"; }
if [[ -f "$stamp" ]] && cmp --silent "$stamp" <(wanted); then
    echo "SGLang is installed in $venv"
    exit 0
fi

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "SGLang's pinned packages need Python 3.11 or newer: set PYTHON to one" >&2
    exit 1
fi

echo "[1/4] creating $venv"
rm -f "$stamp"
"$python" -m venv "$venv"

echo "[2/4] installing $torch"
"$root/install/torch.sh" "$venv/bin/python" "$torch"

echo "[3/4] installing SGLang and what it imports"
"$root/install/pip.sh" "$venv/bin/python" --no-deps --requirement "$requirements"

echo "[4/4] checking that its Rust tree runs"
"$venv/bin/python" -W ignore "$here/sglang_tree.py" \
    --core rust --comps full --nodes 256 --lens 1024 --reps 1

wanted > "$stamp"
echo "SGLang is installed in $venv"
