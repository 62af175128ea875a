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


def chosen_architectures(setup: ModuleType, nvcc: str, asked: str) -> tuple[int, ...]:
    """Return what --arch asks for.

    Raises:
        CompileError: not for what this nvcc knows.
    """
    known: tuple[int, ...] = setup.known_architectures(nvcc, setup.CUDA_ARCHITECTURES)
    chosen = tuple(number for number in known if asked == "all" or str(number) in asked.split(","))
    if not chosen or (asked != "all" and len(chosen) < len(asked.split(","))):
        raise setup.CompileError(f"--arch is {asked!r}: expected all or some of {known}, separated by commas")
    return chosen


def compile_module(setup: ModuleType, nvcc: str, architectures: Sequence[int], jobs: int) -> list[Any]:
    """Compile every source, link them, and return the objects.

    Raises:
        CompileError: one of them gives a warning or an error.
    """
    plain = setup.cuda_toolchain(nvcc, architectures)
    strict = setup.Toolchain((nvcc,), (*plain.compile_flags, *STRICT, setup.TELL_USAGE), plain.link_flags)
    files = [setup.ObjectFile(source, strict) for source in setup.sources("bind_cuda.cpp", "cuda/*.cu")]
    objects = setup.compile_all(files, jobs)
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    setup.run([nvcc, "-shared", *objects, *strict.link_flags, "-o", str(TARGET)], what="_cuda")
    return files


def kernels(setup: ModuleType, files: Sequence[Any]) -> list[Usage]:
    """Return what the kernels of all objects use.

    Raises:
        CompileError: nvcc does not tell it of all of them.
    """
    found = []
    for file in files:
        said, wide = file.said(), wide_kernels((ROOT / file.source).read_text())
        mine = usages(said, wide)
        if len(mine) != said.count("Compiling entry function") or (file.source.endswith(".cu") and not mine):
            raise setup.CompileError(f"{file.source}: what nvcc says of its kernels was not understood:\n{said[:500]}")
        found += mine
    return found


def report(found: Sequence[Usage]) -> int:
    """Say what kernels use; return 1 if any is unfit."""
    print(summary(found))
    unfit = [usage for usage in found if usage.wasteful or usage.too_large]
    if unfit:
        what = "kernel(s) spill registers, use local memory, or are too large for a block"
        print(f"{table(unfit)}\n{len(unfit)} {what}", file=sys.stderr)
    return 1 if unfit else 0


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
    try:
        architectures = chosen_architectures(setup, nvcc, options.arch)
        status = report(kernels(setup, compile_module(setup, nvcc, architectures, options.jobs)))
    except setup.CompileError as error:
        print(error, file=sys.stderr)
        return 1
    if not status:
        compiled = ", ".join(f"sm_{number}" for number in architectures)
        print(f"All CUDA kernels compile for {compiled} without a warning, a spill or local memory ({nvcc}).")
    return status


if __name__ == "__main__":
    sys.exit(main())
