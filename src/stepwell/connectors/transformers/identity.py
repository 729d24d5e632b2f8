"""The identity of a model: its weights to the last bit, and everything else that cached pages depend on.

Weights are hashed once. Later calls compare addresses and version counters only, which change when a tensor is replaced or
written in place. Writes through `tensor.data` are not detected.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
import transformers
import xxhash

from stepwell.base.errors import ConfigError

_BLOCK_BYTES = 64 << 20  # copied to the host at once
_NOT_IDENTITY = ("_name_or_path", "name_or_path")  # the path of the weights


class Identity:
    """One model's identity, recomputed when its weights or adapters have changed."""

    def __init__(self, model: Any, given: str | None = None) -> None:
        """`given` is the caller's digest of the current weights, to avoid reading them all."""
        self._model = model
        self._seen = self._look()
        self.name = self._name(given)

    def changed(self) -> bool:
        """Whether the model has changed since the last call. If so, `name` is updated."""
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
    """Parameters and persistent buffers, as the modules hold them."""
    yield from model.named_parameters(remove_duplicate=False)
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}", buffer


def _saved(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights as they would be saved, including those of quantized modules."""
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            yield name, tensor


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError):  # from tensor subclasses that have no storage
        return 0


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _adapters(model: Any) -> list[tuple[object, ...]]:
    """The active adapters, from the fields of modules with adapters."""
    return [
        (name, tuple(module.active_adapters), bool(module.disable_adapters), tuple(getattr(module, "merged_adapters", ())))
        for name, module in model.named_modules()
        if isinstance(getattr(module, "active_adapters", None), (list, tuple)) and hasattr(module, "disable_adapters")
    ]


def _blocks(name: str, tensor: torch.Tensor) -> Iterator[memoryview]:
    """A tensor's bytes, in order. Raises ConfigError if they cannot be read."""
    try:
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        for start in range(0, len(flat), _BLOCK_BYTES):
            yield memoryview(flat[start : start + _BLOCK_BYTES].cpu().numpy())  # type: ignore[arg-type]
    except (RuntimeError, NotImplementedError, TypeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"the weights {name!r} cannot be read to identify this model ({reason:.200}): pass identity=, a digest of them"
        ) from None
