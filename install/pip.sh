#!/usr/bin/env bash
# pip install, with one line for each file of a megabyte or more: its size, and the sum so far. Errors and warnings of pip
# are shown as they are.
#
#   install/pip.sh PYTHON ARGUMENTS...
set -euo pipefail

python=$1
shift
sum=0
PYTHONUNBUFFERED=1 "$python" -m pip install --disable-pip-version-check --progress-bar off "$@" | while IFS= read -r line; do
    if [[ $line =~ (Downloading|Using\ cached)\ ([^-]+)-([^-]+)-[^\ ]*\ \(([0-9]+)[.0-9]*\ MB\) ]]; then
        sum=$((sum + BASH_REMATCH[4]))
        printf '    %-44s %5d MB  (%d so far)\n' "${BASH_REMATCH[2]} ${BASH_REMATCH[3]}" "${BASH_REMATCH[4]}" "$sum"
    elif [[ $line == "Installing collected packages:"* ]]; then
        echo "    unpacking"
    fi
done
