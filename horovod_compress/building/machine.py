"""What this machine has: cores and memory for compilers, and perhaps a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

_BYTES_PER_COMPILER = 1 << 30
MOST_SECONDS = 10


def parallel_jobs(environment: Mapping[str, str]) -> int:
    """As many compilers as there are cores, and memory for.

    HVC_JOBS, which is JOBS of the Makefile, wins.
    """
    chosen = environment.get("HVC_JOBS", "")
    return int(chosen) if chosen else max(1, min(len(os.sched_getaffinity(0)), _compilers_in_memory()))


def jobs_beside(others: int, environment: Mapping[str, str]) -> int:
    """Compilers that may run beside that many others: cores are shared, memory is not."""
    if environment.get("HVC_JOBS"):
        return 1
    return max(1, min(parallel_jobs(environment), _compilers_in_memory() - others))


def _compilers_in_memory() -> int:
    """A gigabyte each, and another for the one that has torch's headers to read."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _BYTES_PER_COMPILER - 1


def wants_cuda_kernels(environment: Mapping[str, str]) -> bool:
    """As setup.py decides it, apart from whether there is an nvcc."""
    choice = environment.get("HVC_CUDA", "")
    return choice == "1" or (choice != "0" and has_gpu())


def has_gpu(devices: Path = Path("/dev")) -> bool:
    """Whether there is an NVIDIA GPU: one of its device files, or one that nvidia-smi lists (as in WSL)."""
    if any(devices.glob("nvidia[0-9]*")):
        return True
    program = shutil.which("nvidia-smi")
    if program is None:
        return False
    try:
        listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=MOST_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and "GPU 0:" in listed.stdout
