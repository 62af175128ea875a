"""Finds a CMake that can build Horovod; PyPI has one for machines without."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from .virtual_environment import VirtualEnvironment

_OLDEST = (3, 18)


def find_cmake(venv: VirtualEnvironment) -> Path:
    """The system's CMake, or the one in `venv`, where it is installed if need be."""
    candidates = [shutil.which("cmake"), str(venv.programs / "cmake")]
    for candidate in candidates:
        if candidate and (cmake_version(candidate) or (0, 0)) >= _OLDEST:
            return Path(candidate)
    # Kept in the environment, so that a second build for another torch finds it.
    venv.run_pip("install", "cmake", phase="cmake")
    return venv.programs / "cmake"


def cmake_version(program: str) -> tuple[int, int] | None:
    try:
        text = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return None
    match = re.search(r"version\s+(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None
