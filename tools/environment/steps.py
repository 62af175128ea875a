"""The order of the steps. Each looks first whether there is anything to do, so a second run is over at once."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from environment import cuda_compiler, gpu_operations, prerequisites
from environment.file_lock import file_lock
from environment.horovod_wheel import NEEDS, HorovodWheel, collect_facts
from environment.logged_command import CommandRunner, StepFailed
from environment.package_install import PackageInstall
from environment.prerequisites import PrerequisitesMissing
from environment.progress import clock_text
from environment.virtual_environment import EnvironmentProblem, Inspection, VirtualEnvironment
from environment.wheel_cache import WheelCache, default_folder

ROOT = Path(__file__).resolve().parents[2]

_CPU_TORCH = """\
torch {torch} is a build for CPUs, so Horovod was built without GPU operations. horovod-compress does not need them,
but gradients on a GPU need a torch with CUDA:  make setup CUDA=1 TORCH=..."""


@dataclass
class Setup:
    """One run of `make setup`."""

    venv: VirtualEnvironment
    runner: CommandRunner
    torch: str
    extras: list[str]
    cuda: bool | None = None  # as chosen now; None: as chosen last
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    machine_checked: bool = False
    _compiler: list[str] = field(default_factory=list)

    def run(self) -> bool:
        """Brings everything up to date; returns whether anything had to be done."""
        if self.cuda is None:
            self.cuda = self.venv.remembers_cuda()
        if not self.venv.works():
            self.check_machine(None)
            self.venv.create()
        self.venv.repair()
        inspection = self.install_requirements(self.inspect())
        if self.cuda:
            inspection = self.install_cuda(inspection)
        self.install_horovod(inspection)
        self.install_package(inspection)
        self.venv.remember_cuda(self.cuda)  # not before all of it is there: a set-up that failed is not tried for ever
        if self.cuda and self.machine_checked and not inspection.torch_cuda:
            print(_CPU_TORCH.format(torch=inspection.torch), flush=True)
        return self.machine_checked

    def inspect(self) -> Inspection:
        return self.venv.inspect(ROOT / "pyproject.toml", self.extras, [self.torch, *NEEDS, *self._compiler])

    def check_machine(self, inspection: Inspection | None) -> None:
        """Before the first step that does something, so that nobody waits for a download only to miss a compiler."""
        if not self.machine_checked:
            prerequisites.require(Path(inspection.include) if inspection else None)
            self.machine_checked = True

    def install_requirements(self, inspection: Inspection) -> Inspection:
        if not inspection.unmet:
            return inspection
        self.check_machine(inspection)
        self.venv.install(inspection.unmet, inspection, self.torch)
        return self.inspect()

    def install_cuda(self, inspection: Inspection) -> Inspection:
        """CuPy, NCCL and, where the machine has no nvcc, NVIDIA's: after torch, because they follow its CUDA."""
        self.environment = _cuda_environment(self.environment, inspection)
        self.extras = list(dict.fromkeys([*self.extras, "cuda"]))
        if nvcc := cuda_compiler.find_on_machine(self.environment):
            _check_release(nvcc, inspection)
        else:
            self._compiler = [cuda_compiler.requirement(inspection.torch_cuda)]
        return self.install_requirements(self.inspect())

    def install_horovod(self, inspection: Inspection) -> None:
        environment = self.horovod_environment(inspection)
        facts = collect_facts(inspection, environment)
        installed = self.venv.folder / "horovod-wheel"
        if inspection.horovod and installed.exists() and installed.read_text() == facts.key():
            return
        self.check_machine(inspection)
        installed.unlink(missing_ok=True)
        cache = WheelCache(default_folder())
        wheel, is_new = HorovodWheel(cache, self.venv, self.runner, facts, environment).get()
        self.venv.install_wheel(wheel)
        if not self.venv.runs("import torch; from horovod.torch import mpi_lib_v2"):
            cache.discard(facts.key())
            again = "" if is_new else " It came from the cache and was removed there: run make setup again."
            raise EnvironmentProblem(f"{wheel.name} was installed, but Horovod's library does not load.{again}")
        installed.write_text(facts.key())

    def horovod_environment(self, inspection: Inspection) -> Mapping[str, str]:
        """With NCCL operations where CUDA=1 and a torch with CUDA ask for them; what the user says of them wins."""
        nvcc = cuda_compiler.find_nvcc(self.environment, self.venv)
        if not (self.cuda and inspection.torch_cuda and nvcc):
            return self.environment
        variables = gpu_operations.build_variables(self.venv, nvcc, self.environment)
        return {**variables, **self.environment, "LIBRARY_PATH": variables["LIBRARY_PATH"]}

    def install_package(self, inspection: Inspection) -> None:
        package = PackageInstall(ROOT, self.venv, inspection, self.environment)
        if not package.is_current():
            self.check_machine(inspection)
            package.install()


