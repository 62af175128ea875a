"""The order of the steps. Each looks first whether there is anything to do, so a second run is over at once.

Two lanes run side by side once `.venv` exists: packages and Horovod in one, our own modules, which need neither, in the
other. The second has low priority and takes what the first leaves of the cores.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType

from environment.lanes import side_by_side
from environment.package_install import PackageInstall
from horovod_compress.building import cuda_compiler, prerequisites
from horovod_compress.building.advice import FULL_DISK, PERMISSION
from horovod_compress.building.bar import Bar, Phase
from horovod_compress.building.file_lock import file_lock
from horovod_compress.building.horovod_install import HOROVOD_PHASES, HorovodInstall, with_gpu_operations
from horovod_compress.building.horovod_wheel import NEEDS
from horovod_compress.building.logged_command import CommandRunner, StepFailed
from horovod_compress.building.machine import parallel_jobs, wants_cuda_kernels
from horovod_compress.building.prerequisites import PrerequisitesMissing
from horovod_compress.building.virtual_environment import (
    EnvironmentProblem,
    Inspection,
    VirtualEnvironment,
    remembers_cuda,
)

ROOT = Path(__file__).resolve().parents[2]

_OF_THE_SYSTEM = {
    errno.ENOSPC: FULL_DISK,
    errno.EDQUOT: FULL_DISK,
    errno.EACCES: PERMISSION,
    errno.EPERM: PERMISSION,
}
_CPU_TORCH = """\
torch {torch} is a build for CPUs, so Horovod was built without GPU operations. horovod-compress does not need them,
but gradients on a GPU need a torch with CUDA:  make setup CUDA=1 TORCH=..."""

# With the seconds that each takes on two idle cores: the shares of the bar.
PHASES = (
    Phase("environment", "creating .venv", 6),
    Phase("tools", "installing build tools", 4),
    Phase("packages", "installing packages", 60),
    *HOROVOD_PHASES,
    Phase("kernels", "compiling kernels", 140, counts=True),
    Phase("package", "installing horovod-compress", 8),
)
_CUDA_PHASES = (
    Phase("cuda", "installing packages for CUDA", 40),
    Phase("cuda-kernels", "compiling CUDA kernels", 240, counts=True),
)


def phases(environment: Mapping[str, str], cuda: bool | None) -> tuple[Phase, ...]:
    """Those of a run: CUDA's only where it is asked for, or compiled because there is a GPU."""
    return (*PHASES, *_CUDA_PHASES) if cuda or wants_cuda_kernels(environment) else PHASES


