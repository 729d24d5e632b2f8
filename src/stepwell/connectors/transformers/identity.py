"""The identity of a model: what its weights are to the last bit, and everything else that its cached bytes depend on.

Weights are hashed once. Later calls look at addresses and version counters only, which change when a tensor is replaced or
written in place. What is written through `tensor.data` is not noticed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
import transformers
import xxhash

from stepwell.base.errors import ConfigError

_BLOCK_BYTES = 64 << 20  # of a tensor that are brought to the host at once
_NOT_IDENTITY = ("_name_or_path", "name_or_path")  # where weights were read from


class Identity:
    """One model's identity, made anew when its weights or adapters have changed."""

    def __init__(self, model: Any, given: str | None = None) -> None:
        """`given` names the weights as they are now, where the caller has a digest of them and all should not be read."""
        self._model = model
        self._seen = self._look()
        self.name = self._name(given)

    def changed(self) -> bool:
        """Whether the model is another one than the last time. `name` is then the new one's."""
        seen = self._look()
        if seen == self._seen:
            return False
        self._seen = seen
        self.name = self._name(None)
        return True

    def _look(self) -> list[tuple[object, ...]]:
        tensors = [
            (name, id(tensor), _address(tensor), _version(tensor), tensor.shape, tensor.dtype, tensor.device)
            for name, tensor in _held(self._model)
        ]
        return [*tensors, *_adapters(self._model)]

    def _name(self, given: str | None) -> str:
        model = self._model
        facts = {
            "config": {name: value for name, value in model.config.to_dict().items() if name not in _NOT_IDENTITY},
            "class": f"{type(model).__module__}.{type(model).__qualname__}",
            "attention": getattr(model.config, "_attn_implementation", None),
            "adapters": [list(map(str, each)) for each in _adapters(model)],
            "transformers": transformers.__version__,
        }
        hashed = xxhash.xxh3_128(json.dumps(facts, sort_keys=True, default=str).encode())
        if given is None:
            for name, tensor in _saved(model):
                hashed.update(f"\n{name} {list(tensor.shape)} {tensor.dtype}\n".encode())
                for block in _blocks(name, tensor):
                    hashed.update(block)
        return "/".join(["transformers", *([] if given is None else [given]), hashed.hexdigest(), model.device.type])


def _held(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and lasting buffers, as the modules hold them: asking twice gives the same objects."""
    yield from model.named_parameters(remove_duplicate=False)
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}", buffer


def _saved(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights as they would be saved, with what quantized modules add to them."""
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            yield name, tensor


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError):  # tensors of a library's own class
        return 0


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _adapters(model: Any) -> list[tuple[object, ...]]:
    """Which adapters are in use, by the fields that modules with adapters have."""
    return [
        (name, tuple(module.active_adapters), bool(module.disable_adapters), tuple(getattr(module, "merged_adapters", ())))
        for name, module in model.named_modules()
        if isinstance(getattr(module, "active_adapters", None), (list, tuple)) and hasattr(module, "disable_adapters")
    ]


def _blocks(name: str, tensor: torch.Tensor) -> Iterator[memoryview]:
    """A tensor's bytes, in order. Raises ConfigError where they cannot be read."""
    try:
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        for start in range(0, len(flat), _BLOCK_BYTES):
            yield memoryview(flat[start : start + _BLOCK_BYTES].cpu().numpy())  # type: ignore[arg-type]
    except (RuntimeError, NotImplementedError, TypeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"the weights {name!r} cannot be read to tell this model from others ({reason:.200}): give identity=, "
            "a digest of them"
        ) from None
