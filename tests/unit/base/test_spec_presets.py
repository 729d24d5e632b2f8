"""Presets meet the published figures, and config files are read as hostile input."""

from __future__ import annotations

import json
from fractions import Fraction
from itertools import combinations
from pathlib import Path

import pytest

from stepwell.base.errors import SpecError
from stepwell.base.ids import Kind
from stepwell.base.spec import Prefix
from stepwell.base.spec.families import KV_DTYPES
from stepwell.base.spec.presets import MAX_CONFIG_BYTES, load_spec, preset, preset_names

MIB = 1 << 20
REQUIRED = [
    "qwen3-8b",
    "qwen3-32b",
    "llama-3.1-8b",
    "gemma-3-27b",
    "gpt-oss-20b",
    "gpt-oss-120b",
    "deepseek-v3",
    "deepseek-v3.2",
    "glm-5.2",
    "deepseek-v4-flash",
    "deepseek-v4-pro",
    "qwen3-next-80b",
    "qwen3.5-397b-a17b",
    "kimi-k3",
    "mimo-v2.5",
]
CONFIG = {"model_type": "qwen3", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}


def layers_of(name: str) -> dict[str, int]:
    return {state.name: state.layers for state in preset(name).states}


def test_the_well_known_models_are_there() -> None:
    assert set(REQUIRED) <= set(preset_names())


@pytest.mark.parametrize(
    ("name", "kv_dtype", "bytes_per_token"),
    [
        ("qwen3-8b", "bf16", 147_456),
        ("qwen3-32b", "bf16", 262_144),
        ("llama-3.1-8b", "bf16", 131_072),
        ("llama-3.3-70b", "fp8", 163_840),
        ("gemma-3-27b", "bf16", 10 * 8_192),
        ("gpt-oss-20b", "bf16", 24_576),
        ("gpt-oss-120b", "bf16", 36_864),
        ("mimo-v2.5", "bf16", 9 * 4 * 320 * 2),
        ("deepseek-v3", "bf16", 70_272),
        ("deepseek-v3.2", "fp8", 48_068),
        ("glm-5", "fp8", 78 * (656 + 132)),
        ("glm-5.2", "fp8", 78 * 656 + 21 * 132),
        ("qwen3-next-80b", "bf16", 24_576),
        ("qwen3.5-397b-a17b", "bf16", 30_720),
        ("kimi-k3", "bf16", 27_648),
        ("mamba2-2.7b", "bf16", 0),
    ],
)
def test_bytes_per_token(name: str, kv_dtype: str, bytes_per_token: int) -> None:
    assert preset(name, kv_dtype=kv_dtype).bytes_per_token == bytes_per_token


def test_bytes_per_token_of_deepseek_v4() -> None:
    flash, pro = preset("deepseek-v4-flash", kv_dtype="fp8"), preset("deepseek-v4-pro", kv_dtype="fp8")
    assert flash.bytes_per_token == Fraction(21 * (584 + 132), 4) + Fraction(20 * 584, 128)
    assert (round(flash.bytes_per_token), round(pro.bytes_per_token)) == (3850, 5511)
    assert round(preset("deepseek-v4-flash").bytes_per_token) == 6880
    assert round(preset("deepseek-v4-pro").bytes_per_token) == 9848


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        (
            "deepseek-v4-flash",
            {"swa": 43, "c4": 21, "c4_index": 21, "c4_overlap": 21, "c4_buffer": 21, "c128": 20, "c128_buffer": 20},
        ),
        (
            "deepseek-v4-pro",
            {"swa": 61, "c4": 30, "c4_index": 30, "c4_overlap": 30, "c4_buffer": 30, "c128": 31, "c128_buffer": 31},
        ),
        ("gemma-3-27b", {"kv": 10, "swa": 52}),
        ("gemma-3-270m", {"kv": 3, "swa": 15}),
        ("gpt-oss-120b", {"kv": 18, "swa": 18}),
        ("mimo-v2.5", {"kv": 9, "swa": 39}),
        ("glm-5.2", {"kv": 78, "index": 21}),
        ("kimi-k3", {"kv": 24, "ssm": 69, "conv": 69}),
        ("kimi-linear-48b", {"kv": 7, "ssm": 20, "conv": 20}),
        ("qwen3.5-397b-a17b", {"kv": 15, "ssm": 45, "conv": 45}),
        ("qwen3.8-2.4t-a95b", {"kv": 23, "ssm": 69, "conv": 69}),
    ],
)
def test_layers_of_each_state(name: str, layers: dict[str, int]) -> None:
    assert layers_of(name) == layers


