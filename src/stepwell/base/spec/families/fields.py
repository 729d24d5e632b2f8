"""Reading a Hugging Face `config.json` field by field, as the hostile input it is.

Every value that is missing, of the wrong type or out of range becomes a `SpecError` that names the field.
Knows no model, and never fills in a value the caller did not give as a default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from stepwell.base.errors import SpecError

T = TypeVar("T")

MAX_LAYERS = 4096
MAX_SIZE = 1 << 24  # no width, head count or window of a real model comes near it


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """The fields of one JSON object; `path` is where it lies in the file, for error messages."""

    values: Mapping[str, object]
    path: str = ""

    def has(self, name: str) -> bool:
        """True when the field is there and not null."""
        return self.values.get(name) is not None

    def size(self, name: str, default: int | None = None, *, least: int = 1, most: int = MAX_SIZE) -> int:
        """A whole number in [least, most]; `default` when the field is absent."""
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise SpecError(f"config field {self._where(name)} is missing; it must be an integer of at least {least}")
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise SpecError(f"config field {self._where(name)} must be an integer from {least} to {most}, got {_short(value)}")
        return value

    def num_layers(self) -> int:
        return self.size("num_hidden_layers", most=MAX_LAYERS)

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise SpecError(f"config field {self._where(name)} must be true or false, got {_short(value)}")
        return value

    def text(self, name: str) -> str:
        """The string under `name`, or an empty one when the field is absent or something else."""
        value = self.values.get(name)
        return value if isinstance(value, str) else ""

    def texts(self, name: str) -> tuple[str, ...]:
        """The strings of the list under `name`; what is not a string is left out."""
        value = self.values.get(name)
        return tuple(item for item in value if isinstance(item, str)) if isinstance(value, list | tuple) else ()

    def section(self, name: str) -> Fields:
        """The object nested under `name`; an empty one when the field is absent."""
        value = self.values.get(name)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise SpecError(f"config field {self._where(name)} must be an object, got {_short(value)}")
        return Fields(values=value, path=f"{self.path}{name}.")

    def per_layer(self, name: str, meanings: Mapping[str | int, T], *, num_layers: int, longer: bool = False) -> list[T]:
        """What each entry of a list with one entry per layer means; entries past the last layer only if `longer`."""
        items = self._items(name)
        if len(items) < num_layers or (len(items) > num_layers and not longer):
            raise SpecError(f"config field {self._where(name)} must have {num_layers} entries, one per layer, got {len(items)}")
        for item in items[:num_layers]:
            if isinstance(item, bool) or not isinstance(item, str | int) or item not in meanings:
                known = ", ".join(map(str, meanings))
                raise SpecError(f"config field {self._where(name)} has an entry {_short(item)}; known entries are: {known}")
        return [meanings[item] for item in items[:num_layers] if isinstance(item, str | int)]

    def layer_numbers(self, name: str, *, num_layers: int) -> frozenset[int]:
        """The distinct layer numbers of a list, counted from 0 or from 1."""
        items = self._items(name)
        numbers = frozenset(
            item for item in items if isinstance(item, int) and not isinstance(item, bool) and 0 <= item <= num_layers
        )
        if len(numbers) != len(items):
            raise SpecError(
                f"config field {self._where(name)} must list distinct layer numbers up to {num_layers}, got {_short(items)}"
            )
        return numbers

    def _items(self, name: str) -> list[object]:
        value = self.values.get(name)
        if not isinstance(value, list | tuple | str):
            raise SpecError(f"config field {self._where(name)} must be a list, got {_short(value)}")
        return list(value)

    def _where(self, name: str) -> str:
        return f"{self.path}{name}"


def _short(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # a number of more digits than Python will print
        return "a number too long to show"
    return text if len(text) <= 60 else f"{text[:57]}..."