def _cuda_environment(environment: Mapping[str, str], inspection: Inspection) -> dict[str, str]:
    """The environment of what is built with CUDA=1.

    Raises:
        EnvironmentProblem: Something else that was asked for excludes it.
    """
    if environment.get("HVC_CUDA") == "0":
        raise EnvironmentProblem(
            "CUDA=1 asks for the CUDA kernels and HVC_CUDA=0 forbids them: leave one of them out\n"
            "(where CUDA=1 was given to an earlier make setup:  make setup CUDA=0)"
        )
    if inspection.torch_cuda and not inspection.torch_cuda.startswith("13."):
        raise EnvironmentProblem(
            f"torch {inspection.torch} is built for CUDA {inspection.torch_cuda}, and CUDA=1 installs packages of "
            "CUDA 13:\nchoose a torch for CUDA 13 with TORCH=, or go without:  make setup CUDA=0"
        )
    return {**environment, "HVC_CUDA": "1"}


def _check_release(nvcc: Path, inspection: Inspection) -> None:
    """Refuse a compiler with which Horovod would be built for another CUDA than torch.

    Raises:
        EnvironmentProblem: It is of another major release.
    """
    release, wanted = cuda_compiler.release_of(nvcc), inspection.torch_cuda
    if release and wanted and release.split(".")[0] != wanted.split(".")[0]:
        raise EnvironmentProblem(
            f"{nvcc} is of CUDA {release}, and torch {inspection.torch} is built for CUDA {wanted}:\n"
            "set CUDACXX to an nvcc of the same major release, or go without:  make setup CUDA=0"
        )


def run_from_command_line(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    started = time.monotonic()
    try:
        with file_lock(ROOT / "build" / "setup.lock", "working in this folder"):
            did_something = _setup(options).run()
    except (PrerequisitesMissing, StepFailed, EnvironmentProblem) as problem:
        print(f"\n{problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nmake setup was interrupted; run it again to go on from there.", file=sys.stderr)
        return 130
    if did_something:
        print(f"Ready after {clock_text(time.monotonic() - started)}: everything is in {options.venv}")
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--torch", default="torch==2.13.0", help="a requirement of pip's: version, path or address")
    parser.add_argument("--extras", default="test,demo,plot", help="extras of pyproject.toml, separated by commas")
    parser.add_argument("--cuda", default="", help="1: CuPy, NCCL and CUDA kernels, also later on; 0: no more")
    options = parser.parse_args(arguments)
    if options.cuda not in ("", "0", "1"):
        parser.error(f"CUDA is {options.cuda!r}: expected 1, 0 or nothing, as in  make setup CUDA=")
    return options


def _setup(options: argparse.Namespace) -> Setup:
    runner = CommandRunner(ROOT / "build" / "setup.log")
    extras = [name for name in options.extras.replace(",", " ").split() if name]
    cuda = None if options.cuda == "" else options.cuda == "1"
    return Setup(VirtualEnvironment(options.venv, runner), runner, options.torch, extras, cuda)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
