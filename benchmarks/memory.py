"""What every method keeps in memory, as a multiple of the model's gradients.

All tensors of the package are counted, by the memory that they hold, on one rank: what is kept from step to step
(residuals, momentum, tables), payloads and other buffers, and frames. Gradients are not counted, nor are the
connections. So the numbers do not depend on the machine.

    python -m benchmarks.memory --ranks 4 --elements 1000000
    python -m benchmarks.memory --json memory.json
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from horovod_compress.codecs import registry
from horovod_compress.codecs.base import Codec
from horovod_compress.engine.methods import parse
from horovod_compress.engine.reducer import Reducer
from horovod_compress.exchange.choose import Choose
from horovod_compress.exchange.transports.local import Hub
from horovod_compress.schedule.by_name import make_plan
from horovod_compress.schedule.plan import TensorSpec

#: Enough for every kind of round of the methods whose rounds differ.
STEPS = 12
SCHEDULE = "size:1MB"
COLUMNS = 1000


@dataclass(frozen=True)
class Memory:
    """What one rank holds, in multiples of the gradients.

    Attributes:
        kept: from step to step, and in checkpoints.
        buffers: payloads and whatever else is overwritten in each step.
        frames: of the exchange.
        created: before the first step.
        total: after some steps.
    """

    method: str
    ranks: int
    kept: float
    buffers: float
    frames: float
    created: float
    total: float


def measure(codec: Codec, ranks: int, elements: int, schedule: str = SCHEDULE) -> Memory:
    """Return what a rank holds with one method."""
    rows = max(elements // COLUMNS // 4, 1)
    tensors = [TensorSpec(f"layer{index}", (rows, COLUMNS), "float32") for index in range(4)]
    methods, options = parse(codec, {"schedule": schedule, "verify_every": 0})
    plan = make_plan(options.schedule, tensors, options.min_elements, methods.number)
    others = tensors_of_process()  # they stay, so that none of ours can take the place of one
    before = _bytes(others)
    reducers = [
        Reducer(plan, methods.codecs, transport, Choose(options.exchange, transport.adds), options)
        for transport in Hub(ranks).transports()
    ]
    try:
        gradients = 4 * sum(tensor.count for tensor in tensors)
        created = (_bytes(tensors_of_process()) - before) / ranks / gradients
        for _ in range(STEPS):
            _step(reducers, tensors)
        total = (_bytes(tensors_of_process()) - before) / ranks / gradients
        kept = sum(_bytes(kept_by(reducer)) for reducer in reducers) / ranks / gradients
        frames = sum(_bytes(frames_of(reducer)) for reducer in reducers) / ranks / gradients
    finally:
        for reducer in reducers:
            reducer.close()
    return Memory(codec.name, ranks, kept, total - kept - frames, frames, created, total)


def _step(reducers: Sequence[Reducer], tensors: Sequence[TensorSpec]) -> None:
    number = {name: index for index, name in enumerate(reducers[0].plan.names())}
    steps = [
        [reducer.offer(number[tensor.name], torch.ones(tensor.shape)) for tensor in tensors] for reducer in reducers
    ]

    def results(rank: int) -> None:
        for tensor, step in zip(tensors, steps[rank], strict=True):
            reducers[rank].result(number[tensor.name], step)

    with ThreadPoolExecutor(len(reducers)) as pool:
        list(pool.map(results, range(len(reducers))))
    for reducer in reducers:
        reducer.wait_idle(30.0)


def tensors_of_process() -> list[torch.Tensor]:
    """Return all tensors that there are, but for sparse ones, which none of ours is."""
    gc.collect()
    return [found for found in gc.get_objects() if type(found) is torch.Tensor and found.layout is torch.strided]


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes that tensors hold; what several share counts once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def kept_by(reducer: Reducer) -> list[torch.Tensor]:
    """Return what a reducer keeps from step to step."""
    states = [tensor for kept in reducer.kept.states().values() for tensor in kept.values()]
    return [*states, *reducer.kept.tables().values(), *reducer.kept.carries().values()]


def frames_of(reducer: Reducer) -> list[torch.Tensor]:
    return [buffer.memory for buffers in reducer.context.pool._buffers.values() for buffer in buffers]


def table(found: Sequence[Memory]) -> str:
    """Return the rows as Markdown."""
    lines = ["| method | kept | buffers | frames | in all |", "|---|---|---|---|---|"]
    lines += [f"| `{m.method}` | {m.kept:.2f} | {m.buffers:.2f} | {m.frames:.2f} | {m.total:.2f} |" for m in found]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every method with its default options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--elements", type=int, default=1_000_000, help="elements of the model")
    parser.add_argument("--schedule", default=SCHEDULE)
    parser.add_argument("--methods", default=",".join(registry.methods()), help="names, separated by commas")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    options = parser.parse_args(arguments)
    found = [
        measure(registry.codec_class(name)(), options.ranks, options.elements, options.schedule)
        for name in options.methods.split(",")
    ]
    print(table(found))
    if options.json:
        given = {"ranks": options.ranks, "elements": options.elements, "schedule": options.schedule}
        options.json.write_text(json.dumps({"options": given, "memory": [asdict(m) for m in found]}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
