"""What a machine must bring itself: a C++ compiler, make, and Python's headers and venv module."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

# What the builds ask of the compiler: Horovod's sources C++20 (torch's headers need it), our kernels OpenMP.
_TRIAL = "#include <concepts>\n#include <omp.h>\nint main() { return omp_get_max_threads() < 1; }\n"


@dataclass(frozen=True)
class Missing:
    """One thing that is not there, and the packages that bring it."""

    what: str
    debian: str
    fedora: str


class PrerequisitesMissing(Exception):
    def __init__(self, missing: list[Missing], program: str = "make setup") -> None:
        things = "1 thing is" if len(missing) == 1 else f"{len(missing)} things are"
        debian = " ".join(dict.fromkeys(entry.debian for entry in missing))
        fedora = " ".join(dict.fromkeys(entry.fedora for entry in missing))
        super().__init__(
            "\n".join(
                [
                    f"{program} cannot go on: {things} missing on this machine.",
                    *(f"  - {entry.what}" for entry in missing),
                    f"Install what is missing, then run {program} again:",
                    f"  Debian, Ubuntu:  sudo apt-get install {debian}",
                    f"  Fedora:          sudo dnf install {fedora}",
                ]
            )
        )


def find_compiler() -> list[str] | None:
    """The C++ compiler as a command: $CXX where it is set, else the first of the usual names."""
    if chosen := shlex.split(os.environ.get("CXX", "")):
        return chosen if shutil.which(chosen[0]) else None
    return next(([path] for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)


def require(include: Path | None = None, program: str = "make setup") -> None:
    """Checks everything at once, so that a person installs everything at once.

    Args:
        include: Where Python.h must be; that of the Python which runs this, when there is no environment yet.
        program: What a person started.

    Raises:
        PrerequisitesMissing: With the commands that install what is missing.
    """
    checks = [_venv_missing() if include is None else None, _make_missing(), _compiler_missing()]
    checks.append(_headers_missing(include or Path(sysconfig.get_path("include"))))
    if missing := [entry for entry in checks if entry]:
        raise PrerequisitesMissing(missing, program)


def _python() -> str:
    return f"python{sys.version_info[0]}.{sys.version_info[1]}"


def _venv_missing() -> Missing | None:
    # Debian ships venv without ensurepip, and then `python3 -m venv` fails half-way.
    if importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip"):
        return None
    return Missing(f"Python's venv and ensurepip modules ({sys.executable})", f"{_python()}-venv", "python3-pip")


def _make_missing() -> Missing | None:
    return None if shutil.which("make") else Missing("make", "make", "make")


def _headers_missing(include: Path) -> Missing | None:
    if (include / "Python.h").exists():
        return None
    return Missing(f"Python's headers (no Python.h in {include})", f"{_python()}-dev", "python3-devel")


def _compiler_missing() -> Missing | None:
    compiler = find_compiler()
    if compiler is None:
        named = os.environ.get("CXX")
        reason = f"CXX={named} is not in PATH" if named else "none of c++, g++, clang++ is in PATH"
        return Missing(f"a C++ compiler ({reason})", "g++", "gcc-c++")
    if complaint := _try_compiler(compiler):
        what = f"a C++ compiler with C++20 and OpenMP, such as g++ 11 ({shlex.join(compiler)} says: {complaint})"
        return Missing(what, "g++", "gcc-c++")
    return None


def _try_compiler(compiler: list[str]) -> str | None:
    """Compiles and links a few lines; returns the compiler's complaint, if any."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "trial.cpp")
        source.write_text(_TRIAL)
        command = [*compiler, "-std=c++20", "-fopenmp", str(source), "-o", str(source.with_suffix(""))]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in result.stderr.splitlines() if "error" in line] or [f"status {result.returncode}"]
    return lines[0].strip() if result.returncode != 0 else None
