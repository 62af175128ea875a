"""The folder `.venv`: created, inspected and filled, here only."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .logged_command import CommandRunner, StepFailed

_HERE = Path(__file__).resolve().parent
_CUDA_WANTED = "cuda-wanted"


@dataclass(frozen=True)
class Inspection:
    """What inspect_environment.py found."""

    python: list[int]
    abi: str
    suffix: str
    include: str
    pip: str
    torch: str | None
    torch_cuda: str | None  # such as "13.0"; None for a build for CPUs
    horovod: str | None
    package: str | None
    unmet: list[str]
    tools: list[str] = field(default_factory=list)  # those of them that compiling our own modules takes


class EnvironmentProblem(Exception):
    """Something about `.venv` that only a person can decide."""


class VirtualEnvironment:
    def __init__(self, folder: Path, runner: CommandRunner) -> None:
        self.folder = folder
        self.programs = folder / "bin"
        self.python = self.programs / "python"
        # -I: packages in the caller's PYTHONPATH are not in here, whatever a probe would find.
        self._isolated = [str(self.python), "-I"]
        self._runner = runner
        # One pip at a time changes the environment, whichever thread wants it.
        self._changing = threading.Lock()
        # Present while pip works: found at the start, it means that a pip was interrupted half-way.
        self._unfinished = folder / "installation-unfinished"
        self._location = folder / "location"
        self._torch_requirement = folder / "torch-requirement"
        self._cuda_wanted = folder / _CUDA_WANTED

    def pip(self, *arguments: str) -> list[str]:
        quiet = ("--disable-pip-version-check", "--no-input")
        return [*self._isolated, "-m", "pip", arguments[0], *quiet, *arguments[1:]]

    def statement(self, python: str) -> list[str]:
        """The command that runs Python statements in it."""
        return [*self._isolated, "-c", python]

    def works(self) -> bool:
        """Whether it is where it was made, and its Python starts and has pip."""
        if self._is_moved():
            return False
        try:
            result = subprocess.run([*self._isolated, "-c", "import pip"], capture_output=True, check=False)
        except OSError:
            return False
        return result.returncode == 0

    def create(self) -> None:
        """Creates the folder, or completes one whose creation was interrupted."""
        # A link to a Python that is gone cannot be repaired in place, nor can programs that start with an old path.
        gone = self.python.is_symlink() and not self.python.exists()
        clear = ["--clear"] if gone or self._is_moved() else []
        self._runner.run([sys.executable, "-m", "venv", *clear, self.folder], phase="environment")
        self._location.write_text(str(self.folder))

    def _is_moved(self) -> bool:
        return self._location.exists() and self._location.read_text() != str(self.folder)

    def remember_cuda(self, choice: bool) -> None:
        if choice:
            self._cuda_wanted.touch()
        else:
            self._cuda_wanted.unlink(missing_ok=True)

    def package_folder(self, name: str) -> Path | None:
        """Where the files of a package are, if they are there."""
        return next(self.folder.glob(f"lib/python*/site-packages/{name}"), None)

    def inspect(self, project: Path, extras: Sequence[str], also: Sequence[str]) -> Inspection:
        command: list[str | Path] = [*self._isolated, _HERE / "inspect_environment.py", project]
        command += [f"--extra={name}" for name in extras] + [f"--also={text}" for text in also]
        if self._torch_requirement.exists():
            command.append(f"--already={self._torch_requirement.read_text()}")
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise EnvironmentProblem(f"cannot inspect {self.folder}: {result.stderr.strip()}")
        inspection = Inspection(**json.loads(result.stdout))
        if tuple(inspection.python) < (3, 10):
            found = ".".join(map(str, inspection.python))
            raise EnvironmentProblem(
                f"{self.folder} uses Python {found}, but 3.10 or newer is needed: remove the folder"
            )
        return inspection

    def install(self, requirements: Sequence[str], inspection: Inspection, *, phase: str) -> None:
        # pip 24.1 and later say how far a download is without a terminal; torch is a large one.
        progress = ["--progress-bar=raw"] if _numbers(inspection.pip) >= (24, 1) else []
        # Bytecode of all of torch and SciPy is most of a minute's work on one core; Python makes what it imports.
        self.run_pip("install", "--no-compile", *progress, *requirements, phase=phase)

    def remember_torch(self, requirement: str) -> None:
        self._torch_requirement.write_text(requirement)

    def install_wheel(self, wheel: Path) -> None:
        self.run_pip("install", "--no-deps", "--no-index", "--force-reinstall", str(wheel), phase="horovod-wheel")

    def run_pip(self, *arguments: str, phase: str, environment: Mapping[str, str] | None = None) -> None:
        """Runs a pip that changes the environment; an interruption of it is repaired at the next start."""
        with self._changing:
            self._runner.check()  # what waited for its turn may be of no use by now
            self._unfinished.touch()
            try:
                self._runner.run(self.pip(*arguments), phase=phase, environment=environment)
            except StepFailed as failure:
                # A pip that ended by itself has undone what it had begun; one that was killed has not.
                if failure.status > 0:
                    self._unfinished.unlink()
                raise
            self._unfinished.unlink()

    def repair(self, say: Callable[[str], None]) -> None:
        """Removes the records of packages of which an interrupted pip left only a part, so that they are missing."""
        if not self._unfinished.exists():
            return
        for record in self._broken_records():
            shutil.rmtree(record)
            say(f"removed {record.name}, whose installation was interrupted")
        self._unfinished.unlink()

    def _broken_records(self) -> list[Path]:
        # RECORD is the last file that pip writes, and it names all the others.
        records = self.folder.glob("lib/python*/site-packages/*.dist-info")
        return [record for record in records if not _is_complete(record)]


def remembers_cuda(folder: Path) -> bool:
    """Whether CUDA=1 was chosen last, so that `make test` undoes nothing."""
    return (folder / _CUDA_WANTED).exists()


def _is_complete(record: Path) -> bool:
    listed = record / "RECORD"
    if not listed.exists():
        return False
    names = (line.rsplit(",", 2)[0].strip('"') for line in listed.read_text(encoding="utf-8").splitlines() if line)
    return all((record.parent / name).exists() for name in names if not name.endswith(".pyc"))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
