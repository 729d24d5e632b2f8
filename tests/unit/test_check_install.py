"""`make check-install`: what it leaves of the environment, what it covers, and how it ends."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = spec_from_file_location("check_install", ROOT / "install/check.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "check_install", module)
    spec.loader.exec_module(module)
    return module


def test_packages_are_looked_for_in_the_public_index_alone(check: Any) -> None:
    where = {"PIP_FIND_LINKS": "/wheels", "PIP_EXTRA_INDEX_URL": "file:///more", "UV_INDEX": "x"}
    left = check.public_index_only(where | {"PIP_CERT": "/c", "https_proxy": "p"})
    assert left["PIP_CONFIG_FILE"] == "/dev/null" and left["PIP_CERT"] == "/c" and left["https_proxy"] == "p"
    assert not left.keys() & where.keys()


def test_all_python_versions_that_the_package_allows_are_checked(check: Any) -> None:
    least, end = re.findall(r"3\.(\d+)", tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"])
    assert check.supported() == [f"3.{minor}" for minor in range(int(least), int(end))]
    assert f"(3, {least}) <= sys.version_info[:2] <= (3, {int(end) - 1})" in MAKEFILE


def test_all_that_the_makefile_installs_is_checked() -> None:
    lists = [path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("install/*.txt"), *ROOT.glob("benchmarks/peers/*.txt")]]
    recipe = MAKEFILE.partition("\ncheck-install:")[2].partition("\n\n")[0]
    assert not [name for name in [*lists, "tests/vllm/requirements.txt", "$(EXTRAS),ui-test,docs"] if name not in recipe]
    extras = re.search(r"^EXTRAS := (.*)$", MAKEFILE, re.MULTILINE)
    assert extras is not None and set(re.findall(r"'\.\[(.*?)\]'", MAKEFILE)) == {"$(EXTRAS)", "ui-test", "docs"}


@pytest.mark.parametrize(
    ("no_network", "failed", "status", "said"),
    [
        ("no route to host", [], 2, "does not answer, so nothing was checked: no route to host"),
        ("", ["Python 3.12 on aarch64"], 1, "does not resolve: Python 3.12 on aarch64"),
        ("", [], 0, ""),
    ],
)
def test_its_status_tells_no_network_from_what_does_not_resolve(
    check: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
    no_network: str, failed: list[str], status: int, said: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(check.Tools, "install", lambda self: no_network)
    monkeypatch.setattr(check.Tools, "check", lambda self, *given: failed)
    assert check.main(["serve"]) == status and said in capfd.readouterr().err


def test_a_question_that_has_an_error_for_an_answer_does_not_resolve(
    check: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(check.Tools, "_run", lambda self, command: "triton==3.6.0 excludes torch" if "3.12" in command else "")
    found = check.Tools(tmp_path, {}).check("serve", "constraints.txt", ["install/gemma-3-270m.txt"])
    assert found == ["Python 3.12 on x86_64", "Python 3.12 on aarch64"]


def test_weights_are_pinned_by_version_and_hash_and_say_whose_they_are() -> None:
    for path in (ROOT / "install").glob("*.txt"):
        text = path.read_text()
        pins = [line for line in text.splitlines() if not line.startswith("#")]
        assert pins and all(re.fullmatch(r"[\w-]+==[\d.]+ --hash=sha256:[0-9a-f]{64}", line) for line in pins), path.name
        assert "Origin:" in text and "Licence:" in text, path.name


def test_the_workflow_runs_every_python_and_its_targets_exist() -> None:
    least, end = re.findall(r"3\.(\d+)", tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"])
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    jobs = workflow["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python"] == [f"3.{minor}" for minor in range(int(least), int(end))]
    commands = [step["run"].partition(" #")[0] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert ".ci/run" in commands
    assert not [each for each in commands if each.startswith("make ") and f"\n{each.removeprefix('make ')}:" not in MAKEFILE]


def test_pre_commit_runs_the_ruff_of_the_constraints() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    pins = (ROOT / "constraints.txt").read_text()
    assert f"\nruff=={config['repos'][0]['rev'].removeprefix('v')}\n" in pins
    assert (ROOT / config["repos"][1]["hooks"][0]["entry"].split()[1]).is_file()
