"""What the programs on the ranks share: the clock that all contestants are measured with, and how a record is told."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.outcomes import emit
from benchmarks.peers.names import PeerError
from benchmarks.results import Record, plain


def tell(record: Record) -> None:
    """Print a record for the launcher, on rank 0 only."""
    if hvd.rank() == 0:
        emit(plain(record))


def say(text: str) -> None:
    """Print a line, on rank 0 only."""
    if hvd.rank() == 0:
        print(text, flush=True)


def print_error(text: str) -> None:
    """Print why the job will fail, on the rank that calls it; launchers look for such lines."""
    print(text, file=sys.stderr, flush=True)


def tell_wrong(where: str, names: Sequence[str]) -> None:
    """Print which contestants had wrong results, if any, on rank 0 only: all ranks know."""
    if names and hvd.rank() == 0:
        print_error(f"WrongResultError: {where}: {', '.join(names)}")


def run_job(measure: Callable[[], int]) -> int:
    """Start Horovod, measure, end in order, and return the exit status.

    Args:
        measure: returns how many elements were wrong.
    """
    hvd.init()
    torch.set_num_threads(1)
    try:
        wrong = measure()
    except PeerError as error:
        print_error(f"PeerError: {error}")
        return 2
    peers.leave()
    hvd.shutdown()
    return 1 if wrong else 0


def timed(action: Callable[[], object]) -> float:
    """Return the seconds from a barrier of all ranks to this rank's end of an action."""
    hvd.barrier()
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def gathered(value: Any, name: str) -> list[Any]:
    """Return every rank's value, in rank order."""
    # Without a name Horovod takes the object's type for it, and ranks of different types wait for ever.
    return hvd.allgather_object(value, name=name)


def slowest(seconds: list[float], name: str) -> list[float]:
    """Return the largest of all ranks' values, place by place."""
    return [max(values) for values in zip(*gathered(seconds, name), strict=True)]


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a hash of the tensors' bytes, in order."""
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def optimizer_of(kind: str, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer: "sgd", with momentum and weight decay, or "none", which changes no weight."""
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, weight_decay=1e-4)
    return NullOptimizer(parameters)


class NullOptimizer(torch.optim.Optimizer):
    """Changes nothing, so that a step is the reduction of the gradients and nothing else."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        return None
