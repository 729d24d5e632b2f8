#!/usr/bin/env bash
# Installs PyTorch: on a machine without an NVIDIA driver from PyTorch's own index of builds for CPUs, where that answers,
# and otherwise from where pip is configured to look. TORCH_INDEX names another index; empty, it means pip's own.
#
#   install/torch.sh PYTHON ARGUMENTS...      # of pip install, such as torch==2.13.0
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
python=$1
shift

default=https://download.pytorch.org/whl/cpu
if command -v nvidia-smi >/dev/null || [[ -e /proc/driver/nvidia/version ]]; then
    default=
fi
index=${TORCH_INDEX-$default}

answers() {
    timeout 10 "$python" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1] + "/torch/", timeout=5)' "$1" 2>/dev/null
}

if [[ -z $index ]]; then
    echo "    PyTorch for CUDA: with everything it needs about 2.9 GB to download and 7 GB of disk"
elif answers "$index"; then
    echo "    PyTorch for CPUs from $index: with everything else about 0.6 GB to download and 2.3 GB of disk"
    "$here/pip.sh" "$python" --index-url "$index" --no-deps "$@"
else
    echo "    $index does not answer: PyTorch comes from where pip finds it."
    echo "    Built for CUDA it is, with everything it needs, about 2.9 GB to download and 7 GB of disk; for CPUs 0.6 and 2.3 GB"
fi
"$here/pip.sh" "$python" "$@" # all of it, or what PyTorch itself needs
