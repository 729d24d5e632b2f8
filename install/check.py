"""Whether everything that the Makefile installs resolves from the public package index alone.

Two questions, both asked without any configuration of pip on this machine:

1. pip, for the Python that runs this: `pip install --dry-run` with the constraints.
2. uv, for every Python that pyproject.toml names, on x86-64 and aarch64: a wheel of every pin, and no two pins that
   exclude each other. pip cannot answer this one, since it evaluates markers for the Python that runs it.

Downloads metadata and two small tools, installs nothing outside a temporary folder. Exit status: 0 when all resolves, 1
when something does not, 2 when the index does not answer.

    python install/check.py serve,test --constraint constraints.txt
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOLS = ("pip==26.3", "uv==0.13.8", "hatchling")
MACHINES = ("x86_64", "aarch64")
GLIBC = "manylinux_2_34"  # Debian 12, Ubuntu 22.04 and newer
KEPT = ("PIP_CERT", "PIP_PROXY", "PIP_DEFAULT_TIMEOUT", "PIP_RETRIES", "PIP_CACHE_DIR")  # how to reach an index, not which
FAILED, NO_NETWORK = 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("extras", help="of this project, such as serve,test")
    parser.add_argument("--constraint", default="constraints.txt", metavar="FILE")
    parser.add_argument("--alone", action="append", default=[], metavar="FILE", help="requirements that are installed alone")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="stepwell-check-") as folder:
        tools = Tools(Path(folder), public_index_only(os.environ))
        why = tools.install()
        if why:
            print(f"the public package index does not answer, so nothing was checked: {why.splitlines()[-1]}", file=sys.stderr)
            return NO_NETWORK
        failed = tools.check(args.extras, args.constraint, args.alone)
    if failed:
        print(f"==> does not resolve: {', '.join(failed)}", file=sys.stderr)
        return FAILED
    print("==> everything that the Makefile installs resolves from the public index")
    return 0


def public_index_only(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what says to pip or uv where to look for packages. Certificates and proxies stay."""
    kept = {name: value for name, value in environment.items() if name in KEPT or not name.startswith(("PIP_", "UV_"))}
    return kept | {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "UV_NO_CONFIG": "1"}


def supported() -> list[str]:
    """The Python versions of pyproject.toml's classifiers."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = [each.rpartition(" ")[2] for each in project["classifiers"] if "Programming Language :: Python :: 3." in each]
    assert versions, "no classifier names a Python version"
    return versions


class Tools:
    """A pip that resolves by metadata alone, and uv, in a temporary environment."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder, self._environment = folder, dict(environment)
        self._bin = folder / "venv/bin"

    def install(self) -> str:
        """Why they cannot be installed; empty when they are."""
        venv.create(self._folder / "venv", with_pip=True)
        return self._run([str(self._bin / "python"), "-m", "pip", "install", "--quiet", *TOOLS])

    def check(self, extras: str, constraint: str, alone: Sequence[str]) -> list[str]:
        """What does not resolve. Prints every question with its answer."""
        asked = {f"Python {sys.version_info.major}.{sys.version_info.minor}, by pip": self._pip(extras, constraint)}
        given = ["pyproject.toml", "--constraint", constraint, *(f"--extra={extra}" for extra in extras.split(","))]
        for machine in MACHINES:
            for version in supported():
                asked[f"Python {version} on {machine}"] = self._uv(machine, version, given)
            for file in alone:
                asked[f"{file} on {machine}"] = self._uv(machine, supported()[-1], [file, "--no-deps"])
        return [what for what, command in asked.items() if not self._resolves(what, command)]

    def _pip(self, extras: str, constraint: str) -> list[str]:
        dry = [str(self._bin / "pip"), "install", "--quiet", "--dry-run", "--ignore-installed", "--no-build-isolation"]
        return [*dry, "--use-feature=fast-deps", "--constraint", constraint, f".[{extras}]"]  # fast-deps: metadata alone

    def _uv(self, machine: str, version: str, given: Sequence[str]) -> list[str]:
        target = ["--python-version", version, "--python-platform", f"{machine}-{GLIBC}", "--only-binary", ":all:"]
        writes = ["--cache-dir", str(self._folder / "cache"), "--output-file", str(self._folder / "resolved.txt")]
        return [str(self._bin / "uv"), "pip", "compile", "--quiet", *target, *writes, *given]

    def _resolves(self, what: str, command: Sequence[str]) -> bool:
        why = self._run(command)
        print(f"    {what}: {f'does not resolve{chr(10)}{why}' if why else 'resolves'}", flush=True)
        return not why

    def _run(self, command: Sequence[str]) -> str:
        done = subprocess.run(command, cwd=ROOT, env=self._environment, capture_output=True, text=True, check=False)
        return "" if done.returncode == 0 else (done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}")


if __name__ == "__main__":
    sys.exit(main())
