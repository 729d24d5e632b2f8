#!/usr/bin/env bash
# Whether what would be published works: wheel and sdist are built into dist/, checked, installed and used.
#
#   tools/release_check.sh PYTHON [--quick]      --quick leaves out what needs PyTorch: the demo and the sdist's tests
set -euo pipefail
cd "$(dirname "$0")/.."

python=$1
quick=${2:-}
here=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip_install() { # environment, arguments of pip install
    local environment=$1
    shift
    "$here/install/pip.sh" "$work/$environment/bin/python" --quiet --constraint "$here/constraints.txt" "$@"
}
environment() { "$python" -m venv "$work/$1"; }

echo "==> building wheel and sdist into dist/"
environment tools
pip_install tools build==1.6.1 twine==7.0.0
rm -rf dist
"$work/tools/bin/python" -m build --outdir dist . >"$work/build.log" 2>&1 || { cat "$work/build.log" >&2; exit 1; }
"$work/tools/bin/twine" check --strict dist/*
wheel=$(echo "$here"/dist/*.whl)

echo "==> the wheel alone, in an empty environment"
environment plain
pip_install plain "$wheel"
cd "$work" # so that nothing is imported from the checkout
stepwell=$work/plain/bin/stepwell
"$stepwell" --version
"$stepwell" demo --help >/dev/null
"$stepwell" spec qwen3-next-80b >/dev/null
"$stepwell" trace generate agents trace.jsonl --sessions 1 >/dev/null
"$stepwell" explain trace.jsonl --spec qwen3-next-80b >/dev/null

if [ "$quick" = --quick ]; then
    echo "==> left out: the demo and the sdist's tests"
    exit 0
fi

echo "==> the demo, with the extra it needs and random weights"
"$here/install/torch.sh" "$work/plain/bin/python" --constraint "$here/constraints.txt" torch
pip_install plain "$wheel[serve]"
"$stepwell" demo --model random-hybrid --turns 2 --answer 4 --html "$work/demo.html" >demo.log 2>&1 || { cat demo.log >&2; exit 1; }
tail -n 4 demo.log

echo "==> a part of the sdist's own tests, over the installed wheel"
tar -xzf "$here"/dist/*.tar.gz
cd stepwell-*/
pip_install plain pytest pytest-xdist hypothesis pyyaml
"$work/plain/bin/python" -m pytest -m "not deep" tests/unit/base tests/unit/tree tests/unit/memory tests/contract tests/unit/test_docs.py
