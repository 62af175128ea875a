"""Compiles and links all CUDA kernels, so that they stay fit for GPUs where there is none.

Every warning is an error, and so is a kernel that spills registers, keeps arrays in local memory, or is too large for
its block. Nothing is installed: objects are kept in build/objects, the module in build/cuda-compile. A second run
compiles what changed. Without nvcc it says so and succeeds; HVC_CUDA=1 makes that a failure.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from cuda_usage import Usage, summary, table, usages, wide_kernels

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "build" / "cuda-compile" / "_cuda.so"
STRICT = ("-Werror=all-warnings", "-Xcompiler=-Werror")

_NO_COMPILER = """\
CUDA kernels were not compiled: no nvcc on this machine, in .venv, or where CUDACXX and CUDA_HOME point.
make setup CUDA=1 installs NVIDIA's into .venv; no GPU is needed."""


def flags() -> ModuleType:
    """Return setup.py as a module: the one place where compilers and flags are chosen."""
    spec = importlib.util.spec_from_file_location("hvc_setup", ROOT / "setup.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def toolchain(setup: ModuleType, nvcc: str) -> Any:
    """That of setup.py, with warnings as errors."""
    tools = setup.cuda_toolchain(nvcc)
    return setup.Toolchain((nvcc,), (*tools.compile_flags, *STRICT, setup.TELL_USAGE), tools.link_flags)


def compile_module(setup: ModuleType, nvcc: str, jobs: int) -> list[Any]:
    """Compile every source, link them, and return the objects.

    Raises:
        CompileError: one of them gives a warning or an error.
    """
    tools = toolchain(setup, nvcc)
    files = [setup.ObjectFile(source, tools) for source in setup.sources("bind_cuda.cpp", "cuda/*.cu")]
    objects = setup.compile_all(files, jobs)
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    setup.run([nvcc, "-shared", *objects, *tools.link_flags, "-o", str(TARGET)], what="_cuda")
    return files


def kernels(files: Sequence[Any]) -> list[Usage]:
    """Return what the kernels of all objects use."""
    found = []
    for file in files:
        found += usages(file.said(), wide_kernels((ROOT / file.source).read_text()))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="90", metavar="NUMBERS", help="such as 80,90 (default: 90), or all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilations at a time")
    options, setup = parser.parse_args(arguments), flags()
    nvcc = setup.find_nvcc()
    if nvcc is None:
        insists = os.environ.get("HVC_CUDA") == "1"
        print(_NO_COMPILER, file=sys.stderr if insists else sys.stdout)
        return 1 if insists else 0
    os.environ["HVC_CUDA_ARCH"] = "" if options.arch == "all" else options.arch
    try:
        found = kernels(compile_module(setup, nvcc, options.jobs))
    except setup.CompileError as error:
        print(error, file=sys.stderr)
        return 1
    print(summary(found))
    if unfit := [usage for usage in found if usage.wasteful or usage.too_large]:
        print(f"{table(unfit)}\n{len(unfit)} kernel(s) spill or are too large for a block", file=sys.stderr)
        return 1
    chosen = ", ".join(f"sm_{number}" for number in setup.cuda_architectures())
    print(f"All CUDA kernels compile for {chosen} without a warning, a spill or local memory ({nvcc}).")
    return 0


if __name__ == "__main__":
    sys.exit(main())
