"""Hugging Face directories: the same logits as transformers, and a clear refusal of everything that is not one."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import save_file

from engine.loading.tiny import expected, logits_of, reference, write_directory
from stepwell.base.errors import ConfigError
from stepwell.engine.loading.checkpoint import open_checkpoint
from stepwell.engine.loading.random_hybrid import byte_tokenizer

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def llama() -> Any:
    return reference("Llama")


def byte_json() -> str:
    return byte_tokenizer()._inner.to_str()


@pytest.mark.parametrize("shards", [1, 3])
def test_a_directory_gives_the_logits_of_transformers(llama: Any, tmp_path: Path, shards: int) -> None:
    checkpoint = open_checkpoint(str(write_directory(llama, tmp_path / "tiny", shards=shards)))
    assert checkpoint.name == "tiny" and checkpoint.text is None and checkpoint.max_context == 512
    assert (logits_of(checkpoint) - expected(llama)).abs().max() <= TOLERANCE


def test_what_transformers_saves_can_be_opened(tmp_path: Path) -> None:
    model = reference("Gemma3", head_dim=32, sliding_window=16, query_pre_attn_scalar=32)
    model.save_pretrained(tmp_path)
    assert (logits_of(open_checkpoint(str(tmp_path))) - expected(model)).abs().max() <= TOLERANCE


def test_the_small_files_are_heard(llama: Any, tmp_path: Path) -> None:
    path = write_directory(llama, tmp_path)
    (path / "tokenizer.json").write_text(byte_json())
    settings = {
        "add_bos_token": True,
        "bos_token": {"content": "<bos>"},
        "eos_token": "<end_of_turn>",
        "chat_template": "{{ bos_token }}hi",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "generation_config.json").write_text('{"eos_token_id": [257, 258], "temperature": 0.6, "top_k": 20, "cache": "x"}')
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.text is not None
    assert checkpoint.eos_ids == checkpoint.text.eos_ids == {257, 258, 259}
    assert checkpoint.defaults == {"temperature": 0.6, "top_k": 20}
    prompt = checkpoint.chat.render([])
    assert prompt == "<bos>hi" and checkpoint.text.encode(prompt) == checkpoint.text.encode("hi") == [256, 104, 105]


@pytest.mark.parametrize("several", [False, True])
def test_a_template_in_its_own_file_or_by_name(llama: Any, tmp_path: Path, several: bool) -> None:
    path = write_directory(llama, tmp_path)
    if several:
        listed = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
        (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    else:
        (path / "tokenizer_config.json").write_text('{"chat_template": "no"}')
        (path / "chat_template.jinja").write_text("yes")
    assert open_checkpoint(str(path)).chat.render([]) == "yes"


def test_the_digest_changes_with_any_bit_of_config_or_weights(llama: Any, tmp_path: Path) -> None:
    path = write_directory(llama, tmp_path, shards=2)
    first = open_checkpoint(str(path)).digest
    assert len(first) == 32 and first == open_checkpoint(str(path)).digest
    shard = path / "model-00002-of-00002.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    second = open_checkpoint(str(path)).digest
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    assert len({first, second, open_checkpoint(str(path)).digest}) == 3


# ---- refusals -------------------------------------------------------------------------------------


def refused(path: Path, *words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_checkpoint(str(path))
    assert all(word in str(caught.value) for word in words), caught.value


def test_nothing_there_names_what_is_known(tmp_path: Path) -> None:
    refused(tmp_path / "none", "smollm2-135m", "gemma-3-270m", "random-hybrid")
    refused(tmp_path, "no config.json")


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"\x80\x04")
    refused(tmp_path / "model.pt", ".gguf")


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}", b""])
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json", "tokenizer.json"])
def test_broken_json_is_refused_by_name(llama: Any, tmp_path: Path, name: str, content: bytes) -> None:
    path = write_directory(llama, tmp_path)
    (path / name).write_bytes(content)
    refused(path, name)


def test_pickled_weights_are_never_opened(llama: Any, tmp_path: Path) -> None:
    path = write_directory(llama, tmp_path)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    refused(path, "pickled", "convert them to safetensors")
    (path / "pytorch_model.bin").unlink()
    refused(path, "download the weights")


def outside(path: Path) -> None:
    save_file({"model.norm.weight": torch.ones(4)}, path.parent / "outside.safetensors")


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/x.safetensors", "a/../../outside.safetensors", "x.bin", 7, ".."]
)
def test_an_index_cannot_point_out_of_its_directory(llama: Any, tmp_path: Path, name: object) -> None:
    path = write_directory(llama, tmp_path / "model", shards=2)
    outside(path)
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    refused(path, "not a safetensors file in this directory")


def test_an_index_must_agree_with_its_shards(llama: Any, tmp_path: Path) -> None:
    path = write_directory(llama, tmp_path, shards=2)
    index = path / "model.safetensors.index.json"
    good = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": good | {"more": "model-00001-of-00002.safetensors"}}))
    refused(path, "'more'", "but it is not")
    index.write_text(json.dumps({"weight_map": good | {"more": "model-00009.safetensors"}}))
    refused(path, "lacks 1 file", "model-00009.safetensors")
    index.write_text("{}")
    refused(path, "no weight_map")


def test_truncated_or_lying_weights_are_refused(llama: Any, tmp_path: Path) -> None:
    path = write_directory(llama, tmp_path)
    file = path / "model.safetensors"
    whole = file.read_bytes()
    for broken in (
        b"",
        whole[:5],
        whole[:100],
        whole[:-1],
        struct.pack("<Q", 1 << 62) + whole[8:],
        whole[:8] + b"\xff" * 50 + whole[58:],
    ):
        file.write_bytes(broken)
        refused(path, "model.safetensors", "not a whole safetensors file")


def test_links_are_followed_as_the_hub_lays_them(llama: Any, tmp_path: Path) -> None:
    path = write_directory(llama, tmp_path / "snapshot")
    (path / "model.safetensors").rename(tmp_path / "blob")
    (path / "model.safetensors").symlink_to(tmp_path / "blob")
    assert (logits_of(open_checkpoint(str(path))) - expected(llama)).abs().max() <= TOLERANCE
