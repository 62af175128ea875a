"""What Horovod's build needs for NCCL operations: NCCL from its Python package, and the folder of nvcc."""

from __future__ import annotations

from pathlib import Path

from environment.cuda_compiler import home_of
from environment.virtual_environment import EnvironmentProblem, VirtualEnvironment


def build_options(venv: VirtualEnvironment, nvcc: Path) -> dict[str, str]:
    return {
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_NCCL_HOME": str(nccl_home(venv)),
        "HOROVOD_NCCL_LINK": "SHARED",  # the library that torch has loaded already
        "HOROVOD_CUDA_HOME": str(home_of(nvcc)),
    }


def nccl_home(venv: VirtualEnvironment) -> Path:
    """A folder with NCCL under the names that a linker looks for: its package has libnccl.so.2 only."""
    package = venv.package_folder("nvidia/nccl")
    if package is None:
        raise EnvironmentProblem(f"nvidia-nccl-cu13 is installed, but {venv.folder} has no NCCL: remove the folder")
    home = venv.folder / "nccl"
    (home / "lib").mkdir(parents=True, exist_ok=True)
    _link(home / "include", package / "include")
    _link(home / "lib" / "libnccl.so", package / "lib" / "libnccl.so.2")
    return home


def _link(path: Path, target: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)