@dataclass
class Setup:
    """One run of `make setup`."""

    venv: VirtualEnvironment
    runner: CommandRunner
    torch: str
    extras: list[str]
    cuda: bool = False
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    machine_checked: bool = False
    package: bool = True  # False: only what it needs, as a layer of its own in images
    _compiler: list[str] = field(default_factory=list)
    _checking: threading.Lock = field(default_factory=threading.Lock)
    _packages_ready: threading.Event = field(default_factory=threading.Event)

    def run(self) -> bool:
        """Brings everything up to date; returns whether anything had to be done."""
        if self.cuda:
            self.environment = _cuda_environment(self.environment)
        if not self.venv.works():
            self.check_machine(None)
            self.venv.create()
        self.runner.bar.done("environment")
        self.venv.repair(self.runner.bar.say)
        inspection = self.install_tools(self.inspect())
        dependencies = partial(self.install_dependencies, inspection)
        package = partial(self.install_package, inspection)
        if not self.package:
            dependencies()
        elif parallel_jobs(self.environment) > 1:
            side_by_side(dependencies, package, stop=self.runner.stop)
        else:  # one compiler at a time: there may be no memory for two
            dependencies()
            package()
        self.venv.remember_cuda(self.cuda)  # not before all of it is there: a set-up that failed is not tried again
        return self.machine_checked

    def inspect(self) -> Inspection:
        return self.venv.inspect(ROOT / "pyproject.toml", self.extras, [self.torch, *NEEDS, *self._compiler])

    def check_machine(self, inspection: Inspection | None) -> None:
        """Before the first step that does something: a missing compiler must show before the download, not after."""
        with self._checking:
            if not self.machine_checked:
                prerequisites.require(Path(inspection.include) if inspection else None)
                self.machine_checked = True

    def install_tools(self, inspection: Inspection) -> Inspection:
        """What compiles our own modules, so that they need not wait for torch."""
        if inspection.tools:
            self.check_machine(inspection)
            self.venv.install(inspection.tools, inspection, phase="tools")
            inspection = self.inspect()
        self.runner.bar.done("tools")
        return inspection

    # ---- one lane: packages, then Horovod ---------------------------------------------------------

    def install_dependencies(self, inspection: Inspection) -> None:
        inspection = self.install_requirements(inspection, phase="packages")
        if self.cuda:
            inspection = self.install_cuda(inspection)
        self._packages_ready.set()
        self.install_horovod(inspection)
        if self.cuda and self.machine_checked and not inspection.torch_cuda:
            self.runner.bar.say(_CPU_TORCH.format(torch=inspection.torch))

    def install_requirements(self, inspection: Inspection, *, phase: str) -> Inspection:
        if inspection.unmet:
            self.check_machine(inspection)
            self.venv.install(inspection.unmet, inspection, phase=phase)
            self.venv.remember_torch(self.torch)
            inspection = self.inspect()
        self.runner.bar.done(phase)
        return inspection

    def install_cuda(self, inspection: Inspection) -> Inspection:
        """CuPy, NCCL and, where the machine has no nvcc, NVIDIA's: after torch, because they follow its CUDA."""
        _check_torch(inspection)
        self.extras = list(dict.fromkeys([*self.extras, "cuda"]))
        if nvcc := cuda_compiler.find_on_machine(self.environment):
            _check_release(nvcc, inspection)
        else:
            self._compiler = [cuda_compiler.requirement(inspection.torch_cuda)]
        return self.install_requirements(self.inspect(), phase="cuda")

    def install_horovod(self, inspection: Inspection) -> None:
        environment = self.horovod_environment(inspection)
        HorovodInstall(self.venv, self.runner, environment).run(inspection, partial(self.check_machine, inspection))

    def horovod_environment(self, inspection: Inspection) -> Mapping[str, str]:
        """With NCCL operations where CUDA=1 and a torch with CUDA ask for them; what the user says of them wins."""
        return with_gpu_operations(self.venv, self.environment, inspection) if self.cuda else self.environment

    # ---- the other lane: our own modules ----------------------------------------------------------

    def install_package(self, inspection: Inspection) -> None:
        package = PackageInstall(ROOT, self.venv, self.runner, inspection, self.environment)
        if not package.is_current():
            self.check_machine(inspection)
            package.compile(phase="kernels", environment={**self.environment, "HVC_CUDA": "0"})
        self._wait_for_nvcc()
        if not package.is_current():
            self.check_machine(inspection)
            if wants_cuda_kernels(self.environment):
                package.compile(phase="cuda-kernels", environment=self.environment)
            package.install()
        self.runner.bar.done("kernels", "cuda-kernels", "package")

    def _wait_for_nvcc(self) -> None:
        """With CUDA=1 the other lane brings it."""
        while self.cuda and not self._packages_ready.is_set():
            self.runner.pause()


