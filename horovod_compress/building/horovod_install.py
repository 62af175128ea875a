"""Installs Horovod's wheel, from the cache or built now, and sees that its library loads."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from . import cuda_compiler, gpu_operations, horovod_wheel
from .bar import Phase
from .horovod_wheel import HorovodWheel, collect_facts
from .logged_command import CommandRunner, StepFailed
from .virtual_environment import EnvironmentProblem, Inspection, VirtualEnvironment
from .wheel_cache import WheelCache, default_folder

LOADING = "import torch; from horovod.torch import mpi_lib_v2"

# With the seconds that each takes on two idle cores: the shares of the bar.
HOROVOD_PHASES = (
    Phase("horovod-source", "downloading Horovod", 3),
    Phase("cmake", "installing CMake", 3),
    Phase("horovod", "building Horovod", 140, counts=True),
    Phase("horovod-wheel", "installing Horovod", 3),
    Phase("check", "loading Horovod", 4),
)


class HorovodInstall:
    """One environment's Horovod; what was installed there is remembered by the key of its build."""

    def __init__(self, venv: VirtualEnvironment, runner: CommandRunner, environment: Mapping[str, str]) -> None:
        self._venv = venv
        self._runner = runner
        self._environment = environment

    def run(self, inspection: Inspection, before: Callable[[], None]) -> Path | None:
        """Installs the wheel for these facts; returns it, or None where it was installed already.

        Args:
            before: called before the first step that does something.
        """
        facts = collect_facts(inspection, self._environment)
        installed = self._venv.folder / "horovod-wheel"
        wheel = None
        if not (inspection.horovod and installed.exists() and installed.read_text() == facts.key()):
            before()
            installed.unlink(missing_ok=True)
            cache = WheelCache(default_folder())
            wheel, is_new = HorovodWheel(cache, self._venv, self._runner, facts, self._environment).get()
            self._venv.install_wheel(wheel)
            self._load(wheel, cache, facts.key(), is_new=is_new)
            installed.parent.mkdir(parents=True, exist_ok=True)
            installed.write_text(facts.key())
        self._runner.bar.done(*horovod_wheel.PHASES, "horovod-wheel", "check")
        return wheel

    def _load(self, wheel: Path, cache: WheelCache, key: str, *, is_new: bool) -> None:
        """Loads its library once.

        Raises:
            EnvironmentProblem: It does not load; the wheel is removed from the cache.
        """
        try:
            self._runner.run(self._venv.statement(LOADING), phase="check")
        except StepFailed as failure:
            cache.discard(key)
            program = self._runner.program
            again = "" if is_new else f" It came from the cache and was removed there: run {program} again."
            problem = f"{wheel.name} was installed, but Horovod's library does not load.{again}\n\n{failure}"
            raise EnvironmentProblem(problem) from failure


def loads(venv: VirtualEnvironment) -> bool:
    """Whether the Horovod that is there loads with the torch that is there."""
    return subprocess.run(venv.statement(LOADING), capture_output=True, check=False).returncode == 0


def with_gpu_operations(
    venv: VirtualEnvironment, environment: Mapping[str, str], inspection: Inspection
) -> Mapping[str, str]:
    """The environment of a build with NCCL operations, where torch has CUDA and there is an nvcc."""
    nvcc = cuda_compiler.find_nvcc(environment, venv)
    if not (inspection.torch_cuda and nvcc):
        return environment
    variables = gpu_operations.build_variables(venv, nvcc, environment)
    return {**variables, **environment, "LIBRARY_PATH": variables["LIBRARY_PATH"]}
