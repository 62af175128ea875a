"""What reducers keep from step to step, of every kind, as one flat list that can be compared."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from horovod_compress.engine.reducer import Reducer
from tests.support.local import Fleet, same_bits

Kept = list[dict[str, Tensor]]


def kept_by(reducer: Reducer, tensors: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Return views of every kind of state; unless only some tensors are asked for, of tables and carries too."""
    found = {f"{kind} of {n}": t for kind, those in reducer.kept.states().items() for n, t in those.items()}
    if tensors is not None:
        wanted = set(tensors)
        return {name: t for name, t in found.items() if name.split(" of ", 1)[1] in wanted}
    tables = {f"table {name}": t for name, t in reducer.kept.tables().items()}
    return found | tables | {f"carry {name}": t for name, t in reducer.kept.carries().items()}


def kept(fleet: Fleet) -> Kept:
    """Return copies of all that every rank keeps."""
    return [{name: t.clone() for name, t in kept_by(reducer).items()} for reducer in fleet.reducers]


def empty(fleet: Fleet) -> None:
    """Let every rank forget all, between two steps."""
    for reducer in fleet.reducers:
        assert reducer.wait_idle(5.0)
        for tensor in kept_by(reducer).values():
            tensor.zero_()


def same(a: Kept, b: Kept) -> bool:
    """Return whether two lists by rank of tensors by name are equal in every bit."""
    return all(x.keys() == y.keys() and all(same_bits(x[n], y[n]) for n in x) for x, y in zip(a, b, strict=True))


def anything(found: Kept) -> bool:
    """Return whether any value is not zero."""
    return any(bool(torch.count_nonzero(tensor)) for mine in found for tensor in mine.values())
