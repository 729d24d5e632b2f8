"""A Hugging Face model directory: which files it must have, and what they say. Reads no weights.

    config.json   model.safetensors | model.safetensors.index.json + shards   tokenizer.json   tokenizer_config.json
    generation_config.json   chat_template.jinja

Its files come from anywhere, so each is taken as hostile: sizes are bounded, and an index cannot point out of the directory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from stepwell.base.errors import ConfigError
from stepwell.engine.loading.safetensors_files import SafetensorsFiles
from stepwell.engine.loading.tokenizer import Tokenizer

_MAX_JSON_BYTES = 64 << 20  # an index of the largest models has 10 MB, a tokenizer 35 MB
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class HfDirectory:
    """The parsed small files. `weight_files` are in the order of their names."""

    config: Mapping[str, object]
    generation: Mapping[str, object]
    text_config: Mapping[str, object]  # tokenizer_config.json
    template: str | None
    weight_files: tuple[Path, ...]
    places: Mapping[str, str] | None
    path: Path

    @classmethod
    def read(cls, path: Path) -> HfDirectory:
        """Raises ConfigError that names the file which is missing or broken."""
        config_file = path / "config.json"
        if not config_file.is_file():
            raise ConfigError(f"{path} has no config.json: give a Hugging Face model directory, a .gguf file or a known name")
        config = _read_object(config_file)
        text_config = _read_object(path / "tokenizer_config.json", optional=True)
        places = _read_index(path)
        return cls(
            config=config,
            generation=_read_object(path / "generation_config.json", optional=True),
            text_config=text_config,
            template=_template(path, text_config),
            weight_files=_weight_files(path, places),
            places=places,
            path=path,
        )

    def source(self) -> SafetensorsFiles:
        return SafetensorsFiles(self.weight_files, places=self.places)

    def tokenizer(self) -> Tokenizer | None:
        """None when the directory has no tokenizer.json: such a model takes and gives tokens only."""
        file = self.path / "tokenizer.json"
        if not file.is_file():
            return None
        try:
            inner = tokenizers.Tokenizer.from_str(_read_text(file))
        except ConfigError:
            raise
        except Exception as error:  # the package raises nothing narrower
            raise ConfigError(f"{file} is not a tokenizer: {error}") from None
        add_bos = self.text_config.get("add_bos_token") is True
        bos = inner.token_to_id(self.special_token("bos_token"))
        eos = inner.token_to_id(self.special_token("eos_token"))
        ends = self.eos_ids() | (frozenset() if eos is None else {eos})
        return Tokenizer(inner, eos_ids=ends, bos_id=bos, add_bos=add_bos and bos is not None)

    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer, by config and generation config together."""
        nested = self.config.get("text_config")
        found: set[int] = set()
        for values in (self.config, nested if isinstance(nested, Mapping) else {}, self.generation):
            value = values.get("eos_token_id")
            found.update(each for each in (value if isinstance(value, list) else [value]) if type(each) is int and each >= 0)
        return frozenset(found)

    def special_token(self, name: str) -> str:
        """A token's text, in either way of writing it; empty when it has none."""
        value = self.text_config.get(name)
        value = value.get("content") if isinstance(value, Mapping) else value
        return value if isinstance(value, str) else ""


def _weight_files(path: Path, places: Mapping[str, str] | None) -> tuple[Path, ...]:
    names = sorted(set(places.values())) if places is not None else ["model.safetensors"]
    missing = [name for name in names if not (path / name).is_file()]
    if not missing:
        return tuple(path / name for name in names)
    if places is not None:
        raise ConfigError(f"{path} lacks {len(missing)} file(s) of its index, among them {missing[0]!r:.80}: download them")
    if any(next(path.glob(pattern), None) is not None for pattern in _PICKLED):
        raise ConfigError(
            f"{path} has pickled weights only, which can run code and are never opened: convert them to safetensors"
        )
    raise ConfigError(f"{path} has neither model.safetensors nor model.safetensors.index.json: download the weights")


def _read_index(path: Path) -> Mapping[str, str] | None:
    file = path / "model.safetensors.index.json"
    if (path / "model.safetensors").is_file() or not file.is_file():
        return None
    places = _read_object(file).get("weight_map")
    if not isinstance(places, Mapping) or not places:
        raise ConfigError(f"{file} has no weight_map: download it again")
    for name in places.values():
        # A bare name, so that it lies here. Links are followed: the hub's own cache is made of them.
        if not isinstance(name, str) or not name.endswith(".safetensors") or any(mark in name for mark in "/\\:\0"):
            raise ConfigError(f"{file} names {name!r:.80}, which is not a safetensors file in this directory")
    return places


def _template(path: Path, text_config: Mapping[str, object]) -> str | None:
    """A file of its own, or a string among the settings, or the default one of several."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return _read_text(file)
    value = text_config.get("chat_template")
    if isinstance(value, list):
        several = {each.get("name"): each.get("template") for each in value if isinstance(each, Mapping)}
        value = several.get("default")
    return value if isinstance(value, str) else None


def _read_object(file: Path, *, optional: bool = False) -> Mapping[str, object]:
    if optional and not file.is_file():
        return {}
    text = _read_text(file)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{file} must hold a JSON object")
    return value


def _read_text(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            data = opened.read(_MAX_JSON_BYTES + 1)
        if len(data) > _MAX_JSON_BYTES:
            raise ConfigError(f"{file} is larger than {_MAX_JSON_BYTES >> 20} MiB, which no such file is")
        return data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
