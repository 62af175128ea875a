"""Under which launcher a command runs, or is to start its ranks: horovodrun or torchrun."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
from collections.abc import Mapping
from typing import Any

LAUNCHERS = ("horovodrun", "torchrun")
#: What a rank has in its environment, by its launcher.
_MARKS = {"horovodrun": ("HOROVOD_RANK",), "torchrun": ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
_NEEDS = {
    "horovodrun": "Horovod cannot be imported: {}; give --launcher torchrun to run without it",
    "torchrun": "PyTorch cannot be imported: {}; pip install torch",
}


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Add the choice of a launcher."""
    parser.add_argument(
        "--launcher",
        choices=LAUNCHERS,
        help="which front to use: Horovod, or DistributedDataParallel (default: the launcher that started this "
        "command; else horovodrun if Horovod is installed, else torchrun)",
    )


def started_by(environment: Mapping[str, str] = os.environ) -> str:
    """Return the launcher that has started this process as a rank, empty if none has."""
    return next((name for name in LAUNCHERS if all(mark in environment for mark in _MARKS[name])), "")


def chosen(asked: str | None) -> str:
    """Return the launcher to use."""
    return asked or started_by() or ("horovodrun" if _has_horovod() else "torchrun")


def _has_horovod() -> bool:
    try:
        return importlib.util.find_spec("horovod") is not None
    except ImportError:
        return False


def module(launcher: str, name: str) -> Any:
    """Return a module of a launcher's front.

    Raises:
        ImportError: says what is missing.
    """
    front = "horovod" if launcher == "horovodrun" else "torch_dist"
    try:
        return importlib.import_module(f"horovod_compress.fronts.{front}.{name}")
    except ImportError as error:
        raise ImportError(_NEEDS[launcher].format(error)) from None


def ranks(launcher: str) -> Any:
    """Join the job that this process is a rank of, and return its ranks.

    Raises:
        ImportError: says what is missing.
    """
    found = module(launcher, "ranks")
    return found.begin()
