r"""Times training steps of a stand-in model for every contestant in turn; runs on every rank.

    horovodrun -np 4 -H a:1,b:1,c:1,d:1 python -m benchmarks.jobs.step --model resnet50 \
        --method headroom --method "horovod fp32" --method "marsit full_precision_every=0"

In every round each contestant takes a step with the stand-in compute, and one without, which is its
exchange alone. The clock runs from a barrier to a rank's own result; the slowest rank counts.
Contestants whose buffers would not fit into memory together run in groups, each beside `headroom`,
the contestant that exchanges nothing.
"""

from __future__ import annotations

import argparse
import gc
import resource
from collections.abc import Iterator

import horovod.torch as hvd
import torch
from torch import Tensor

from benchmarks import peers, shapes
from benchmarks.jobs.allreduce import LEAST, UNIT, fill_block
from benchmarks.jobs.rank import digest, gathered, optimizer_of, run_job, say, slowest, tell, tell_wrong, timed
from benchmarks.peers import base
from benchmarks.peers.base import Adapter
from benchmarks.peers.names import PeerError
from benchmarks.results import Record, spread_fields
from benchmarks.shapes import Table
from horovod_compress.cli.plan.synthetic import (
    TILE,
    ComputeClock,
    Gradients,
    SyntheticModel,
    calibrate,
    untouched_memory,
)

BASE_BYTES = 600e6  # of a rank without a model: Python, torch, Horovod
SEARCH_STEPS = 100  # that a contestant may take to find its buckets
COPIES = 2.2  # of the gradients, that a contestant keeps at most: residual or buckets, payload, frames

# ---- contestants ------------------------------------------------------------------------------


class Bench:
    """What the contestants share: the table, the gradients, the clock, memory for the parameters."""

    def __init__(self, table: Table, seconds: float, where: torch.device) -> None:
        self.table, self.pace, self.where = table, ComputeClock(seconds), where
        tile = torch.empty(min(TILE, table.count))
        self.gradients = Gradients(table, fill_block(tile, hvd.rank(), 0).to(where))
        on_cpu = where.type == "cpu"
        self.memory = untouched_memory(table.count) if on_cpu else torch.zeros(table.count, device=where)
        self.judge = Judge(len(tile))

    def model(self) -> SyntheticModel:
        return SyntheticModel(self.table, self.gradients, self.pace, self.memory)


class Contestant:
    """An adapter with a model of its own, and what was measured of it."""

    def __init__(self, adapter: Adapter, bench: Bench, optimizer: str) -> None:
        self.adapter, self._bench = adapter, bench
        self.seconds: list[float] = []  # of steps with compute
        self.alone: list[float] = []  # of steps without
        self.exchange: list[float] = []  # of the exchange phase in steps with compute
        self.sent = 0
        self._plain = bench.model()
        self._model, self._optimizer = adapter.wrap(self._plain, optimizer_of(optimizer, self._plain.parameters()))
        self._input = torch.zeros(1, device=bench.where)

    def step(self, compute: bool) -> float:
        """Take a step from a barrier on, and return its seconds on this rank."""
        self.forget()
        self._bench.gradients.refill()
        self._bench.pace.on = compute
        if self._input.is_cuda:
            torch.cuda.synchronize()
        return timed(self._turn)

    def _turn(self) -> None:
        loss = self._model(self._input)
        loss.backward()
        self._optimizer.step()
        if self._input.is_cuda:  # so far the result may be queued only
            torch.cuda.synchronize()

    def settle(self) -> None:
        """Take steps until the contestant has found what it looks for.

        Raises:
            PeerError: it does not come to an end.
        """
        for number in range(SEARCH_STEPS):
            if all(gathered(base.settled(self.adapter), "bench.settled")):
                return
            if number % 10 == 0:
                say(f"{self.adapter.name} is searching for buckets: step {number}")
            self.step(compute=True)
        raise PeerError(f"{self.adapter.name!r} has not settled after {SEARCH_STEPS} steps")

    def measure(self) -> None:
        """Take one step with compute and one without; both count."""
        before = base.stats_of(self.adapter)
        self.seconds.append(self.step(compute=True))
        after = base.stats_of(self.adapter)
        if "exchange" in after.get("seconds", {}):
            self.exchange.append(after["seconds"]["exchange"] - before["seconds"]["exchange"])
        self.sent += after.get("bytes_sent", 0) - before.get("bytes_sent", 0)
        self.alone.append(self.step(compute=False))

    def forget(self) -> None:
        """Let go of the gradients, which lie in memory that the next contestant uses too."""
        for parameter in self._plain.parameters():
            parameter.grad = None

    def results(self) -> list[tuple[int, Tensor]]:
        """Return the reduced gradients, flat, with their places in the gradients' memory."""
        starts = {name: view.storage_offset() for name, view in self._bench.gradients.views.items()}
        return [(starts[name], p.grad.reshape(-1)) for name, p in self._plain.named_parameters() if p.grad is not None]

    def wrong(self) -> int:
        """Return how many elements of the last results are wrong on any rank; unequal ranks count as one more."""
        check, results = base.check_of(self.adapter), self.results()
        missing = len(self._bench.table.tensors) - len(results)
        mine = missing + sum(self._bench.judge.wrong(values.cpu(), start, check) for start, values in results)
        found = gathered((mine, digest(values for _, values in results)), "bench.judged")
        unequal = check != "none" and len({hash_ for _, hash_ in found}) > 1
        return max(count for count, _ in found) + int(unequal)


