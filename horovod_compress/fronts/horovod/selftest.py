"""One rank's part of ``hvd-compress verify``: checks in a running job, and the end of a rank in the middle of one.

``python -m horovod_compress.fronts.horovod.selftest`` is what a rank is started as.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn

from ...codecs.registry import available
from ...errors import CorruptFrameError, ExchangeError, HorovodCompressError, MismatchError
from . import local_ranks
from .calls import allgather_object
from .compression import Compression

#: Seconds for what is to succeed, on a machine that may be busy.
PATIENCE = 30.0
_STEPS = 3
_SHAPES = {"first": (61, 97), "second": (33,), "third": (1,), "last": (128, 64)}
_PLANTED_IN = "marsit"  # the method in whose check a fault is planted


class Failed(Exception):
    """A check has found something wrong; says where."""


class _Model(nn.Module):
    """Parameters of odd sizes, whose gradients are given."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        for name, shape in _SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))

    def backward(self, step: int) -> None:
        """Give every parameter a gradient that only this rank has."""
        generator = torch.Generator().manual_seed(1000 * step + hvd.rank())
        total = sum((p * torch.randn(p.shape, generator=generator)).sum() for p in self.parameters())
        assert isinstance(total, Tensor)
        total.backward()


class _Flipping:
    """A transport that changes one bit of one frame on its way."""

    def __init__(self, inner: Any, number: int) -> None:
        self._inner, self._left = inner, number

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def send(self, data: Tensor, to: int) -> Any:
        self._left -= 1
        if self._left == -1:
            data = data.clone()
            data[-1] ^= 16
        return self._inner.send(data, to)


class _Job:
    """A model with an attached optimizer and a compression."""

    def __init__(self, method: str, seconds: float = PATIENCE, **options: Any) -> None:
        self.model = _Model()
        named = list(self.model.named_parameters())
        self.compression = Compression.create(
            method, named, timeout=seconds, schedule="layerwise", verify_every=1, **options
        )
        plain = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.optimizer = hvd.DistributedOptimizer(plain, named_parameters=named, compression=self.compression)
        self.compression.attach(self.optimizer)

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.model.backward(number)
        self.optimizer.step()


def _victim() -> int:
    return int(hvd.size()) - 1


def _mine() -> bool:
    return bool(hvd.rank() == _victim())


def _gather(value: Any, name: str) -> list[Any]:
    return allgather_object(value, f"hvc.verify.{name}", hvd.global_process_set, PATIENCE)


# ---- checks in a job that lives ----


def same_bits(method: str, plant: str) -> str:
    """Train with a method; every rank must have the same weights, bit for bit.

    Raises:
        Failed: names the parameter and the ranks that differ.
    """
    plant = plant if method == _PLANTED_IN and _mine() else ""
    job = _Job(method, seconds=3.0 if plant or method == _PLANTED_IN else PATIENCE, seed=int(plant == "mismatch"))
    try:
        if plant == "corruption":
            reducer = job.compression._running()
            reducer.context.transport = _Flipping(reducer.context.transport, hvd.size() + 1)
        for step in range(_STEPS):
            if plant == "freeze" and step == 1:
                local_ranks.leave("fault", time.monotonic())
                os.kill(os.getpid(), signal.SIGSTOP)
            job.step(step)
            if plant == "drift" and step == 1:
                next(job.model.parameters()).data.view(-1).view(torch.int32)[7] ^= 1
        _compare(job.model, method)
    finally:
        job.compression.close()
    return ""


def _compare(model: nn.Module, method: str) -> None:
    mine = {name: _hash(parameter) for name, parameter in model.named_parameters()}
    every = _gather(mine, f"weights.{method}")
    for name in mine:
        values = [found[name] for found in every]
        usual = max(set(values), key=lambda value: (values.count(value), -values.index(value)))
        if odd := [rank for rank, value in enumerate(values) if value != usual]:
            raise Failed(f"parameter {name} on rank(s) {', '.join(map(str, odd))} differs from that of the others")


