"""`stepwell spec`, as a user meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stepwell.base.spec.presets import preset, preset_names
from stepwell.cli.main import main


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = main(argv)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_json_has_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "spec", "deepseek-v3.2", "--kv-dtype", "fp8", "--json")
    report = json.loads(out)
    assert (status, err) == (0, "")
    assert (report["name"], report["page_tokens"], report["align"]) == ("deepseek-v3.2", 64, 1)
    assert report["bytes_per_token"] == 48_068 and isinstance(report["bytes_per_token"], int)
    assert report["checkpoint_bytes"] == 0
    assert report["fingerprint"] == preset("deepseek-v3.2", kv_dtype="fp8").fingerprint
    assert report["states"][1] == {
        "name": "index",
        "shape": "prefix",
        "layers": 61,
        "row_bytes": 132,
        "dtype": "fp8",
        "required": True,
        "align": 1,
        "replicated": True,
        "shards": 1,
        "bytes_per_token": 61 * 132,
        "page_bytes": 64 * 61 * 132,
        "checkpoint_bytes": 0,
    }


def test_json_keeps_the_fraction_of_a_byte_per_token(capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(run(capsys, "spec", "deepseek-v4-flash", "--kv-dtype", "fp8", "--json")[1])
    assert report["bytes_per_token"] == 3850.25 and round(report["bytes_per_token"]) == 3850
    assert sum(state["checkpoint_bytes"] for state in report["states"]) == report["checkpoint_bytes"]
    swa = report["states"][0]
    assert (swa["shape"], swa["page_bytes"], swa["checkpoint_bytes"]) == ("window 128", 43 * 128 * 584, 43 * 128 * 584)


def test_page_tokens_and_point_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(run(capsys, "spec", "qwen3-next-80b", "--page-tokens", "128", "--json")[1])
    assert (report["page_tokens"], report["boundary_step"], report["bytes_per_token"]) == (128, 128, 24_576)
    assert report["checkpoint_bytes"] == report["object_bytes"]["point"] == 77_856_768


def test_checkpoints_in_eight_bits_are_shown_in_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    exact = json.loads(run(capsys, "spec", "qwen3-next-80b", "--json")[1])
    narrow = json.loads(run(capsys, "spec", "qwen3-next-80b", "--checkpoint-dtype", "int8", "--json")[1])
    assert (exact["checkpoint_dtype"], narrow["checkpoint_dtype"]) == (None, "int8")
    numbers = 36 * (2_097_152 // 4 + 65_536 // 2)
    scales = 36 * (2_097_152 // 64 + 65_536 // 64)
    assert narrow["checkpoint_bytes"] == narrow["object_bytes"]["point"] == numbers + scales == 21_270_528
    assert narrow["object_bytes"]["prefix"] == exact["object_bytes"]["prefix"]
    assert narrow["fingerprint"] != exact["fingerprint"]
    shown = run(capsys, "spec", "qwen3-next-80b", "--checkpoint-dtype", "int8")[1]
    assert "int8 on the host and in stores; 74.2 MiB on the device" in shown and "20.3 MiB" in shown
    status, _, said = run(capsys, "spec", "llama-3.1-8b", "--checkpoint-dtype", "fp8")
    assert status == 2 and "no window or point state" in said


def test_table_shows_totals_objects_and_boundaries(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "spec", "deepseek-v4-flash", "--kv-dtype", "fp8")
    assert status == 0
    for text in ("deepseek-v4-flash", "c4_overlap", "prefix/128", "point mod 128", "3,850", "every 256 tokens", "315.0 KiB"):
        assert text in out
    assert preset("deepseek-v4-flash", kv_dtype="fp8").fingerprint in out


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_prints(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert run(capsys, "spec", name)[0] == 0


def test_config_file_is_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = json.loads(run(capsys, "spec", str(tmp_path), "--json")[1])
    assert report["bytes_per_token"] == 2 * 4 * 2 * 8 * 2


def test_draft_states_are_shown_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "spec", "deepseek-v3.2", "--draft")
    assert code == 0 and all(f"{state} (optional)" in out for state in ("draft", "draft_index", "draft_hidden"))
    code, _, err = run(capsys, "spec", "deepseek-v4-flash", "--draft")
    assert code == 2 and "draft" in err


def test_list_names_every_preset(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "spec", "--list")
    assert status == 0 and out.split() == list(preset_names())


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["dance"],
        ["spec"],
        ["spec", "qwen3-9b"],
        ["spec", "qwen3-8b", "--kv-dtype", "int3"],
        ["spec", "qwen3-8b", "--page-tokens", "many"],
        ["spec", "qwen3-8b", "--page-tokens", "0"],
        ["spec", "deepseek-v4-pro", "--page-tokens", "48"],
        ["spec", "qwen3-8b", "--loud"],
    ],
)
def test_a_user_error_is_one_line_and_exit_2(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    status, out, err = run(capsys, *argv)
    assert (status, out) == (2, "")
    assert err.startswith("stepwell: error: ") and err.count("\n") == 1


def test_help_exits_cleanly(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["spec", "--help"])
    assert caught.value.code == 0 and "NAME_OR_CONFIG" in capsys.readouterr().out


def test_python_m_stepwell_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "stepwell", "spec", "nope"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("stepwell: error: ") and "Traceback" not in done.stderr
