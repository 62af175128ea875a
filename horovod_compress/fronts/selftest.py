"""One rank's part of ``hvd-compress verify``: checks in a running job, and the end of a rank in the middle of one.

Each front has a module ``selftest``, whose forks are the ranks.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..codecs.registry import built_in
from ..engine.agreement.differences import minority
from ..engine.shards import is_divided, local
from ..errors import CorruptFrameError, ExchangeError, HorovodCompressError, MismatchError
from ..exchange.wire import HEADER_BYTES
from ..known import MethodName
from ..ops.checksums import bytes_of
from . import local_ranks
from .ranks import PATIENCE, Ranks

_STEPS = 3
_SHAPES = {"first": (61, 97), "second": (33,), "third": (1,), "last": (128, 64)}
_PLANTED_IN = "marsit"  # the method in whose check a fault is planted


class CheckFailed(Exception):
    """A check has found something wrong; says where."""


class _Model(nn.Module):
    """Parameters of odd sizes, whose gradients are given; every rank has others."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank
        generator = torch.Generator().manual_seed(5)
        for name, shape in _SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator, device="cpu")))

    def forward(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * step + self._rank)
        total = sum((p * torch.randn(p.shape, generator=generator, device="cpu")).sum() for p in self.parameters())
        assert isinstance(total, Tensor)
        return total


class Faulty:
    """A transport around another, in which one fault can be planted; until then it does what that does."""

    def __init__(self, inner: Any) -> None:
        self._inner, self._left = inner, -1
        self._harm: Callable[[Tensor], Tensor] = lambda frame: frame

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def plant(self, number: int, harm: Callable[[Tensor], Tensor]) -> None:
        """Have one of the next frames that this rank sends replaced, the one after ``number`` others."""
        self._left, self._harm = number, harm

    def send(self, data: Tensor, to: int) -> Any:
        self._left -= 1
        return self._inner.send(self._harm(data) if self._left == -1 else data, to)


def _damaged(frame: Tensor) -> Tensor:
    """Return a frame with one bit changed."""
    frame = frame.clone()
    frame[-1] ^= 16
    return frame


def _forged(frame: Tensor) -> Tensor:
    """Return a frame with one bit of its payload changed, and the checksum that belongs to that."""
    frame = frame.clone()
    frame[HEADER_BYTES] ^= 1
    crc = ops.crc32c(frame[HEADER_BYTES:], ops.crc32c(frame[: HEADER_BYTES - 4]))
    frame[HEADER_BYTES - 4 : HEADER_BYTES] = torch.frombuffer(bytearray(crc.to_bytes(4, "little")), dtype=torch.uint8)
    return frame


class _Trained:
    """A model that trains with a compression."""

    def __init__(self, ranks: Ranks, method: MethodName, seconds: float = PATIENCE, **options: Any) -> None:
        self.model = _Model(ranks.rank)
        fixed: dict[str, Any] = {"schedule": "layerwise", "verify_every": 1, "timeout": seconds}
        self.compression, self.optimizer, self._called = ranks.train(self.model, method, self._wrap, **fixed, **options)

    def _wrap(self, transport: Any) -> Any:
        self.transport = Faulty(transport)
        return self.transport

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        self._called(number).backward()
        self.optimizer.step()


