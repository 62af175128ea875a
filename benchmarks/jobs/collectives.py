r"""Times ring, fold, torus and the transport's own sum of float32 numbers, by themselves; runs on every rank.

    sudo python -m benchmarks.lab --ranks 4 --rate 1gbit -- benchmarks/jobs/collectives.py --sizes 1e3,1e5,1e7

Collectives take turns, after a meeting of all ranks. A line has the milliseconds of the slowest rank: least, quartiles.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence

import horovod.torch as hvd
import torch
from torch import Tensor, nn

import horovod_compress.torch as hvc
from horovod_compress import ops
from horovod_compress.exchange import everywhere, fold, native, ring, torus
from horovod_compress.exchange.collective import Collective, Exchange, FramePiece, FramePool, Partition
from horovod_compress.exchange.device import Deadline
from horovod_compress.exchange.wire import NonFiniteCount

SECONDS = 120.0
MOST_TURNS, LEAST_TURNS, WARM_UP = 400, 5, 2


class Sum:
    """Adds payloads up; see :class:`horovod_compress.exchange.collective.Reduction`."""

    def prepare(self, chunk: int) -> None:
        pass

    def merge(self, piece: FramePiece, other: Tensor, weights: tuple[int, int], hop: int) -> None:
        ops.dense_add(piece.values, other)

    def fold(self, piece: FramePiece, others: Sequence[Tensor]) -> None:
        for other in others:
            ops.dense_add(piece.values, other)

    def complete(self, chunk: int, bad: NonFiniteCount) -> None:
        pass


def turns(size: int, seconds: float, begin: Callable[[], Exchange]) -> dict[str, list[float]]:
    """Return the seconds of each collective's turns on this rank."""
    world = hvd.size()
    collectives: list[Collective] = [ring, fold, *([torus.of(world)] if world > 2 else []), native]
    partition = Partition.of({"numbers": torch.zeros(size // 4)}, world)
    found: dict[str, list[float]] = {each.name: [] for each in collectives}
    end, number = 0.0, 0
    while True:
        for place in range(len(collectives)):
            each = collectives[(place + number) % len(collectives)]
            everywhere.all_gather(begin(), torch.zeros(0, dtype=torch.uint8))
            began = time.perf_counter()
            each.run(begin(), partition, Sum())
            found[each.name].append(time.perf_counter() - began)
        number += 1
        end = end or time.monotonic() + seconds
        over = number >= WARM_UP + LEAST_TURNS and (time.monotonic() > end or number >= MOST_TURNS)
        votes, _ = everywhere.all_gather(begin(), torch.tensor([over], dtype=torch.uint8))
        if any(bool(vote) for vote in votes):
            return {name: seconds[WARM_UP:] for name, seconds in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1e3,1e4,1e5,3e5,1e6,3e6,1e7,1e8", help="bytes, separated by commas")
    parser.add_argument("--seconds", type=float, default=8.0, help="for each size (default 8)")
    chosen = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    compression = hvc.Compression.create("none", [("only", nn.Parameter(torch.zeros(4)))])
    transport, pool = compression._here().reducer.context.transport, FramePool()

    def begin() -> Exchange:
        return Exchange(transport, 0, 0, 0, NonFiniteCount(), Deadline(SECONDS), pool, lambda event, hop: None)

    for size in (int(float(word)) for word in chosen.sizes.split(",")):
        mine = turns(size, chosen.seconds, begin)
        table = torch.tensor(list(mine.values()), dtype=torch.float64)
        found, _ = everywhere.all_gather(begin(), table.view(-1).view(torch.uint8))
        slowest = torch.stack([one.view(torch.float64).view_as(table) for one in found]).amax(dim=0)
        quartiles = (1e3 * slowest.quantile(torch.tensor([0, 0.25, 0.5, 0.75], dtype=torch.float64), dim=1)).T
        if hvd.rank() == 0:
            told = dict(zip(mine, (([round(q, 3) for q in row.tolist()]) for row in quartiles), strict=True))
            print(json.dumps({"ranks": hvd.size(), "bytes": size, "turns": table.shape[1]} | told), flush=True)
    hvd.barrier()
    compression.close()


if __name__ == "__main__":
    main()