def _hash(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def corruption() -> str:
    """Change one bit on its way: the rank that gets it must refuse the frame, and no rank may go on.

    Raises:
        Failed: some rank went on.
    """
    job = _Job("marsit", seconds=10.0)
    if _mine():
        reducer = job.compression._running()
        reducer.context.transport = _Flipping(reducer.context.transport, hvd.size() + 1)
    told = ""
    try:
        for step in range(_STEPS):
            job.step(step)
    except ExchangeError as error:
        told = "refused" if isinstance(error, CorruptFrameError) else "stopped"
    finally:
        job.compression.close()
    every = _gather(told, "corruption")
    if "" in every or "refused" not in every:
        raise Failed(f"a changed bit was not refused: the ranks {every}")
    return f"rank {every.index('refused')} refused a frame with one bit changed; all stopped"


def mismatch() -> str:
    """Give one rank another seed: all must refuse to start.

    Raises:
        Failed: some rank started.
    """
    try:
        _Job("qsgd", seed=int(_mine())).compression.close()
        told = ""
    except MismatchError as error:
        told = str(error)
    every = _gather(told, "mismatch")
    if not all("seed" in found for found in every):
        raise Failed(f"another seed on rank {_victim()} was not refused: {every}")
    return "another seed on one rank was refused at the start, by name"


def drift() -> str:
    """Change one bit of one result: the comparison after the step must find it.

    Raises:
        Failed: it was not found, or blamed on another rank.
    """
    job = _Job("fp16")
    reducer = job.compression._running()
    hashed = reducer.verification.hash

    def change(state: Any) -> int:
        state.memory.grads[0].view(-1).view(torch.int32)[0] ^= 1
        return hashed(state)

    try:
        job.step(0)
        if _mine():
            reducer.verification.hash = change  # type: ignore[method-assign]
        told = ""
        try:
            job.step(1)
            job.step(2)
        except MismatchError as error:
            told = str(error)
    finally:
        job.compression.close()
    every = _gather(told, "drift")
    # Of two ranks that differ nobody knows which is right, and the first is taken to be.
    if not all(f"on rank(s) {_victim()} differs" in found for found in every):
        raise Failed(f"a changed bit of a result on rank {_victim()} was not found: {every}")
    return "one changed bit of a result was found in its step, by bucket and rank"


def _checks(plant: str) -> Iterator[tuple[str, Callable[[], str]]]:
    for method in available():
        yield f"same bits: {method}", lambda method=method: same_bits(method, plant)  # type: ignore[misc]
    yield "corruption", corruption
    yield "mismatch", mismatch
    yield "drift", drift


def in_a_job(plant: str = "") -> list[dict[str, Any]]:
    """Do all checks that no rank has to die for; stop at the first that fails, as the job may be broken then."""
    found: list[dict[str, Any]] = []
    for name, check in _checks(plant):
        began = time.monotonic()
        problem = detail = ""
        try:
            detail = check()
        except (Failed, HorovodCompressError) as error:
            problem = f"{type(error).__name__}: {error}" if isinstance(error, HorovodCompressError) else str(error)
        seconds = time.monotonic() - began
        found.append({"check": name, "ok": not problem, "seconds": seconds, "detail": problem or detail})
        if problem:
            break
    return found


# ---- a rank ends ----


def lose_a_rank(how: str, seconds: float) -> None:
    """Train, and let the last rank be killed or frozen in a step; the others leave what they saw."""
    job = _Job("marsit", seconds=seconds)
    job.step(0)
    hvd.barrier()
    if _mine():
        recorder = job.compression._running().context.recorder
        noted = recorder.note

        def note(step: int, bucket: int, event: str, hop: int = -1) -> None:
            noted(step, bucket, event, hop)
            if (step, event, hop) == (1, "hop", 1):
                local_ranks.leave("fault", time.monotonic())
                os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)

        recorder.note = note  # type: ignore[method-assign]
    try:
        for step in range(1, _STEPS):
            job.step(step)
    except ExchangeError as error:
        local_ranks.leave("error", {"text": str(error), "at": time.monotonic()})
    else:
        local_ranks.leave("error", None)


def main() -> None:
    """Do what this rank was started for."""
    what = local_ranks.task()
    torch.set_num_threads(1)
    hvd.init()
    if what["how"] == "checks":
        local_ranks.leave("checks", in_a_job(what["plant"]))
    else:
        lose_a_rank(what["how"], what["seconds"])
    os._exit(0)  # Horovod would wait for the rank that is gone


if __name__ == "__main__":
    main()