class Judge:
    """Compares results with the float64 mean of all ranks' gradients, which repeats like the tile."""

    def __init__(self, tile: int) -> None:
        self._size, world = tile, hvd.size()
        total, magnitude = torch.zeros(tile, dtype=torch.float64), torch.zeros(tile, dtype=torch.float64)
        for rank in range(world):
            values = fill_block(torch.empty(tile), rank, 0).double()
            total += values
            magnitude += values.abs()
        self._mean, self._magnitude = total / world, magnitude / world
        self._roundings = world + 2

    def wrong(self, values: Tensor, start: int, check: str) -> int:
        """Count wrong elements of a flat tensor that begins at a place of the gradients' memory.

        Args:
            check: "float32" and "float16": further from the mean than rounding can explain;
                "identical": not finite; "none": nothing is wrong.
        """
        if check == "identical":
            return int((~torch.isfinite(values)).sum())
        if check not in UNIT:
            return 0
        wrong = 0
        for part, place in self._parts(values, start):
            error = (part.double() - self._mean[place : place + len(part)]).abs()
            magnitude = self._magnitude[place : place + len(part)]
            allowed = self._roundings * (UNIT[check] * magnitude + LEAST[check])
            wrong += int((~(error <= allowed)).sum())  # not "greater": NaN is wrong too
        return wrong

    def _parts(self, values: Tensor, start: int) -> Iterator[tuple[Tensor, int]]:
        at = 0
        while at < len(values):
            place = (start + at) % self._size
            part = values[at : at + self._size - place]
            yield part, place
            at += len(part)


# ---- the run ----------------------------------------------------------------------------------


