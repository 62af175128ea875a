"""Finds the compiled kernels, or says what to do when they are missing."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

from ..errors import ConfigError

_REMEDY = {
    "_cpu": "build it with `make setup` or `pip install -e .` (needs a C++17 compiler), "
    "or set HVC_KERNELS=reference to use the slow NumPy kernels",
    "_cuda": "build it with `make setup CUDA=1`, or install again with nvcc and HVC_CUDA=1, "
    "or move the tensors to the CPU",
}
_CHOICES = ("", "cpu", "reference")


def choice() -> str:
    """Return the override in ``HVC_KERNELS``: "", "cpu" or "reference".

    Raises:
        ConfigError: the variable holds something else.
    """
    value = os.environ.get("HVC_KERNELS", "")
    if value not in _CHOICES:
        raise ConfigError(f"HVC_KERNELS must be one of cpu, reference or unset, got {value!r}")
    return value


def load(name: str) -> ModuleType:
    """Import the extension ``_cpu`` or ``_cuda`` of this package.

    Raises:
        ImportError: it is missing or does not load; the text says what to run.
        ConfigError: ``HVC_ISA`` asks for an instruction set that cannot be had.
    """
    package = __package__.rpartition(".")[0]
    try:
        module = importlib.import_module(f"{package}.{name}")
    except ImportError as error:
        raise ImportError(
            f"the compiled extension {package}.{name} does not load ({error}); {_REMEDY[name]}",
            name=f"{package}.{name}",
        ) from error
    if name == "_cpu":
        _check_instruction_set(module.instruction_set())
    return module


def _check_instruction_set(chosen: str) -> None:
    wanted = os.environ.get("HVC_ISA", "")
    if wanted not in ("", chosen):
        raise ConfigError(
            f"HVC_ISA={wanted!r}, but this processor runs {chosen!r}; leave it unset or choose generic, avx2 or "
            "avx512, and no more than the processor supports"
        )
