"""Builds Horovod into the environment that runs this: a cluster's, conda's, or any other with a torch of its own."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from . import cuda_compiler, prerequisites
from .bar import Bar, Phase
from .horovod_install import HOROVOD_PHASES, HorovodInstall, loads, with_gpu_operations
from .horovod_wheel import NEEDS
from .logged_command import CommandRunner
from .virtual_environment import EnvironmentProblem, Inspection, VirtualEnvironment
from .wheel_cache import default_folder

PROGRAM = "hvd-compress build-horovod"
# What builds a wheel without isolation, beside what Horovod itself needs.
TOOLS = ("setuptools", "wheel")
_OTHER_CUDA = """\
{nvcc} is of CUDA {release}, and torch is built for CUDA {torch}: building Horovod without NCCL operations. To include
them, set CUDACXX to an nvcc of CUDA {torch} and repeat with --force."""


@dataclass(frozen=True)
class Outcome:
    """What was done.

    Args:
        wheel: the file that was installed; None where Horovod worked already.
    """

    torch: str
    wheel: Path | None


class CurrentEnvironment(VirtualEnvironment):
    """The environment of this process, of whatever kind; the notes about it lie in the user's cache."""

    def __init__(self, runner: CommandRunner) -> None:
        super().__init__(notes_folder(), runner)
        self.programs = Path(sysconfig.get_path("scripts"))
        self.python = Path(sys.executable)
        self._isolated = [sys.executable]  # packages of the user's own folder count here

    def package_folder(self, name: str) -> Path | None:
        folder = Path(sysconfig.get_path("purelib")) / name
        return folder if folder.is_dir() else None

    def look(self) -> Inspection:
        """What matters for Horovod's build.

        Raises:
            EnvironmentProblem: There is no pip, or no torch.
        """
        if importlib.util.find_spec("pip") is None:
            raise EnvironmentProblem(f"{sys.executable} has no pip: python -m ensurepip installs it")
        from . import inspect_environment as found

        torch = found.installed_version("torch")
        if torch is None:
            raise EnvironmentProblem(
                f"{sys.executable} has no torch, and Horovod is built against one particular torch:\ninstall the "
                "torch of your choice first, for example  pip install torch"
            )
        return Inspection(
            python=list(sys.version_info[:2]),
            abi=sysconfig.get_config_var("SOABI"),
            suffix=sysconfig.get_config_var("EXT_SUFFIX"),
            include=sysconfig.get_path("include"),
            pip=importlib.metadata.version("pip"),
            torch=torch,
            torch_cuda=found.cuda_of_torch(),
            horovod=found.installed_version("horovod"),
            package=found.installed_version("horovod-compress"),
            unmet=found.unmet([*TOOLS, *NEEDS], ""),
        )


def notes_folder() -> Path:
    """One folder for each environment, which may be read-only itself."""
    return default_folder().parent / "environments" / hashlib.sha256(sys.prefix.encode()).hexdigest()[:12]


def build(environment: Mapping[str, str], *, force: bool) -> Outcome:
    """Installs a Horovod that works with the torch that is there.

    Args:
        force: builds or takes from the cache also where Horovod works already.

    Raises:
        EnvironmentProblem: Something that only a person can decide.
        PrerequisitesMissing: No compiler, make or headers.
        StepFailed: A command failed.
    """
    logs = notes_folder() / "logs"
    phases = (Phase("packages", "installing build tools", 6), *HOROVOD_PHASES)
    runner = CommandRunner(logs, Bar(phases, sys.stderr), PROGRAM)
    venv = CurrentEnvironment(runner)
    inspection = venv.look()
    if inspection.horovod and not force and loads(venv):
        return Outcome(str(inspection.torch), None)
    _check_managed()
    _check_mpi(environment)
    prerequisites.require(Path(inspection.include), PROGRAM)
    venv.folder.mkdir(parents=True, exist_ok=True)
    (venv.folder / "horovod-wheel").unlink(missing_ok=True)
    if inspection.unmet:
        venv.install(inspection.unmet, inspection, phase="packages")
    install = HorovodInstall(venv, runner, build_environment(venv, environment, inspection, runner.bar.say))
    wheel = install.run(inspection, lambda: None)
    runner.bar.finish("Horovod is installed")
    return Outcome(str(inspection.torch), wheel)


def build_environment(
    venv: VirtualEnvironment, environment: Mapping[str, str], inspection: Inspection, say: Callable[[str], None]
) -> Mapping[str, str]:
    """With NCCL where torch has CUDA, its nvcc is there and pip has installed NCCL; what the user says wins."""
    chosen = any(name.startswith("HOROVOD_GPU") for name in environment)
    has_nccl = venv.package_folder("nvidia/nccl") is not None
    if chosen or not has_nccl:
        return environment
    nvcc = cuda_compiler.find_nvcc(environment, venv)
    if nvcc and not cuda_compiler.suits(nvcc, inspection.torch_cuda):
        say(_OTHER_CUDA.format(nvcc=nvcc, release=cuda_compiler.release_of(nvcc), torch=inspection.torch_cuda))
        return environment
    return with_gpu_operations(venv, environment, inspection)


def _check_managed() -> None:
    """Refuse a system's own Python before pip does."""
    marker = Path(sysconfig.get_path("stdlib")) / "EXTERNALLY-MANAGED"
    if sys.prefix == sys.base_prefix and marker.exists():
        raise EnvironmentProblem(
            f"{sys.executable} belongs to the system, whose packages pip must not change: create an environment with\n"
            f"  {sys.executable} -m venv --system-site-packages ENV"
        )


def _check_mpi(environment: Mapping[str, str]) -> None:
    if environment.get("HOROVOD_WITH_MPI") != "1":
        return
    path = environment.get("PATH")
    compiler = shutil.which("mpicxx", path=path)
    if compiler is None:
        raise EnvironmentProblem(
            "--mpi needs mpicxx in PATH: load your site's MPI module, or install one\n"
            "(Debian, Ubuntu: sudo apt-get install libopenmpi-dev openmpi-bin)"
        )
    if subprocess.run([compiler, "--version"], capture_output=True, check=False).returncode != 0:
        raise EnvironmentProblem(f"--mpi: {compiler} --version fails")