class Checks:
    """The checks of a job that no rank has to die for; every rank has to do them.

    Args:
        plant: a fault of the last rank, which has to be found.
        tell: called with the rows so far after each check.
    """

    def __init__(
        self, ranks: Ranks, plant: str = "", tell: Callable[[list[dict[str, Any]]], None] | None = None
    ) -> None:
        self._ranks, self._plant, self._tell = ranks, plant, tell
        #: Where ranks fail: others than those that they exchange with would wait for torch's own collectives.
        self._whole = ranks.undivided()
        self._victim = ranks.size - 1
        self._mine = ranks.rank == self._victim

    def run(self) -> list[dict[str, Any]]:
        """Do all of them; stop at the first that fails, as the job may be broken then."""
        found: list[dict[str, Any]] = []
        checks: dict[str, Callable[[], str]] = {}
        for method in built_in():
            checks[f"same bits: {method}"] = partial(self.same_bits, method)
        checks |= {"corruption": self.corruption, "mismatch": self.mismatch, "drift": self.drift}
        for name, check in checks.items():
            began = time.monotonic()
            problem = detail = ""
            try:
                detail = check()
            except (CheckFailed, HorovodCompressError) as error:
                problem = f"{type(error).__name__}: {error}" if isinstance(error, HorovodCompressError) else str(error)
            seconds = time.monotonic() - began
            found.append({"check": name, "ok": not problem, "seconds": seconds, "detail": problem or detail})
            if self._tell:
                self._tell(found)
            if problem:
                break
        return found

    def _gather(self, value: Any, name: str) -> list[Any]:
        return self._ranks.gather(value, f"hvc.verify.{name}")

    # ---- equal bits ----

    def same_bits(self, method: MethodName) -> str:
        """Train with a method; every rank must have the same weights, bit for bit.

        Raises:
            CheckFailed: names the parameter and the ranks that differ.
        """
        planted = self._plant if method == _PLANTED_IN else ""
        plant = planted if self._mine else ""
        seconds = 3.0 if planted else PATIENCE  # the same on every rank, each of which knows of a fault
        ranks = self._whole if planted else self._ranks
        job = _Trained(ranks, method, seconds, seed=int(plant == "mismatch"))
        try:
            if plant == "corruption":
                job.transport.plant(self._ranks.size + 1, _damaged)
            for step in range(_STEPS):
                # In step 1, DistributedDataParallel agrees on its buckets, and waits as long as its process group may.
                if plant == "freeze" and step == 2:
                    local_ranks.leave("fault", time.monotonic())
                    os.kill(os.getpid(), signal.SIGSTOP)
                job.step(step)
                if plant == "drift" and step == 1:
                    local(next(job.model.parameters())).view(-1).view(torch.int32)[7] ^= 1
            self._compare(job.model, method)
        finally:
            job.compression.close()
        return ""

    def _compare(self, model: nn.Module, method: str) -> None:
        mine = {name: _hash(parameter) for name, parameter in model.named_parameters()}
        every = self._gather(mine, f"weights.{method}")
        for name in mine:
            if odd := minority([found[name] for found in every]):
                raise CheckFailed(f"parameter {name} on rank(s) {odd} differs from that of the others")

    # ---- faults ----

    def corruption(self) -> str:
        """Change one bit on its way: the rank that gets it must refuse the frame, and no rank may go on.

        Raises:
            CheckFailed: some rank went on.
        """
        job, told = _Trained(self._whole, "marsit", seconds=10.0), ""
        if self._mine:
            job.transport.plant(self._ranks.size + 1, _damaged)
        try:
            for step in range(_STEPS):
                job.step(step)
        except ExchangeError as error:
            told = "refused" if isinstance(error, CorruptFrameError) else "stopped"
        finally:
            job.compression.close()
        every = self._gather(told, "corruption")
        if "" in every or "refused" not in every:
            raise CheckFailed(f"a changed bit was not refused: the ranks {every}")
        return f"rank {every.index('refused')} refused a frame with one bit changed; all stopped"

    def mismatch(self) -> str:
        """Give one rank another seed: all must refuse to start.

        Raises:
            CheckFailed: some rank started.
        """
        try:
            _Trained(self._whole, "qsgd", seed=int(self._mine)).compression.close()
            told = ""
        except MismatchError as error:
            told = str(error)
        every = self._gather(told, "mismatch")
        if not all("seed" in found for found in every):
            raise CheckFailed(f"a different seed on rank {self._victim} was not refused: {every}")
        return "a different seed on one rank was refused at the start, by name"

    def drift(self) -> str:
        """Change one bit of what one rank decodes: the comparison of results after the step must find it.

        Raises:
            CheckFailed: it was not found, or blamed on another rank.
        """
        job, told = _Trained(self._whole, "fp16", exchange="ring"), ""
        if self._ranks.rank == (self._victim - 1) % self._ranks.size:  # from which the victim has its results
            job.transport.plant(2 * self._ranks.size - 3, _forged)  # the last frame of the first bucket
        try:
            for step in range(_STEPS):
                job.step(step)
        except MismatchError as error:
            told = str(error)
        finally:
            job.compression.close()
        every = self._gather(told, "drift")
        # Of two ranks that differ nobody knows which is right, and the first is taken to be.
        if not all(f"on rank(s) {self._victim} differs" in found for found in every):
            raise CheckFailed(f"a changed bit of a result on rank {self._victim} was not found: {every}")
        return "one changed bit of a result was found in its step, by bucket and rank"


def _hash(tensor: Any) -> str:
    whole: Tensor = tensor.full_tensor() if is_divided(tensor) else tensor
    return hashlib.sha256(bytes_of(whole).numpy().tobytes()).hexdigest()


# ---- a rank ends ----


def lose_a_rank(ranks: Ranks, how: str, seconds: float) -> None:
    """Train, and let the last rank be killed or frozen in a step; the others leave what they saw."""
    ranks.barrier()  # some ranks start later than others, and what follows waits for `seconds` only
    job = _Trained(ranks.undivided(), "marsit", seconds=seconds)
    ranks.barrier()
    job.step(0)
    ranks.barrier()
    if ranks.rank == ranks.size - 1:

        def end(frame: Tensor) -> Tensor:
            local_ranks.leave("fault", time.monotonic())
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
            return frame

        job.transport.plant(1, end)  # in the middle of an exchange of the next step
    try:
        for step in range(1, _STEPS):
            job.step(step)
    except ExchangeError as error:
        local_ranks.leave("error", {"text": str(error), "at": time.monotonic()})
    else:
        local_ranks.leave("error", None)


def serve(begin: Callable[[], Ranks]) -> None:
    """Start ranks as they are asked for, see :func:`.local_ranks.serve`.

    Args:
        begin: joins a job.
    """
    # What torch imports when the first optimizer is made, some seconds' worth; forks have it from here.
    torch.optim.SGD([nn.Parameter(torch.zeros(1, device="cpu"))], lr=0.1)
    local_ranks.serve(lambda: main(begin()))


def main(ranks: Ranks) -> None:
    """Do what this rank was started for, and end the process."""
    what = local_ranks.task()
    torch.set_num_threads(1)
    if what["how"] == "checks":
        Checks(ranks, what["plant"], partial(local_ranks.leave, "checks")).run()
    else:
        lose_a_rank(ranks, what["how"], what["seconds"])
    os._exit(0)  # the framework would wait for the rank that is gone
