"""`sgl_kernel` on a machine where there is none: every name can be imported, and raises when it is called.

Two operators that SGLang calls at the start of an engine on CPUs do nothing.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

NAME = "sgl_kernel"
VERSION = "0.4.10"
_library: list[torch.library.Library] = []  # declarations last as long as it does


class _Missing:
    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{self.__name__} is a stand-in")


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")


class _Finder:
    """Makes modules of any name below `sgl_kernel`."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name == NAME or name.startswith(f"{NAME}.") else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _Module(spec.name)
        module.__version__ = VERSION  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: ModuleType) -> None: ...


def install() -> None:
    """Before anything of SGLang's is imported."""
    sys.meta_path.append(_Finder())  # type: ignore[arg-type]  # behind everything that is installed
    library = torch.library.Library(NAME, "FRAGMENT")
    for signature in ("init_cpu_threads_env(str cpu_ids) -> ()", "initialize(int size, int rank) -> ()"):
        library.define(signature)
        library.impl(signature.partition("(")[0], lambda *_: None, "CompositeExplicitAutograd")
    _library.append(library)
