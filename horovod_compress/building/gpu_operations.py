"""What Horovod's build needs for NCCL operations: NCCL from its Python package, nvcc, and where their libraries are."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from . import cuda_compiler
from .virtual_environment import EnvironmentProblem, VirtualEnvironment


def build_variables(venv: VirtualEnvironment, nvcc: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Horovod's build options, and the variables by which torch, CMake and linkers find the same."""
    home, links = str(cuda_compiler.home_of(nvcc)), link_folder(venv, nvcc)
    libraries = str(links / "lib")
    return {
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_NCCL_HOME": str(links),
        "HOROVOD_NCCL_LINK": "SHARED",  # the library that torch has loaded already
        "HOROVOD_CUDA_HOME": home,
        "CUDA_HOME": home,
        "CMAKE_LIBRARY_PATH": libraries,
        "LIBRARY_PATH": os.pathsep.join(filter(None, (libraries, environment.get("LIBRARY_PATH")))),
    }


def link_folder(venv: VirtualEnvironment, nvcc: Path) -> Path:
    """A folder in which linkers find NVIDIA's packages: those have libraries with a number only, and no lib64."""
    nccl = venv.package_folder("nvidia/nccl")
    if nccl is None:
        raise EnvironmentProblem(f"nvidia-nccl-cu13 is installed, but {venv.folder} has no NCCL: remove the folder")
    home = venv.folder / "gpu-links"
    (home / "lib").mkdir(parents=True, exist_ok=True)
    _link(home / "include", nccl / "include")
    for library in _libraries(nccl, nvcc, packaged=nvcc == cuda_compiler.find_in(venv)):
        name, _, _ = library.name.partition(".so")
        _link(home / "lib" / (name if name.endswith(".a") else f"{name}.so"), library)
    return home


def _libraries(nccl: Path, nvcc: Path, *, packaged: bool) -> Iterator[Path]:
    """NCCL, and the CUDA runtime of a packaged nvcc; the machine's knows where its own is."""
    yield from (nccl / "lib").glob("libnccl.so.*")
    if packaged:
        yield from (nvcc.parents[1] / "lib").glob("libcud*")


def _link(path: Path, target: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)
