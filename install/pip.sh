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
    if [[ $line =~ (Downloading|Using\ cached)\ ([^\ ]+)\ \(([0-9]+)[.0-9]*\ MB\) ]]; then
        file=${BASH_REMATCH[2]##*/} mb=${BASH_REMATCH[3]}
        sum=$((sum + mb)) version=${file#*-}
        version=${version%%-*}
        printf '    %-44s %5d MB  (%d so far)\n' "${file%%-*} ${version//%2B/+}" "$mb" "$sum"
    elif [[ $line == "Installing collected packages:"* ]]; then
        echo "    unpacking"
    fi
done
