"""Where the ranks of a job compute: on the CPU, on the CPU as if it were a device, or on a GPU."""

from __future__ import annotations

import contextlib
import os

import torch

from tests.support.accelerator import everything_on_accelerator

#: Devices of a job by name. "staged" is the CPU whose payloads are copied as from another device; "cuda:0" is a GPU
#: that all ranks share; with "cuda" each rank of a host has its own.
DEVICES = ("cpu", "staged", "cuda:0", "cuda")


def place(name: str) -> torch.device:
    """Return the device of this rank; a GPU becomes the current one."""
    assert name in DEVICES
    if name in ("cpu", "staged"):
        return torch.device("cpu")
    where = torch.device(name if name == "cuda:0" else f"cuda:{local_rank()}")
    torch.cuda.set_device(where)
    return where


def staging(name: str) -> contextlib.AbstractContextManager[None]:
    """Return what compressions of a job on this device are made and used in."""
    return everything_on_accelerator() if name == "staged" else contextlib.nullcontext()


def local_rank() -> int:
    return int(os.environ["HOROVOD_LOCAL_RANK"] if "HOROVOD_LOCAL_RANK" in os.environ else os.environ["LOCAL_RANK"])


def count_ranks() -> int:
    return int(os.environ["HOROVOD_SIZE"] if "HOROVOD_SIZE" in os.environ else os.environ["WORLD_SIZE"])
