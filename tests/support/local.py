"""Ranks in one process, over the ``local`` transport: no Horovod, no network, milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from horovod_compress.codecs.base import Codec
from horovod_compress.engine.bucket.shares import nbytes_of
from horovod_compress.engine.methods import Methods, parse
from horovod_compress.engine.reducer import Hooks, Reducer
from horovod_compress.engine.saved import checkpoint
from horovod_compress.exchange.choose import Choose
from horovod_compress.exchange.device import Device
from horovod_compress.exchange.hosts import LocalHost, groups
from horovod_compress.exchange.transports.local import Hub
from horovod_compress.exchange.transports.transport import Transport
from horovod_compress.schedule.by_name import make_plan
from horovod_compress.schedule.plan import Plan, TensorSpec

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def spec(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec(name, shape, str(dtype).removeprefix("torch."))


class Fleet:
    """The reducers of all ranks, driven from one thread: offering never blocks.

    Args:
        tensors: in plan order.
        method: a codec, the name of one, or several.
        wrap: makes a rank's transport of the local one.
        devices: returns what makes the devices of a rank with a transport, None for the usual ones.
        hosts: of the ranks, which share memory on each; 0 for ranks that do not.
        hooks: what the reducers ask of their framework.
        options: the codec's own and the common ones.
    """

    def __init__(
        self,
        world: int,
        tensors: Sequence[TensorSpec],
        method: str | Codec | Methods = "marsit",
        *,
        wrap: Callable[[Transport], Transport] = lambda transport: transport,
        devices: Callable[[Transport], Callable[[str], Device] | None] = lambda transport: None,
        hosts: int = 0,
        hooks: Hooks | None = None,
        **options: Any,
    ) -> None:
        self.world, self.tensors = world, list(tensors)
        self.methods, self.options = parse(method, {"schedule": "single", "timeout": 20.0} | options)
        self.plan: Plan = make_plan(self.options.schedule, self.tensors, self.options.min_elements, self.methods.number)
        transports = [wrap(transport) for transport in Hub(world).transports()]
        self.hosts = _hosts(transports, hosts, self.tensors) if hosts else [None] * world
        self.reducers = [
            Reducer(
                self.plan,
                self.methods.codecs,
                transport,
                Choose(self.options.exchange, () if hosts else transport.adds),
                self.options,
                devices(transport),
                hooks,
                host,
            )
            for transport, host in zip(transports, self.hosts, strict=True)
        ]
        self._index = {name: index for index, name in enumerate(self.plan.names())}

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for reducer in self.reducers:
            reducer.close()

    def offer(self, grads: Sequence[Mapping[str, Tensor]], order: Iterable[str] | None = None) -> int:
        """Offer the gradients of every rank; they are overwritten."""
        step = -1
        for reducer, mine in zip(self.reducers, grads, strict=True):
            for name in order or mine:
                step = reducer.offer(self._index[name], mine[name])
        return step

    def step(self, grads: Sequence[Mapping[str, Tensor]], result_scale: float | None = None) -> list[dict[str, Tensor]]:
        """Reduce copies of the gradients; return the results per rank, by name."""
        copies = [{name: grad.clone() for name, grad in mine.items()} for mine in grads]
        step = self.offer(copies)

        def results(rank: int) -> dict[str, Tensor]:
            reducer = self.reducers[rank]
            return {name: reducer.result(self._index[name], step, result_scale) for name in copies[rank]}

        if result_scale is None:
            return [results(rank) for rank in range(self.world)]
        with ThreadPoolExecutor(self.world) as pool:  # all ranks wait at once, as in a job
            return list(pool.map(results, range(self.world)))

    def residuals(self) -> list[dict[str, Tensor]]:
        """Return copies of every rank's residuals."""
        return [{n: r.clone() for n, r in reducer.kept.residuals().items()} for reducer in self.reducers]

    def load(self, states: Sequence[dict[str, Any]], residuals: str = "restore") -> None:
        for reducer, state in zip(self.reducers, states, strict=True):
            checkpoint.load(reducer, self.methods, state, residuals)

    def resume(self, step: int) -> None:
        for reducer in self.reducers:
            assert reducer.wait_idle(10.0)
            reducer.resume(step)


def _hosts(transports: Sequence[Transport], number: int, tensors: Sequence[TensorSpec]) -> list[LocalHost]:
    """Return the hosts of ranks that are threads, as each rank sees its own."""
    ranks = len(transports) // number
    of_hosts = [list(range(first, first + ranks)) for first in range(0, len(transports), ranks)]
    memories = [
        [torch.zeros(nbytes_of(tensors, place, ranks), dtype=torch.uint8) for place in range(ranks)] for _ in of_hosts
    ]
    return [
        LocalHost(*groups(transport, transport.for_decoding, of_hosts), memories[transport.rank // ranks])
        for transport in transports
    ]


def one_tensor(world: int, count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return a gradient per rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, generator=generator, dtype=torch.float64).to(dtype) for _ in range(world)]


def random_grads(
    world: int, tensors: Sequence[TensorSpec], seed: int = 0, scale: float = 1.0
) -> list[dict[str, Tensor]]:
    """Return gradients per rank, by name."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            t.name: (scale * torch.randn(t.shape, generator=generator, dtype=torch.float64)).to(getattr(torch, t.dtype))
            for t in tensors
        }
        for _ in range(world)
    ]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal in every bit; NaN equals NaN of the same payload."""
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    kind = _INTEGERS[a.element_size()]
    return torch.equal(a.contiguous().view(-1).view(kind), b.contiguous().view(-1).view(kind))


def all_same(results: Sequence[Mapping[str, Tensor]]) -> bool:
    """Return whether every rank holds the same bits."""
    first = results[0]
    return all(
        mine.keys() == first.keys() and all(same_bits(first[name], mine[name]) for name in first)
        for mine in results[1:]
    )
