r"""Times the mean of one tensor over all ranks, for every contestant in turn; runs on every rank.

    horovodrun -np 4 -H a:1,b:1,c:1,d:1 python -m benchmarks.jobs.allreduce --elements 25000000 \
        --method "horovod fp32" --method "marsit ring full_precision_every=0"

A contestant that has an all-reduce of its own is called directly; the others reduce the gradient of
a model with one parameter, whose backward pass hands over a gradient made before. Gradients are
refilled before every turn, and the clock runs from a barrier to a rank's own result.
"""

from __future__ import annotations

import argparse
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn

from benchmarks import peers
from benchmarks.jobs.rank import NullOptimizer, digest, gathered, run_job, say, slowest, tell, tell_wrong, timed
from benchmarks.peers import base
from benchmarks.peers.base import Adapter
from benchmarks.results import Record, near_square, size_text, spread_fields

BLOCK = 1 << 20  # elements that share a random seed
UNIT = {"float32": 2.0**-24, "float16": 2.0**-11}  # the largest relative error of one rounding
LEAST = {"float32": 2.0**-149, "float16": 2.0**-24}  # the smallest number: rounding errs by half of it


# ---- the tensor -------------------------------------------------------------------------------


def fill(out: Tensor, rank: int) -> Tensor:
    """Fill a flat tensor with the gradient of a rank: normal numbers, the same wherever they are made."""
    for block, start in enumerate(range(0, out.numel(), BLOCK)):
        fill_block(out[start : start + BLOCK], rank, block)
    return out


def fill_block(out: Tensor, rank: int, block: int) -> Tensor:
    return out.normal_(generator=torch.Generator().manual_seed(1_000_003 * rank + block))


