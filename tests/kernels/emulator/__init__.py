"""Builds the CUDA kernels for the CPU, as a module like ``_cuda``, to run them where there is no GPU."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import ModuleType

import pybind11

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
CSRC = ROOT / "csrc"
BUILD = ROOT / "build" / "emulated"
#: Grids have three blocks at most: so every kernel's loop goes round in tensors of some thousand elements. Selections
#: look at samples of these, too.
GRID = ("-DHVC_MOST_BLOCKS=3", "-DHVC_SAMPLE=4096", "-DHVC_LEAST_SAMPLED=16384")
LANGUAGE = ("-std=c++17", "-x", "c++")
FLAGS = ("-O1", *LANGUAGE, "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-U_FORTIFY_SOURCE", *GRID)
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-unused-function")
FOLDERS = (HERE / "include", CSRC, Path(pybind11.get_include()), Path(sysconfig.get_path("include")))


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "") or "c++")


def sources() -> list[Path]:
    return [HERE / "emulator.cpp", CSRC / "bind_cuda.cpp", *sorted((CSRC / "cuda").glob("*.cu"))]


def headers() -> list[Path]:
    folders = (CSRC, HERE / "include")
    return sorted(path for folder in folders for path in folder.rglob("*.*") if path.suffix in (".h", ".cuh"))


def compiled(source: Path, common: str) -> Path:
    """Return the object of a source, made again only where its contents or a header's have changed."""
    digest = hashlib.sha256(common.encode() + source.read_bytes()).hexdigest()[:16]
    target = BUILD / f"{source.name}.{digest}.o"
    if not target.exists():
        made = target.with_suffix(f".{os.getpid()}")
        includes = [f"-I{folder}" for folder in FOLDERS]
        run([*FLAGS, *WARNINGS, *includes, "-c", str(source), "-o", str(made)])
        made.replace(target)
    return target


def run(arguments: list[str]) -> None:
    done = subprocess.run([str(compiler()), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def build() -> Path:
    """Return the module's path."""
    BUILD.mkdir(parents=True, exist_ok=True)
    common = repr(FLAGS) + "".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in headers())
    with ThreadPoolExecutor(max_workers=int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) as pool:
        objects = list(pool.map(lambda source: compiled(source, common), sources()))
    digest = hashlib.sha256("".join(path.name for path in objects).encode()).hexdigest()[:16]
    target = BUILD / digest / "_cuda.so"
    if not target.exists():
        target.parent.mkdir(exist_ok=True)
        made = target.with_suffix(f".{os.getpid()}")
        run(["-shared", *map(str, objects), "-o", str(made)])
        made.replace(target)
    return target


@cache
def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("_cuda", build())
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def program(text: str, folder: Path) -> Path:
    """Compile a program with kernels in it."""
    (folder / "program.cu").write_text(text)
    made = folder / "program"
    includes = [f"-I{path}" for path in FOLDERS]
    run([*FLAGS, *WARNINGS, *includes, str(folder / "program.cu"), str(HERE / "emulator.cpp"), "-o", str(made)])
    return made


def order(number: int) -> None:
    """Choose the order of threads and blocks: 0 forwards, 1 backwards, more at random."""
    ctypes.CDLL(str(build())).emulator_order(number)


def started() -> tuple[int, int]:
    """Return how many kernels were started so far, and how many memsets."""
    library = ctypes.CDLL(str(build()))
    library.emulator_launches.restype = library.emulator_memsets.restype = ctypes.c_long
    return library.emulator_launches(), library.emulator_memsets()
