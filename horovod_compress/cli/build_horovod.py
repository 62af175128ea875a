"""Build Horovod for the torch that is installed here.

    hvd-compress build-horovod
    hvd-compress build-horovod --mpi

Horovod is published as source that predates today's torch. This downloads it, makes the few changes that
docs/install.md shows, builds a wheel and installs it into this environment; torch is not changed. Wheels are kept in
~/.cache/horovod-compress/wheels. NCCL operations are built if torch has CUDA, and nvcc and the NCCL package are
installed. Horovod's own build options, such as HOROVOD_GPU_OPERATIONS=NCCL, take precedence. A working Horovod is left
alone.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from ..building import horovod
from ..building.stage import StageFailed, Stages

PROGRAM = "hvd-compress build-horovod"
_MPI = {"HOROVOD_WITH_MPI": "1", "HOROVOD_CPU_OPERATIONS": "MPI"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what can be chosen about the build."""
    parser.add_argument("--mpi", action="store_true", help="build with MPI as well as Gloo; needs mpicxx")
    parser.add_argument("--force", action="store_true", help="build even if the installed Horovod works")
    parser.add_argument("--jobs", type=int, metavar="N", help="compilers at a time (default: one per core)")


def run(arguments: argparse.Namespace) -> int:
    """Build and install; return the exit status."""
    if arguments.jobs is not None and arguments.jobs < 1:
        print(f"{PROGRAM}: --jobs should be at least 1, got {arguments.jobs}", file=sys.stderr)
        return 2
    jobs = {"HVC_JOBS": str(arguments.jobs)} if arguments.jobs else {}
    environment = {**(_MPI if arguments.mpi else {}), **os.environ, **jobs}
    try:
        torch = importlib.metadata.version("torch")
        wheel = build(environment) if arguments.force or arguments.mpi or not loads() else None
    except importlib.metadata.PackageNotFoundError:
        print(
            f"{PROGRAM} builds against the torch that is there, and there is none: pip install torch", file=sys.stderr
        )
        return 1
    except StageFailed as problem:
        print(f"\n{problem}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps({"torch": torch, "built": wheel is not None, "wheel": wheel and str(wheel)}))
    elif wheel is None:
        print(f"Horovod already works with torch {torch}; --force builds it again.")
    else:
        print(f"Horovod works with torch {torch}. Its wheel is {wheel}")
    return 0


def loads() -> bool:
    """Return whether the Horovod that is there loads with the torch that is there."""
    return subprocess.run([sys.executable, "-c", horovod.LOADING], capture_output=True, check=False).returncode == 0


def build(environment: Mapping[str, str]) -> Path:
    """Install the tools and Horovod; its logs and links lie in the user's cache, one folder for each environment."""
    folder = horovod.cache().parent / "environments" / hashlib.sha256(sys.prefix.encode()).hexdigest()[:12]
    stages = Stages(folder / "logs", PROGRAM)
    (stages.logs / "failed").unlink(missing_ok=True)
    stages.run("installing build tools", [*horovod.PIP, "install", "wheel", *horovod.NEEDS])
    if not any(name.startswith("HOROVOD_GPU") for name in environment):
        try:
            environment = horovod.with_nccl(environment, folder / "gpu-links")
        except StageFailed as problem:
            print(f"Building without NCCL operations: {problem}", file=sys.stderr)
    return horovod.install(stages, environment)
