"""Installs this package in place, and again whenever its compiled modules would come out differently."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from horovod_compress.building.cuda_compiler import find_nvcc
from horovod_compress.building.logged_command import CommandRunner
from horovod_compress.building.machine import jobs_beside, parallel_jobs, wants_cuda_kernels
from horovod_compress.building.prerequisites import find_compiler
from horovod_compress.building.virtual_environment import Inspection, VirtualEnvironment

_VARIABLES = ("HVC_CUDA", "HVC_CUDA_ARCH", "HVC_SANITIZE", "CXX", "CXXFLAGS", "LDFLAGS", "CUDACXX", "CUDA_HOME")


class PackageInstall:
    def __init__(
        self,
        root: Path,
        venv: VirtualEnvironment,
        runner: CommandRunner,
        inspection: Inspection,
        environment: Mapping[str, str],
    ) -> None:
        self._root = root
        self._environment = environment
        self._runner = runner
        self._venv = venv
        self._inspection = inspection
        # Beside the modules it describes, and one per Python, as they are.
        self._stamp = root / "build" / f"modules{inspection.suffix}.fingerprint"

    def is_current(self) -> bool:
        module = self._root / "horovod_compress" / f"_cpu{self._inspection.suffix}"
        if self._inspection.package is None or not module.exists() or not self._stamp.exists():
            return False
        return self._stamp.read_text() == self.fingerprint()

    def compile(self, *, phase: str, environment: Mapping[str, str]) -> None:
        """Compiles the objects into build/, where `install` finds them; this leaves the environment alone.

        At low priority, because Horovod is built meanwhile: its build takes longer, and what it leaves is enough.
        """
        politely = ("nice", "-n", "10") if shutil.which("nice") else ()
        jobs = jobs_beside(parallel_jobs(self._environment), self._environment)
        command = [*politely, str(self._venv.python), "setup.py", "build_ext", f"--parallel={jobs}"]
        self._runner.run(command, phase=phase, environment=environment, folder=self._root)

    def install(self) -> None:
        # The stamp goes first: what is interrupted now has to be done again.
        fingerprint = self.fingerprint()
        self._stamp.unlink(missing_ok=True)
        arguments = ("-v", "--no-build-isolation", "--no-deps", "--no-index", "--editable", str(self._root))
        self._venv.run_pip("install", *arguments, phase="package", environment=self._environment)
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
            yield f"{name}={self._environment.get(name, '')}".encode()
        yield _version(find_compiler())
        yield from self._cuda_parts()

    def _cuda_parts(self) -> Iterator[bytes]:
        """Whether there is to be a `_cuda`, and with which compiler."""
        wanted = wants_cuda_kernels(self._environment)
        nvcc = find_nvcc(self._environment, self._venv) if wanted else None
        yield _version([str(nvcc)] if nvcc else None)

    def _sources(self) -> Iterator[Path]:
        return (path for path in (self._root / "csrc").rglob("*") if path.is_file())


def _version(command: list[str] | None) -> bytes:
    if command is None:
        return b"none"
    return subprocess.run([*command, "--version"], capture_output=True, check=False).stdout
