"""Compiles and links all CUDA kernels for one architecture, so that they keep compiling where there is no GPU.

Every warning is an error. Nothing is installed: objects are kept in build/objects, the module in build/cuda-compile.
A second run compiles what changed. Without nvcc it says so and succeeds; HVC_CUDA=1 makes that a failure.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from cuda_report import STRICT, flags, target_flags

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "build" / "cuda-compile" / "_cuda.so"

_NO_COMPILER = """\
CUDA kernels were not compiled: no nvcc on this machine, in .venv, or where CUDACXX and CUDA_HOME point.
make setup CUDA=1 installs NVIDIA's into .venv; no GPU is needed."""


def toolchain(setup: ModuleType, nvcc: str, architecture: str) -> Any:
    """That of setup.py, for one architecture and with warnings as errors."""
    compile_flags = (*setup.CUDA_FLAGS, *STRICT, *target_flags([architecture]), *setup.include_flags())
    link_flags = (*setup.CUDA_LINK_FLAGS, *setup.library_flags(nvcc))
    return setup.Toolchain((nvcc,), compile_flags, link_flags)


def compile_module(setup: ModuleType, nvcc: str, architecture: str, jobs: int) -> None:
    """Compiles every source and links them.

    Raises:
        CompileError: One of them gives a warning or an error.
    """
    tools = toolchain(setup, nvcc, architecture)
    files = [setup.ObjectFile(source, tools) for source in setup.sources("bind_cuda.cpp", "cuda/*.cu")]
    objects = setup.compile_all(files, jobs)
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    setup.run([nvcc, "-shared", *objects, *tools.link_flags, "-o", str(TARGET)], what="_cuda")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", default="90", metavar="NUMBER", help="compute capability without the point")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilations at a time")
    options, setup = parser.parse_args(arguments), flags()
    nvcc = setup.find_nvcc()
    if nvcc is None:
        insists = os.environ.get("HVC_CUDA") == "1"
        print(_NO_COMPILER, file=sys.stderr if insists else sys.stdout)
        return 1 if insists else 0
    try:
        compile_module(setup, nvcc, options.arch, options.jobs)
    except setup.CompileError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"All CUDA kernels compile for sm_{options.arch} without a warning ({nvcc}).")
    return 0


if __name__ == "__main__":
    sys.exit(main())
