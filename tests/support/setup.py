"""Set-ups in which nothing is installed or built."""

from __future__ import annotations

import dataclasses
import io
import stat
from pathlib import Path
from typing import Any

from environment.steps import Setup, phases
from horovod_compress.building import cuda_compiler
from horovod_compress.building.bar import Bar
from horovod_compress.building.logged_command import CommandRunner
from horovod_compress.building.virtual_environment import Inspection, VirtualEnvironment
from horovod_compress.building.wheel_cache import BuildFacts

FACTS = BuildFacts(
    horovod="0.28.1",
    torch="2.13.0+cpu",
    python="cpython-311-x86_64-linux-gnu",
    platform="linux-x86_64",
    c_library="glibc-2.36",
    compiler="g++ x86_64-linux-gnu 12",
    instruction_sets="avx fma",
    options=(("HOROVOD_WITH_GLOO", "1"),),
    recipe="",
)
INSPECTION = Inspection(
    python=[3, 11],
    abi="",
    suffix=".so",
    include="",
    pip="",
    torch="2.13.0+cpu",
    torch_cuda=None,
    horovod="",
    package="0.1.0",
    unmet=[],
)
WITH_CUDA = dataclasses.replace(INSPECTION, torch="2.13.0", torch_cuda="13.0")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def make_program(folder: Path, name: str, script: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


def make_runner(folder: Path, stream: io.StringIO | None = None) -> CommandRunner:
    """A runner that knows all phases; its bar is written to `stream`."""
    return CommandRunner(folder / "logs", Bar(phases({"HVC_CUDA": "1"}, True), stream or io.StringIO()))


def make_packages(venv: Path) -> Path:
    """NVIDIA's packages, as far as they are looked for."""
    site = venv / "lib" / "python3.11" / "site-packages" / "nvidia"
    runtime = [f"cu13/{name}" for name in (*cuda_compiler._FILES, "lib/libcudart.so.13")]
    for name in (*runtime, "nccl/include/nccl.h", "nccl/lib/libnccl.so.2"):
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).touch()
    script = f"echo '#$ TOP={site}/cu13/bin/..' >&2; echo release 13.0"
    return make_program(site / "cu13" / "bin", "nvcc", script)


class FakeSetup(Setup):
    """A set-up in which nothing is installed or built: it only writes down what would be."""

    def __init__(self, folder: Path, found: Inspection, **choices: Any) -> None:
        runner = make_runner(folder)
        super().__init__(VirtualEnvironment(folder / ".venv", runner), runner, "torch", ["test"], **choices)
        self.found = found
        self.wanted: list[str] = []
        self.venv.folder.mkdir(exist_ok=True)
        (self.venv.folder / "location").write_text(str(self.venv.folder))

    def inspect(self) -> Inspection:
        self.wanted = [*self.extras, *self._compiler]
        return self.found
