"""Installs this package in place, and again whenever its compiled modules would come out differently."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from environment.prerequisites import find_compiler
from environment.virtual_environment import Inspection, VirtualEnvironment

_VARIABLES = ("HVC_CUDA", "HVC_SANITIZE", "CXX", "CXXFLAGS", "LDFLAGS", "CUDACXX", "CUDA_HOME")


class PackageInstall:
    def __init__(self, root: Path, venv: VirtualEnvironment, inspection: Inspection) -> None:
        self._root = root
        self._venv = venv
        self._inspection = inspection
        # Beside the modules it describes, and one per Python, as they are.
        self._stamp = root / "build" / f"modules{inspection.suffix}.fingerprint"

    def is_current(self) -> bool:
        module = self._root / "horovod_compress" / f"_cpu{self._inspection.suffix}"
        if self._inspection.package is None or not module.exists() or not self._stamp.exists():
            return False
        return self._stamp.read_text() == self.fingerprint()

    def install(self) -> None:
        # The stamp goes first: what is interrupted now has to be done again.
        fingerprint = self.fingerprint()
        self._stamp.unlink(missing_ok=True)
        arguments = ("-v", "--no-build-isolation", "--no-deps", "--no-index", "--editable", str(self._root))
        self._venv.run_pip("install", *arguments, title="Compiling and installing horovod-compress")
        self._stamp.parent.mkdir(exist_ok=True)
        self._stamp.write_text(fingerprint)

    def fingerprint(self) -> str:
        """A digest of every source, setting and compiler that the modules are made from.

        Contents and not times: a checkout, a copy or a branch switched to and fro must neither be missed nor rebuilt.
        """
        digest = hashlib.sha256()
        for part in self._parts():
            digest.update(part + b"\0")
        return digest.hexdigest()

    def _parts(self) -> Iterator[bytes]:
        for path in [self._root / "setup.py", self._root / "pyproject.toml", *sorted(self._sources())]:
            yield str(path.relative_to(self._root)).encode()
            yield path.read_bytes()
        for name in _VARIABLES:
            yield f"{name}={os.environ.get(name, '')}".encode()
        yield _version(find_compiler())
        yield _version(_find_nvcc())

    def _sources(self) -> Iterator[Path]:
        return (path for path in (self._root / "csrc").rglob("*") if path.is_file())


def _find_nvcc() -> list[str] | None:
    """As setup.py looks for it."""
    home = os.environ.get("CUDA_HOME")
    names = (os.environ.get("CUDACXX"), home and f"{home}/bin/nvcc", "nvcc", "/usr/local/cuda/bin/nvcc")
    return next(([found] for name in names if name and (found := shutil.which(name))), None)


def _version(command: list[str] | None) -> bytes:
    if command is None:
        return b"none"
    return subprocess.run([*command, "--version"], capture_output=True).stdout
