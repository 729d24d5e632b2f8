"""Which weights SGLang serves, from what it was started with. A served name says nothing: tomorrow it may mean others. Pure but
for reading the checkpoint's files.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from stepwell.connectors.weight_files import files_digest

NO_WEIGHTS = (
    'this store outlives the process or is shared, and nothing says which weights its pages are of: add "identity" beside '
    '"store", a text that changes whenever the weights or adapters do'
)
_CHANGES_OUTPUT = (
    "revision", "quantization", "dtype", "kv_cache_dtype", "json_model_override_args", "load_format", "context_length",
    "model_impl", "modelopt_quant", "rl_quant_profile", "mamba_ssm_dtype", "qsa_indexer_dtype",
)  # fmt: skip
_SCALES = "quantization_param_path"  # a file, which says what eight-bit keys and values are to be multiplied with
READ = ("model_path", "lora_paths", "speculative_draft_model_path", _SCALES, *_CHANGES_OUTPUT)  # of SGLang's settings


def weights_of(server_args: Any, identity: str | None = None) -> str | None:
    """A digest of checkpoint, adapters and what changes how they are read; None where nothing says which checkpoint it is.

    `identity` is the operator's name for the checkpoint, where it is not in files here.
    """
    path = getattr(server_args, "model_path", None)
    checkpoint = identity or (files_digest(Path(path)) if isinstance(path, str) else None)
    if checkpoint is None:
        return None
    adapters = [(name, files_digest(Path(where))) for name, where in sorted(_adapters(getattr(server_args, "lora_paths", None)))]
    draft = getattr(server_args, "speculative_draft_model_path", None)
    adapters += [("draft model", files_digest(Path(draft)))] if isinstance(draft, str) else []
    settings = [(name, str(getattr(server_args, name, None))) for name in _CHANGES_OUTPUT]
    scales = getattr(server_args, _SCALES, None)
    settings += [(_SCALES, hashlib.blake2b(Path(scales).read_bytes()).hexdigest())] if isinstance(scales, str) else []
    return hashlib.blake2b(repr((checkpoint, adapters, settings)).encode(), digest_size=16).hexdigest()


def _adapters(given: Any) -> list[tuple[str, str]]:
    """Names and paths, in each of the forms that SGLang takes: a dictionary, or a list of paths, `name=path`, or objects."""
    if isinstance(given, dict):
        return [(str(name), str(getattr(where, "lora_path", where))) for name, where in given.items()]
    found = []
    for each in given or ():
        where = each.get("lora_path") if isinstance(each, dict) else getattr(each, "lora_path", each)
        name, _, path = str(where).rpartition("=")
        found.append((name, path))
    return found
