"""What ranks keep, dealt out to another number of ranks, so that nothing that waits is lost.

A step applies the mean over ranks, so what waits is the mean of the residuals: every new rank gets that. What a rank
keeps as the owner of elements, as an error of the mean itself, is added up and given to rank 0; a method hands over
what its rank does not own. What merging keeps belongs to places that another number of ranks does not have: it begins
with zeros.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import StateError
from . import sealed


def redistributed(states: Sequence[Mapping[str, Any]], rank: int, world: int, owned: Collection[str]) -> dict[str, Any]:
    """Return the state of one rank of another number of ranks.

    Args:
        states: of all ranks that saved, in rank order.
        owned: kinds of state that ranks keep as owners of elements.

    Raises:
        StateError: the states are not of one checkpoint.
    """
    first = states[0]
    for kind in ("state", "tables"):
        _check_alike(kind, [state.get(kind) for state in states])
    kept = {
        kind: {name: _dealt([state["state"][kind][name] for state in states], kind in owned, rank) for name in tensors}
        for kind, tensors in first["state"].items()
    }
    tables = {name: _dealt([state["tables"][name] for state in states], False, rank) for name in first["tables"]}
    rest = {name: part for name, part in first.items() if name != sealed.KEY}
    changed = {"rank": rank, "world": world, "state": kept, "tables": tables, "carries": {}}
    return sealed.sealed(rest | changed)


def _dealt(tensors: Sequence[Tensor], owned: bool, rank: int) -> Tensor:
    if owned and rank:
        return torch.zeros_like(tensors[0])
    total = torch.zeros(tensors[0].shape, dtype=torch.float64)
    for tensor in tensors:
        total += tensor
    return (total if owned else total / len(tensors)).to(tensors[0].dtype)


def _check_alike(kind: str, parts: Sequence[Any]) -> None:
    outlines = [_kinds(part) for part in parts]
    if any(outline != outlines[0] for outline in outlines):
        odd = next(rank for rank, outline in enumerate(outlines) if outline != outlines[0])
        raise StateError(
            f"the saved {kind} of rank {odd} has other tensors than that of rank 0; load another checkpoint"
        )


def _kinds(part: Any) -> Any:
    if isinstance(part, Tensor):
        return f"{part.dtype} {list(part.shape)}"
    return {name: _kinds(value) for name, value in part.items()} if isinstance(part, Mapping) else None
