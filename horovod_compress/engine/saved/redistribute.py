"""What ranks keep, dealt out to another number of ranks, so that nothing that waits is lost.

A step applies the mean over ranks, so what waits is the mean of the residuals: every new rank gets that. What a rank
keeps as the owner of elements, as an error of the mean itself, is added up and given to rank 0; a method hands over
what its rank does not own. What merging keeps belongs to places that another number of ranks does not have: it begins
with zeros. So do tables that hold codes, which do not add: averages of errors, which fade anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...errors import StateError
from . import checksums

#: Of a state: what is dealt out. What merging keeps is not.
_PARTS = ("state", "tables")
#: By tensor, in which ranks may differ: what waits for elements that rounds leave out.
_WAITING = "waiting"
_LEFT_OUT = (*_PARTS, "carries", _WAITING, checksums.KEY)


class _Sum:
    """What one tensor adds up to over all ranks that saved."""

    def __init__(self, first: Tensor) -> None:
        self._dtype, self._total, self._ranks = first.dtype, torch.zeros(first.shape, dtype=torch.float64), 0

    def add(self, tensor: Tensor) -> None:
        self._total += tensor
        self._ranks += 1

    def dealt(self, owned: bool, rank: int, ranks: int = 0) -> Tensor:
        """Return a new rank's share; of so many ranks that saved, where some have nothing of it."""
        if owned and rank:
            return self.zeros()
        return (self._total if owned else self._total / (ranks or self._ranks)).to(self._dtype)

    def zeros(self) -> Tensor:
        """Return the share of what does not add."""
        return torch.zeros_like(self._total, dtype=self._dtype)


def redistributed(
    states: Iterable[Mapping[str, Any]], rank: int, world: int, owned: Collection[str], coded: Collection[str] = ()
) -> dict[str, Any]:
    """Return the state of one rank of another number of ranks.

    Args:
        states: of all ranks that saved, in rank order; each is let go before the next one is asked for.
        owned: kinds of state that ranks keep as owners of elements.
        coded: names of tables that hold codes.

    Raises:
        StateError: the states are not of one checkpoint.
    """
    rest: dict[str, Any] = {}
    outline: Any = None
    sums: dict[str, Any] = {}
    waiting: dict[str, _Sum] = {}
    number = 0
    for state in states:
        if "hosts" in state:
            raise StateError(
                'the checkpoint was saved with exchange="hierarchical", and what waits belongs to shares of its hosts: '
                'resume on as many hosts with as many ranks, or pass residuals="reset"'
            )
        found = {part: _mapped(checksums.kind_of, state.get(part)) for part in _PARTS}
        if not number:
            rest, outline = {name: part for name, part in state.items() if name not in _LEFT_OUT}, found
            sums = {part: _mapped(_Sum, state[part]) for part in _PARTS}
        for part in _PARTS:
            if found[part] != outline[part]:
                raise StateError(
                    f"the saved {part} of rank {number} has different tensors from that of rank 0; load another "
                    "checkpoint"
                )
        for part in _PARTS:
            _add(sums[part], state[part])
        for name, tensor in state.get(_WAITING, {}).items():
            waiting.setdefault(name, _Sum(tensor)).add(tensor)
        number += 1
        del state  # as this loop would
    kept = {kind: _dealt(tensors, kind in owned, rank) for kind, tensors in sums["state"].items()}
    tables = {
        name: table.zeros() if name.partition(" ")[2] in coded else table.dealt(False, rank)  # "BUCKET NAME"
        for name, table in sums["tables"].items()
    }
    changed = {"rank": rank, "world": world, "state": kept, "tables": tables}
    if waiting:
        changed[_WAITING] = {name: found.dealt(False, rank, number) for name, found in waiting.items()}
    return checksums.sealed(rest | changed | {"carries": {}})


def _mapped(make: Callable[[Tensor], Any], part: Any) -> Any:
    """Return a part of a state with something made of each tensor; None for what is none."""
    if isinstance(part, Tensor):
        return make(part)
    return {name: _mapped(make, value) for name, value in part.items()} if isinstance(part, Mapping) else None


def _add(sums: Any, part: Any) -> None:
    if isinstance(sums, _Sum):
        sums.add(part)
        return
    for name, value in part.items():
        _add(sums[name], value)


def _dealt(sums: Mapping[str, _Sum], owned: bool, rank: int) -> dict[str, Tensor]:
    return {name: found.dealt(owned, rank) for name, found in sums.items()}
