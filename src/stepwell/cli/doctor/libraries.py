"""Which packages are there, and whether torch and the kernels see the GPU that the machine has."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from stepwell import __version__
from stepwell.base.extras import install
from stepwell.cli.doctor.finding import Finding, broken, fine, slow

EXTRAS: Mapping[str, tuple[str, ...]] = {
    "serve": ("torch", "safetensors", "tokenizers", "gguf", "jinja2", "fastapi", "pydantic", "uvicorn", "prometheus-client"),
    "guided": ("llguidance",),
    "events": ("pyzmq", "msgspec"),
    "otel": ("opentelemetry-api", "opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"),
}
_ALWAYS = ("numpy", "rich", "xxhash")
_GPU_FILES = ("proc/driver/nvidia/version", "dev/nvidiactl")


def packages() -> Iterator[Finding]:
    """One finding for what is always needed, and one for each extra. Only `serve` is broken where something is missing."""
    own = {"stepwell": __version__, "Python": platform.python_version()}
    yield fine("versions", _listed(own | {name: _version(name) or "?" for name in _ALWAYS}))
    for extra, names in EXTRAS.items():
        found = {name: _version(name) for name in names}
        there = {name: number for name, number in found.items() if number is not None}
        missing = [name for name in names if name not in there]
        if not missing:
            yield fine(extra, _listed(there))
            continue
        say = broken if extra == "serve" else slow
        yield say(extra, f"not installed: {', '.join(missing)}", install(extra))


def gpu(root: Path = Path("/")) -> Iterator[Finding]:
    """A driver that torch cannot use is broken; no driver at all is a machine without a GPU."""
    has_driver = any((root / file).exists() for file in _GPU_FILES)
    try:
        from stepwell.engine.building.gpus import gpus
    except (ImportError, OSError) as error:  # a package is missing, or a library that one is linked with
        yield broken("CUDA", f"torch cannot be asked: {error}", install("serve"))
        return
    seen = gpus()
    if not seen.names:
        if not has_driver:
            yield fine("CUDA", "no NVIDIA driver here: models run on the CPU")
            return
        what = "torch was built without CUDA" if seen.cuda is None else f"torch (CUDA {seen.cuda}) sees no GPU"
        yield broken("CUDA", what, "install a torch for the driver's CUDA version; in a container, pass the GPU (--gpus all)")
        return
    yield fine("CUDA", f"{', '.join(seen.names)}; CUDA {seen.cuda}")
    yield _kernels()


def _kernels() -> Finding:
    found = {name: _version(name) for name in ("triton", "flashinfer-python", "fla-core")}
    missing = [name for name, number in found.items() if number is None]
    if shutil.which("nvcc") is None and find_spec("flashinfer_jit_cache") is None:
        missing.append("nvcc")
    if missing:
        change = f"{install('cuda')}, and have CUDA's compiler (nvcc) on the path"
        return slow("kernels", f"not there: {', '.join(missing)}; plain torch runs in their place", change)
    return fine("kernels", _listed({name: number or "?" for name, number in found.items()}))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in versions.items())
