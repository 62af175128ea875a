"""A flipped bit of any message of an exchange is noticed: no rank has a wrong result, or keeps anything of it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from horovod_compress.codecs.base import Algebra, Codec, variants_of
from horovod_compress.engine.saved import checkpoint
from horovod_compress.errors import CorruptFrameError, ExchangeError
from horovod_compress.exchange.transports.transport import Pending, Transport
from tests.battery.cases import each_case
from tests.battery.kept import kept_by, same
from tests.support.local import Fleet, random_grads, same_bits, spec
from tests.support.marks import slow
from tests.support.samples import Sample

WORLD, SENDER = 2, 1
TENSORS = [spec("a", 70), spec("b", 9)]
FEW = 12


class Flipping:
    """A transport that counts what is sent, and flips one bit of one message once it is told to."""

    def __init__(self, inner: Transport) -> None:
        self._inner, self.sizes, self.wanted = inner, list[int](), (-1, 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def send(self, data: Tensor, to: int) -> Pending:
        number, bit = self.wanted
        if len(self.sizes) == number:
            data = data.clone()
            data.view(torch.uint8).view(-1)[bit // 8] ^= 1 << bit % 8
        self.sizes.append(data.nbytes)
        return self._inner.send(data, to)


def _gathers(codec: Codec) -> bool:
    return any(kind.algebra is Algebra.GATHER for kind in variants_of(codec))


class Trial:
    """Two steps: one that is good, and one in which a bit may be flipped."""

    def __init__(self, case: Sample, flipped: tuple[int, int]) -> None:
        flipping: list[Flipping] = []

        def wrap(transport: Transport) -> Transport:
            if transport.rank != SENDER:
                return transport
            flipping.append(Flipping(transport))
            return flipping[0]  # type: ignore[return-value]

        with case.fleet(WORLD, TENSORS, schedule="single", verify_every=0, exchange="auto", wrap=wrap) as fleet:
            fleet.step(random_grads(WORLD, TENSORS))
            self.before = [{name: t.clone() for name, t in kept_by(reducer).items()} for reducer in fleet.reducers]
            flipping[0].sizes.clear()
            flipping[0].wanted = flipped
            self.results = self._ends(fleet)
            self.after = [{name: t.clone() for name, t in kept_by(reducer).items()} for reducer in fleet.reducers]
            self.saves = [self._saves(fleet, rank) for rank in range(WORLD)]
        self.sizes = flipping[0].sizes

    @staticmethod
    def _ends(fleet: Fleet) -> list[Any]:
        grads = random_grads(WORLD, TENSORS, seed=1)
        step = fleet.offer(grads)

        def end(rank: int) -> Any:
            try:
                return [fleet.reducers[rank].result(index, step).clone() for index in range(len(TENSORS))]
            except ExchangeError as error:
                return error

        with ThreadPoolExecutor(WORLD) as pool:
            return list(pool.map(end, range(WORLD)))

    @staticmethod
    def _saves(fleet: Fleet, rank: int) -> bool:
        try:
            checkpoint.save(fleet.reducers[rank], fleet.methods)
        except ExchangeError:
            return False
        return True


def _bits(sizes: list[int], few: int | None) -> Iterator[tuple[int, int]]:
    for number, size in enumerate(sizes):
        bits = range(8 * size)
        yield from ((number, bit) for bit in (bits if few is None else bits[:: max(1, len(bits) // few)]))


@each_case(_gathers)
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("few", [FEW, *slow(None)], ids=["few", "all"])
def test_every_flipped_bit_of_what_is_gathered_is_noticed(case: Sample, few: int | None) -> None:
    good = Trial(case, (-1, 0))  # the control
    assert all(isinstance(found, list) for found in good.results) and all(good.saves) and sum(good.sizes) > 0
    for flipped in _bits(good.sizes, few):
        trial = Trial(case, flipped)
        assert any(isinstance(found, CorruptFrameError) for found in trial.results), flipped
        for rank, found in enumerate(trial.results):
            if isinstance(found, list):  # this rank had all it needed before the other one failed
                assert all(same_bits(a, b) for a, b in zip(found, good.results[rank], strict=True)), flipped
                continue
            assert not trial.saves[rank], flipped
            # The other one may have been told in the middle of decoding what it had got: nobody can save that.
            assert rank == SENDER or same([trial.after[rank]], [trial.before[rank]]), flipped