def test_bytes_of_a_point() -> None:
    assert preset("qwen3-next-80b").object_bytes(Kind.POINT) == int(74.25 * MIB) == 36 * (64 * 1024 + 2 * MIB)
    assert preset("kimi-k3").object_bytes(Kind.POINT) == 69 * (96 * 128 * 128 * 4 + 3 * 96 * 128 * 4 * 2)
    assert round(preset("kimi-k3").checkpoint_bytes() / (1 << 30), 2) == 0.42


def test_v4_flash_needs_the_c128_buffer_only_off_multiples_of_128() -> None:
    spec = preset("deepseek-v4-flash", page_tokens=64)
    assert {"c4_overlap", "c128_buffer"} <= {state.name for state in spec.needed_at(192)}
    names = {state.name for state in spec.needed_at(256)}
    assert "c4_overlap" in names and "c128_buffer" not in names
    assert spec.checkpoint_bytes(192) - spec.checkpoint_bytes(256) == 20 * 64 * 2 * 512 * 2
    assert preset("deepseek-v4-flash").page_tokens == 256 and preset("qwen3-8b").page_tokens == 64


@pytest.mark.parametrize("name", preset_names())
def test_fingerprint_of_a_preset_differs_by_dtype_and_page(name: str) -> None:
    has_rows = bool(preset(name).of_shape(Prefix))
    dtypes = KV_DTYPES if has_rows else KV_DTYPES[:3]  # fp8 is for attention rows: without any it changes nothing
    prints = [preset(name, kv_dtype=dtype, page_tokens=page).fingerprint for dtype in dtypes for page in (64, 128, 256)]
    assert all(one != other for one, other in combinations(prints, 2))


def test_fp8_leaves_a_model_without_attention_as_it_is() -> None:
    assert preset("mamba2-2.7b", kv_dtype="fp8").fingerprint == preset("mamba2-2.7b").fingerprint


def test_names_do_not_mind_their_case_and_errors_show_near_ones() -> None:
    assert preset("Qwen3-8B") == preset("qwen3-8b")
    with pytest.raises(SpecError, match=r"'qwen3-9b'; did you mean .*qwen3-8b"):
        preset("qwen3-9b")
    with pytest.raises(SpecError, match="did you mean deepseek-v4-flash"):
        load_spec("deepseek-v4-flsh")
    with pytest.raises(SpecError, match="spec --list"):
        load_spec("\N{SNOWMAN}")


def test_a_file_and_its_folder_give_the_same_spec(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "other.json").write_text(json.dumps(CONFIG))
    spec = load_spec(folder)
    assert spec == load_spec(str(folder / "config.json")) and spec.name == "my-model"
    assert load_spec(tmp_path / "other.json", kv_dtype="fp8", page_tokens=16).state("kv").row_bytes == 256


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b"[" * 200_000, "not valid JSON"),
        (b'{"head_dim": ' + b"9" * 10_000 + b"}", "not valid JSON|unknown architecture"),
        (b"[1, 2]", "must be a JSON object"),
        (b'{"model_type": "tetris"}', "unknown architecture: tetris"),
        (b" " * (MAX_CONFIG_BYTES + 1), "larger than"),
    ],
    ids=["cut", "not-text", "deep", "long-number", "list", "unknown", "large"],
)
def test_a_bad_config_file_is_an_error_with_its_path(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(SpecError, match=message) as caught:
        load_spec(file)
    assert str(file) in str(caught.value)


def test_a_folder_without_a_config_says_so(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"holds no config\.json"):
        load_spec(tmp_path)


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "", "/dev/null"])
def test_a_path_that_cannot_be_one_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError) as caught:
        load_spec(name)
    assert len(str(caught.value)) < 400