def wrong_elements(result: Tensor, check: str, rank: int, world: int) -> int:
    """Count elements of this rank's share of a result that are wrong.

    Args:
        result: flat, float32.
        check: "float32" and "float16": further from the float64 mean of all ranks' gradients than
            rounding can explain; "identical": not finite; "none": nothing is wrong.
    """
    wrong = 0
    for block in range(rank, -(-result.numel() // BLOCK), world):
        part = result[block * BLOCK : (block + 1) * BLOCK]
        if check == "identical":
            wrong += int((~torch.isfinite(part)).sum())
        elif check in UNIT:
            wrong += far_from_mean(part, check, block, world)
    return wrong


def far_from_mean(part: Tensor, check: str, block: int, world: int) -> int:
    """Count elements further from the mean than world + 2 roundings of the sum of magnitudes allow."""
    total, magnitude = torch.zeros_like(part, dtype=torch.float64), torch.zeros_like(part, dtype=torch.float64)
    for rank in range(world):
        gradient = fill_block(torch.empty_like(part), rank, block).double()
        total += gradient
        magnitude += gradient.abs()
    allowed = (world + 2) * (UNIT[check] * magnitude / world + LEAST[check])
    # Not "greater": NaN is wrong too.
    return int((~((part.double() - total / world).abs() <= allowed)).sum())


# ---- the model --------------------------------------------------------------------------------


class Handed(torch.autograd.Function):
    """Hands a gradient over that was made before, so that the backward pass computes nothing."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, model: OneTensor) -> Tensor:
        ctx.model = model
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, output: Tensor) -> tuple[Tensor, None]:
        # Nobody else keeps it, as of a gradient that is computed: so it is taken over instead of being copied.
        gradient, ctx.model.gradient = ctx.model.gradient, None
        return gradient, None


class OneTensor(nn.Module):
    """A model with one parameter, near square, whose gradient is given before each pass."""

    def __init__(self, memory: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(memory.view(near_square(memory.numel())))
        self.gradient: Tensor | None = None

    def forward(self, unused: Tensor) -> Tensor:
        return Handed.apply(self.weight, self)  # type: ignore[no-untyped-call]


# ---- contestants ------------------------------------------------------------------------------


class Contestant:
    """An adapter with a model of its own, and what was measured of it.

    Args:
        memory: of the parameters, shared by all contestants: nobody changes them.
        gradient: of this rank, flat; shared by those that are called directly, and refilled before every turn.
    """

    def __init__(self, adapter: Adapter, memory: Tensor, gradient: Tensor) -> None:
        self.adapter, self.gradient = adapter, gradient
        self.seconds: list[float] = []
        self.exchange: list[float] = []
        self.sent = 0
        self._direct = base.allreduce_of(adapter)
        if not self._direct:
            self._plain = plain = OneTensor(memory)
            self._model, self._optimizer = adapter.wrap(plain, NullOptimizer(plain.parameters()))
        self._input = torch.zeros(1)

    def prepare(self, source: Tensor) -> None:
        if self._direct:
            self.gradient.copy_(source)
        else:
            self._plain.weight.grad = None  # first: memory for one of them is enough
            self._plain.gradient = source.clone().view_as(self._plain.weight)

    def turn(self) -> None:
        if self._direct:
            self._direct(self.gradient)
            return
        loss = self._model(self._input)
        loss.backward()
        self._optimizer.step()

    def result(self) -> Tensor:
        found = self.gradient if self._direct else self._plain.weight.grad
        assert found is not None, f"{self.adapter.name} left no gradient"
        return found.reshape(-1)

    def measure(self, source: Tensor) -> None:
        """Take a turn that counts."""
        self.prepare(source)
        before = base.stats_of(self.adapter)
        self.seconds.append(timed(self.turn))
        after = base.stats_of(self.adapter)
        self.sent += after.get("bytes_sent", 0) - before.get("bytes_sent", 0)

    def measure_exchange(self) -> None:
        """Time the exchange by itself, where the adapter can: in a turn it overlaps with decoding."""
        if alone := base.exchange_of(self.adapter):
            self.exchange.append(timed(alone))


def record_of(contestant: Contestant, wrong: int) -> Record:
    """Return what was measured, of the slowest rank in every turn; all ranks take part."""
    adapter, turns = contestant.adapter, len(contestant.seconds)
    stats = base.stats_of(adapter)
    sent = gathered((contestant.sent, stats.get("bytes_sent", 0)), "bench.sent")
    exchange = slowest(contestant.exchange, "bench.exchange")
    record = {
        "bench": "allreduce",
        "name": adapter.name,
        "ranks": hvd.size(),
        "elements": contestant.gradient.numel(),
        "bytes": 4 * contestant.gradient.numel(),
        "repeats": turns,
        "check": base.check_of(adapter),
        "wrong": wrong,
        "bytes_sent": round(max(mine for mine, _ in sent) / turns) if stats else None,
        "bytes_computed": bool(stats.get("bytes_computed")),
        "bytes_sent_all": sum(total for _, total in sent) if stats else None,
        "collectives": stats.get("collectives"),
        **spread_fields("seconds", slowest(contestant.seconds, "bench.seconds")),
    }
    return record | (spread_fields("exchange_seconds", exchange) if exchange else {"median_exchange_seconds": None})


def judged(contestant: Contestant) -> int:
    """Return how many elements of the last result are wrong, over all ranks; unequal ranks count as one more."""
    check, result = base.check_of(contestant.adapter), contestant.result()
    mine = wrong_elements(result, check, hvd.rank(), hvd.size())
    found = gathered((mine, digest([result])), "bench.judged")
    unequal = check != "none" and len({hash_ for _, hash_ in found}) > 1
    return sum(count for count, _ in found) + int(unequal)


def compete(elements: int, adapters: list[Adapter], repeat: int, warm_up: int) -> int:
    """Measure all contestants with one size, in turns, tell their records, and return the wrong elements."""
    source = fill(torch.empty(elements), hvd.rank())
    memory, gradient = torch.zeros(elements), source.clone()
    contestants = [Contestant(adapter, memory, gradient) for adapter in adapters]
    for contestant in contestants:
        for _ in range(base.warm_up_of(contestant.adapter, warm_up)):
            contestant.prepare(source)
            timed(contestant.turn)
    wrong = [0] * len(contestants)
    for number in range(repeat):
        say(f"{size_text(4 * elements)}: round {number + 1} of {repeat}")
        for place, contestant in enumerate(contestants):
            contestant.measure(source)
            if number == repeat - 1:
                wrong[place] = judged(contestant)
            contestant.measure_exchange()
    for contestant, count in zip(contestants, wrong, strict=True):
        tell(record_of(contestant, count))
    tell_wrong(size_text(4 * elements), [c.adapter.name for c, count in zip(contestants, wrong, strict=True) if count])
    hvd.barrier()  # nobody closes while another rank is still under way
    for contestant in contestants:
        base.close(contestant.adapter)
    return sum(wrong)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", default="25000000", help="numbers of float32 elements, separated by commas")
    parser.add_argument("--method", action="append", default=[], help="a contestant; may be given several times")
    parser.add_argument("--peer", action="append", default=[], metavar="FILE", help="a file with more contestants")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=2, help="warm-up turns, which are not counted (default 2)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    chosen = arguments(argv)
    return run_job(lambda: measure(chosen))


def measure(chosen: argparse.Namespace) -> int:
    """Measure all sizes and return the wrong elements."""
    wrong = 0
    for elements in map(int, chosen.elements.split(",")):
        # New adapters for every size: each makes its own buckets and connections.
        wrong += compete(elements, peers.adapters(chosen.method, chosen.peer), chosen.repeat, chosen.warm_up)
    return wrong


if __name__ == "__main__":
    raise SystemExit(main())
