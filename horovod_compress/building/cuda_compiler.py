"""Finds nvcc; NVIDIA publishes one of CUDA 13 as packages for Python, for machines without."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from .virtual_environment import EnvironmentProblem, VirtualEnvironment

# The release where torch says nothing of CUDA 13: the oldest, which asks least of a driver (580 or newer).
_RELEASE = "13.0"
# NVIDIA's list of what belongs together. nvcc is not all: cicc is in nvvm, its own headers in crt, the runtime's
# headers and libcudart_static.a in cudart, and CUB in cccl.
_PARTS = "nvcc,nvvm,crt,cudart,cccl"
# One file of each, as in setup.py: a compiler that came alone, for somebody else, builds nothing of ours.
_FILES = (
    "bin/nvcc",
    "nvvm/bin/cicc",
    "include/crt/host_config.h",
    "lib/libcudart_static.a",
    "include/cccl/cub/cub.cuh",
)


def find_nvcc(environment: Mapping[str, str], venv: VirtualEnvironment) -> Path | None:
    """As setup.py looks for it: the machine's, or the one in `venv`."""
    return find_on_machine(environment) or find_in(venv)


def find_on_machine(environment: Mapping[str, str]) -> Path | None:
    home, path = environment.get("CUDA_HOME"), environment.get("PATH")
    names = (environment.get("CUDACXX"), home and f"{home}/bin/nvcc", "nvcc", "/usr/local/cuda/bin/nvcc")
    return next((Path(found) for name in names if name and (found := shutil.which(name, path=path))), None)


def release_of(nvcc: Path) -> str | None:
    """Such as "13.0"; None where it does not say."""
    result = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"release (\d+\.\d+)", result.stdout)
    return found[1] if found else None


def suits(nvcc: Path, torch_cuda: str | None) -> bool:
    """Whether it is of the major release of CUDA that torch was built for; true where either does not say."""
    release = release_of(nvcc)
    return not (release and torch_cuda) or release.split(".")[0] == torch_cuda.split(".")[0]


def find_in(venv: VirtualEnvironment) -> Path | None:
    home = venv.package_folder("nvidia/cu13")
    return home / _FILES[0] if home and all((home / name).exists() for name in _FILES) else None


def requirement(torch_cuda: str | None) -> str:
    """The packages of nvcc, of the release that torch was built with: both want the same headers, in one folder.

    For CUDA 12 NVIDIA's packages have everything but nvcc itself.
    """
    release = torch_cuda if torch_cuda and torch_cuda.startswith("13.") else _RELEASE
    return f"cuda-toolkit[{_PARTS}]=={release}.*"


def home_of(nvcc: Path) -> Path:
    """The folder that an nvcc takes its headers and libraries from; it may be a script that starts another.

    Raises:
        EnvironmentProblem: It does not say.
    """
    command = [str(nvcc), "--dryrun", "-x", "cu", "-c", "/dev/null", "-o", "/dev/null"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"^#\$ TOP=(.+)$", result.stderr, re.MULTILINE)
    if found is None:
        raise EnvironmentProblem(f"{nvcc} does not say where its headers are: {result.stderr.strip()[:200]}")
    return Path(found[1]).resolve()