def groups(adapters: list[Adapter], nbytes: int, memory: float) -> list[list[Adapter]]:
    """Part contestants into groups that fit into memory together, as equal as can be.

    Args:
        nbytes: of the model's gradients.
        memory: bytes a rank may use.
    """
    if not adapters:
        return [[]]
    together = max(1, int((memory - BASE_BYTES - nbytes) / (COPIES * nbytes)))
    count = -(-len(adapters) // together)
    return [adapters[len(adapters) * i // count : len(adapters) * (i + 1) // count] for i in range(count)]


def compete(group: list[Adapter], number: int, bench: Bench, chosen: argparse.Namespace) -> int:
    """Measure the contestants of a group and `headroom` in turns; return the wrong elements."""
    contestants = [Contestant(adapter, bench, chosen.optimizer) for adapter in [peers.adapter("headroom"), *group]]
    calibrate(bench.pace, lambda: contestants[0].step(compute=True))
    for contestant in contestants:
        for _ in range(base.warm_up_of(contestant.adapter, chosen.warm_up)):
            contestant.step(compute=False)
        contestant.settle()
        contestant.forget()
    gc.collect()
    gc.freeze()  # else a collection of all objects, a third of a second here, falls into some contestant's step
    wrong = [0] * len(contestants)
    for turn in range(chosen.repeat):
        say(f"group {number + 1}: round {turn + 1} of {chosen.repeat}")
        for place, contestant in enumerate(contestants):
            contestant.measure()
            if turn == chosen.repeat - 1:
                wrong[place] = contestant.wrong()
            contestant.forget()
    for contestant, count in zip(contestants, wrong, strict=True):
        tell(record_of(contestant, bench, number) | {"optimizer": chosen.optimizer, "wrong": count})
    tell_wrong(bench.table.model, [c.adapter.name for c, count in zip(contestants, wrong, strict=True) if count])
    hvd.barrier()  # nobody closes while another rank is still under way
    for contestant in contestants:
        base.close(contestant.adapter)
    return sum(wrong)


def record_of(contestant: Contestant, bench: Bench, group: int) -> Record:
    """Return what was measured, of the slowest rank in every step; all ranks take part."""
    adapter, steps = contestant.adapter, len(contestant.seconds)
    stats = base.stats_of(adapter)
    sent = max(gathered(contestant.sent, "bench.sent")) / steps
    exchange = slowest(contestant.exchange, "bench.exchange")
    peak = max(gathered(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "bench.peak"))
    return {
        "bench": "step",
        "name": adapter.name,
        "model": bench.table.model,
        "parameters": bench.table.count,
        "tensors": len(bench.table.tensors),
        "ranks": hvd.size(),
        "device": torch.cuda.get_device_name(bench.where) if bench.where.type == "cuda" else "cpu",
        "compute_seconds": bench.pace.seconds,
        "group": group,
        "repeats": steps,
        "check": base.check_of(adapter),
        "bytes_sent": round(sent) if stats else None,
        "bytes_computed": bool(stats.get("bytes_computed")),
        "buckets": stats.get("buckets"),
        "plain_buckets": stats.get("plain_buckets"),
        "collectives": stats.get("collectives"),
        "process_peak_memory_bytes": peak,  # since the rank began, whatever ran before
        **spread_fields("seconds", slowest(contestant.seconds, "bench.seconds")),
        **spread_fields("alone_seconds", slowest(contestant.alone, "bench.alone")),
        **(spread_fields("exchange_seconds", exchange) if exchange else {"median_exchange_seconds": None}),
    }


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="resnet50", help=f"{', '.join(shapes.models())}, or a CSV file of the same form"
    )
    parser.add_argument("--compute-ms", type=float, default=300.0, help="compute time of a step, forward and backward")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the gradients are")
    parser.add_argument("--optimizer", choices=("none", "sgd"), default="none", help="whose steps are part of a step")
    parser.add_argument("--method", action="append", default=[], help="a contestant; may be given several times")
    parser.add_argument("--peer", action="append", default=[], metavar="FILE", help="a file with more contestants")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--warm-up", type=int, default=2, help="warm-up steps, which are not counted (default 2)")
    parser.add_argument("--memory", type=float, default=4.5, metavar="GB", help="memory of a rank (default 4.5)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    chosen = arguments(argv)
    return run_job(lambda: measure(chosen))


def place(device: str) -> torch.device:
    """Return where this rank's gradients are: ranks of a host share its GPUs."""
    if device == "cpu":
        return torch.device("cpu")
    where = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
    torch.cuda.set_device(where)
    return where


def measure(chosen: argparse.Namespace) -> int:
    """Measure all contestants, group by group, and return the wrong elements."""
    try:
        table = shapes.load(chosen.model)
    except ValueError as error:
        raise PeerError(str(error)) from error
    bench = Bench(table, chosen.compute_ms / 1000, place(chosen.device))
    adapters = peers.adapters([name for name in chosen.method if name != "headroom"], chosen.peer)
    waiting, number, wrong = groups(adapters, table.nbytes, 1e9 * chosen.memory), 0, 0
    adapters.clear()  # an adapter that is done must not keep its buffers
    while waiting:
        wrong += compete(waiting.pop(0), number, bench, chosen)
        number += 1
        gc.unfreeze()
        gc.collect()  # optimizers, hooks and parameters hold each other
    return wrong


if __name__ == "__main__":
    raise SystemExit(main())
