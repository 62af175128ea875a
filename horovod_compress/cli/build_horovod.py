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
import json
import os
import sys

from ..building import current
from ..building.logged_command import StepFailed
from ..building.prerequisites import PrerequisitesMissing
from ..building.virtual_environment import EnvironmentProblem

_MPI = {"HOROVOD_WITH_MPI": "1", "HOROVOD_CPU_OPERATIONS": "MPI"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what can be chosen about the build."""
    parser.add_argument("--mpi", action="store_true", help="build with MPI as well as Gloo; needs mpicxx")
    parser.add_argument("--force", action="store_true", help="build even if the installed Horovod works")
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="compilers at a time (default: one per core and GB of memory)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Build and install; return the exit status."""
    if arguments.jobs is not None and arguments.jobs < 1:
        print(f"{current.PROGRAM}: --jobs should be at least 1, got {arguments.jobs}", file=sys.stderr)
        return 2
    jobs = {"HVC_JOBS": str(arguments.jobs)} if arguments.jobs else {}
    environment = {**(_MPI if arguments.mpi else {}), **os.environ, **jobs}
    try:
        outcome = current.build(environment, force=arguments.force or arguments.mpi)
    except (EnvironmentProblem, PrerequisitesMissing, StepFailed) as problem:
        print(f"\n{problem}", file=sys.stderr)
        return 1
    if arguments.json:
        wheel = None if outcome.wheel is None else str(outcome.wheel)
        print(json.dumps({"torch": outcome.torch, "built": wheel is not None, "wheel": wheel}))
    elif outcome.wheel is None:
        print(f"Horovod already works with torch {outcome.torch}; --force builds it again.")
    else:
        print(f"Horovod works with torch {outcome.torch}. Its wheel is {outcome.wheel}")
    return 0
