"""One process of SGLang's caches, for one command: `life.py save|resume|signatures DIRECTORY`. Writes one line of JSON.

Runs with the interpreter that SGLang is installed for, and imports nothing of pytest.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import EnumMeta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "connectors"), str(HERE.parents[1] / "benchmarks" / "peers")]

import sglang_copies  # noqa: E402
import torch  # noqa: E402
from stack import KINDS, PAGE, STORAGE, Backend, page_keys, resume, save, some_bytes, stack, tokens_of  # noqa: E402

BACKENDS = ("stepwell", "file")
FLIPPED = 9  # the page that a bit is flipped in
LEAVES_AT = 700  # tokens of the prompt that another one shares


def save_all(root: Path) -> dict[str, object]:
    for kind in KINDS:
        for name in BACKENDS:
            with stack(kind, Backend(name=name, directory=root / f"{name}-{kind}")) as made:
                save(made, tokens_of(7))
    return {"piece": some_bytes(FLIPPED).hex()}


def resume_all(root: Path) -> dict[str, object]:
    """What each backend does in each case, and what Stepwell says where it cannot work."""
    out: dict[str, object] = {}
    for name in BACKENDS:
        for kind in KINDS:
            out[f"{name} {kind}"] = _resumed(kind, Backend(name=name, directory=root / f"{name}-{kind}"), tokens_of(7))
            other = tokens_of(7)[:LEAVES_AT] + tokens_of(8)[LEAVES_AT:]
            out[f"{name} {kind} branch"] = _resumed(kind, Backend(name=name, directory=root / f"{name}-{kind}"), other)
        out[f"{name} flipped"] = _resumed("full", Backend(name=name, directory=root / f"{name}-flipped"), tokens_of(7))
        directory = root / f"{name}-full"
        out[f"{name} layout"] = _handed_over(Backend(name=name, directory=directory, layout="layer_first"))
        out[f"{name} dtype"] = _handed_over(Backend(name=name, directory=directory, dtype=torch.float16))
        out[f"{name} same"] = _handed_over(Backend(name=name, directory=directory))
    out["ranks"] = _refusal(root)
    return out


def _resumed(kind: str, backend: Backend, tokens: Any) -> list[object]:
    with stack(kind, backend) as made:
        return list(resume(made, tokens))


def _handed_over(backend: Backend) -> int:
    """Pages that SGLang's controller gets for the prompt, whatever their bytes are."""
    with stack("full", backend) as made:
        keys = page_keys(tokens_of(7))
        found = made.backend.batch_exists(keys)
        operation = SimpleNamespace(request_id="request", is_terminated=lambda: False)
        return made.controller.page_get_func(operation, keys[:found], torch.arange(found * PAGE)) if found else 0


def _refusal(root: Path) -> str:
    """Two ranks whose pages are alike, over a log that only one process can have open."""
    try:
        with stack(
            "mla", Backend(name="stepwell", directory=root / "ranks"), {"tp_size": 2, "attn_tp_size": 2, "moe_tp_size": 2}
        ):
            return ""
    except Exception as error:  # SGLang passes it on as it is, or in an error of its own
        return f"{type(error).__name__}: {error}"


def signatures(_: Path) -> dict[str, object]:
    """Where the stand-in of plain tests is not what SGLang is: every name it has, with its parameters, fields or members."""
    import sglang_linker_stand_in
    import sglang_stand_in
    from sglang.srt.mem_cache.unified_cache import unified_cache_linker

    wrong = []
    pairs = [(name, STORAGE, sglang_stand_in) for name in sglang_stand_in.NAMES]
    pairs += [(name, unified_cache_linker, sglang_linker_stand_in) for name in sglang_linker_stand_in.NAMES]
    for name, theirs, stand_in in pairs:
        real, ours = getattr(theirs, name), getattr(stand_in, name)
        wrong += [
            f"{name}: {ours_has} but {real_has}" for ours_has, real_has in [(_shape(ours), _shape(real))] if ours_has != real_has
        ]
        if inspect.isclass(ours) and not is_dataclass(ours) and not isinstance(ours, EnumMeta):
            for method, function in inspect.getmembers(ours, inspect.isfunction):
                there = getattr(real, method, None)
                if there is None or list(inspect.signature(function).parameters) != list(inspect.signature(there).parameters):
                    wrong.append(f"{name}.{method} is another one there")
    from sglang.srt.server_args import ServerArgs

    from stepwell.connectors.sglang import StepwellHiCache, StepwellLinker
    from stepwell.connectors.sglang.settings import READ

    started_with = ServerArgs(model_path="none")
    wrong += [f"ServerArgs has no {name}" for name in READ if not hasattr(started_with, name)]
    adapters = ((StepwellHiCache, STORAGE.HiCacheStorage), (StepwellLinker, unified_cache_linker.UnifiedCacheLinker))
    for adapter, base in adapters:
        for method, function in inspect.getmembers(base, inspect.isfunction):
            mine = getattr(adapter, method)
            if list(inspect.signature(mine).parameters) != list(inspect.signature(function).parameters):
                wrong.append(
                    f"{adapter.__name__}.{method} takes {inspect.signature(mine)}, SGLang's {inspect.signature(function)}"
                )
    return {"wrong": wrong, "abstract": sorted(name for adapter, _ in adapters for name in adapter.__abstractmethods__)}


def _shape(thing: Any) -> object:
    if isinstance(thing, EnumMeta):
        return sorted((each.name, each.value) for each in thing)
    return [(each.name, str(each.default)) for each in fields(thing)] if is_dataclass(thing) else None


DO: dict[str, Callable[[Path], dict[str, object]]] = {"save": save_all, "resume": resume_all, "signatures": signatures}

if __name__ == "__main__":
    torch.set_num_threads(1)
    sglang_copies.install()
    sys.stdout.write("\n" + json.dumps(DO[sys.argv[1]](Path(sys.argv[2]))) + "\n")