def _cuda_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of what is built with CUDA=1.

    Raises:
        EnvironmentProblem: HVC_CUDA=0 excludes it.
    """
    if environment.get("HVC_CUDA") == "0":
        raise EnvironmentProblem(
            "CUDA=1 asks for the CUDA kernels and HVC_CUDA=0 forbids them: leave one of them out\n"
            "(where CUDA=1 was given to an earlier make setup:  make setup CUDA=0)"
        )
    return {**environment, "HVC_CUDA": "1"}


def _check_torch(inspection: Inspection) -> None:
    """Refuse a torch that goes with none of the packages that CUDA=1 installs.

    Raises:
        EnvironmentProblem: It is built for another CUDA than 13.
    """
    if inspection.torch_cuda and not inspection.torch_cuda.startswith("13."):
        raise EnvironmentProblem(
            f"torch {inspection.torch} is built for CUDA {inspection.torch_cuda}, and CUDA=1 installs packages of "
            "CUDA 13:\nchoose a torch for CUDA 13 with TORCH=, or go without:  make setup CUDA=0"
        )


def _check_release(nvcc: Path, inspection: Inspection) -> None:
    """Refuse a compiler with which Horovod would be built for another CUDA than torch.

    Raises:
        EnvironmentProblem: It is of another major release.
    """
    if not cuda_compiler.suits(nvcc, inspection.torch_cuda):
        raise EnvironmentProblem(
            f"{nvcc} is of CUDA {cuda_compiler.release_of(nvcc)}, "
            f"and torch {inspection.torch} is built for CUDA {inspection.torch_cuda}:\n"
            "set CUDACXX to an nvcc of the same major release, or go without:  make setup CUDA=0"
        )


def run_from_command_line(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, _interrupt)
    setup = None
    try:
        with file_lock(ROOT / "build" / "setup.lock", "working in this folder"):
            setup = _setup(options)
            setup.run()
    except (PrerequisitesMissing, StepFailed, EnvironmentProblem) as problem:
        return _fail(setup, str(problem), 1)
    except OSError as error:
        if (advice := _OF_THE_SYSTEM.get(error.errno or 0)) is None:
            raise
        return _fail(setup, f"make setup failed: {error}\n\n{advice}\nThen run make setup again.", 1)
    except KeyboardInterrupt:
        return _fail(setup, "make setup was interrupted; run it again, it keeps what is installed.", 130)
    setup.runner.bar.finish(f"everything is in {options.venv}")
    return 0


def _fail(setup: Setup | None, text: str, status: int) -> int:
    if setup:
        setup.runner.bar.abandon()
    print(f"\n{text}", file=sys.stderr)
    return status


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--torch", default="torch==2.13.0", help="a requirement of pip's: version, path or address")
    parser.add_argument("--extras", default="test,demo,plot", help="extras of pyproject.toml, separated by commas")
    parser.add_argument("--cuda", default="", help="1: CuPy, NCCL and CUDA kernels, also later on; 0: no more")
    parser.add_argument("--without-package", action="store_true", help="only what horovod-compress needs")
    jobs = os.environ.get("HVC_JOBS", "")
    parser.add_argument(
        "--jobs", default=jobs, help="compilers at a time (default: one for each core, and GB of memory)"
    )
    options = parser.parse_args(arguments)
    if options.cuda not in ("", "0", "1"):
        parser.error(f"CUDA is {options.cuda!r}: expected 1, 0 or nothing, as in  make setup CUDA=")
    if options.jobs and not (options.jobs.isdecimal() and int(options.jobs) > 0):
        parser.error(f"JOBS is {options.jobs!r}: expected a number of compilers, as in  make setup JOBS=1")
    return options


def _setup(options: argparse.Namespace) -> Setup:
    environment = {**os.environ, "HVC_JOBS": options.jobs}
    # As chosen now, or as chosen last.
    cuda = remembers_cuda(options.venv) if options.cuda == "" else options.cuda == "1"
    runner = CommandRunner(ROOT / "build" / "setup", Bar(phases(environment, cuda), sys.stdout))
    extras = [name for name in options.extras.replace(",", " ").split() if name]
    venv, package = VirtualEnvironment(options.venv, runner), not options.without_package
    return Setup(venv, runner, options.torch, extras, cuda, environment, package=package)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
