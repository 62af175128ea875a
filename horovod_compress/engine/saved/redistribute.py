"""What ranks keep, dealt out to another number of ranks, so that nothing that waits is lost.

A step applies the mean over ranks, so what waits is the mean of the residuals: every new rank gets that. Where it
applies the sum, M ranks' residuals count M times their mean, and each of M' new ranks gets M / M' of it. What a rank
keeps as the owner of elements, as an error of the mean itself, is added up and given to rank 0; a method hands over
what its rank does not own. What merging keeps belongs to places that another number of ranks does not have: it begins
with zeros. So do tables that hold codes, which do not add: averages of errors, which fade anyway.

A checkpoint is dealt out by :func:`redistributed`. In a job that goes on with other ranks, :func:`pooled` comes to the
same while all ranks of before are still there. Where one of them is gone, the others keep what they have, and
:func:`resized` lets it count as before: with M ranks a residual e enters the mean as e / M. Momentum does not wait to
be sent: it is a running sum of one rank's gradients, whatever the number of ranks. So it is never multiplied, and what
a rank that is gone had of it is not added to another's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...codecs.work import LAST, MOMENTA
from ...errors import StateError
from ...ops.checksums import hash_of
from . import checksums

#: Of a state, if it is so: results were sums over ranks.
_SUMMED = "summed"
#: Of a state: what is dealt out. What merging keeps is not.
_PARTS = ("state", "tables")
#: By tensor, in which ranks may differ: what waits for elements that rounds leave out.
_WAITING = "waiting"
_LEFT_OUT = (*_PARTS, "carries", _WAITING, checksums.KEY)
_MOST_SHORT = float.fromhex("0x1.fffffep95")  # from which 16 bits would be too large, see csrc/rules/kept.h


def rounded(values: Tensor, dtype: torch.dtype, rank: int) -> Tensor:
    """Return what a rank goes on with of numbers that are equal on all; right on average over ranks in 16 bits, too.

    Of the same numbers, a rank comes to the same; other numbers are rounded by other draws.
    """
    if dtype is not torch.bfloat16:
        return values.to(dtype)
    seed = torch.Generator().manual_seed((hash_of([values]) + rank) % (1 << 63))
    draws = torch.randint(1 << 16, values.shape, dtype=torch.int32, generator=seed, device="cpu").to(values.device)
    bits = values.clamp(-_MOST_SHORT, _MOST_SHORT).float().view(torch.int32)
    draws[bits & 0x7FFFFFFF >= 0x6F7F0000] = 0  # as in csrc/rules/kept.h; what is kept is finite
    return (bits + draws >> 16).to(torch.int16).view(torch.bfloat16)


class _Sum:
    """What one tensor adds up to over all ranks that saved."""

    def __init__(self, first: Tensor) -> None:
        self._dtype, self._ranks = first.dtype, 0
        self._total = torch.zeros(first.shape, dtype=torch.float64, device="cpu")

    def add(self, tensor: Tensor) -> None:
        self._total += tensor
        self._ranks += 1

    def dealt(self, owned: bool, rank: int, ranks: int = 0, times: float = 1.0) -> Tensor:
        """Return a new rank's share, so many times; of so many ranks that saved, where some have nothing of it."""
        if owned and rank:
            return self.zeros()
        share = self._total if owned else self._total / (ranks or self._ranks)
        return rounded(share * times, self._dtype, rank)

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
    times = number / world if rest.get(_SUMMED) else 1.0
    kept = {
        kind: _dealt(tensors, kind in owned, rank, 1.0 if kind in MOMENTA else times)
        for kind, tensors in sums["state"].items()
    }
    tables = {
        name: table.zeros() if _holds_codes(name, coded) else table.dealt(False, rank)
        for name, table in sums["tables"].items()
    }
    changed = {"rank": rank, "world": world, "state": kept, "tables": tables}
    if waiting:
        changed[_WAITING] = {name: found.dealt(False, rank, number, times) for name, found in waiting.items()}
    return checksums.sealed(rest | changed | {"carries": {}})


def _holds_codes(table: str, coded: Collection[str]) -> bool:
    """Return whether a table, "BUCKET NAME", holds codes: it is each rank's own then, and else equal on all."""
    return table.partition(" ")[2] in coded


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


def _dealt(sums: Mapping[str, _Sum], owned: bool, rank: int, times: float) -> dict[str, Tensor]:
    return {name: found.dealt(owned, rank, times=times) for name, found in sums.items()}


# ---- in a job that goes on -----------------------------------------------------------------------


def pooled(
    state: Mapping[str, Any],
    add_up: Callable[[Tensor], object],
    ranks: int,
    owned: Collection[str],
    coded: Collection[str],
    waiting: Mapping[str, int],
) -> dict[str, Any]:
    """Return what every rank of another number of ranks begins with; all ranks call this, each with its own state.

    Of what is owned only one rank may keep it. A last result is equal on all ranks, and stays as it is.

    Args:
        add_up: lets a tensor in host memory be its sum over ranks.
        owned: kinds of state that ranks keep as owners of elements.
        coded: names of tables that hold codes.
        waiting: the tensors for which something waits on any rank, with their numbers of elements.
    """
    each = sorted(state["state"].items())
    places = [(kind, name) for kind, tensors in each if kind != LAST for name in sorted(tensors)]
    kept: dict[str, dict[str, Tensor]] = {kind: dict(tensors) if kind == LAST else {} for kind, tensors in each}
    mine = [state["state"][kind][name] for kind, name in places]
    wide = [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in mine]
    for (kind, name), tensor, total in zip(places, mine, _totals(wide, add_up), strict=True):
        kept[kind][name] = rounded(total if kind in owned else total.div_(ranks), tensor.dtype, state["rank"])
    tables = {name: torch.zeros_like(t) if _holds_codes(name, coded) else t for name, t in state["tables"].items()}
    changed: dict[str, Any] = {"state": kept, "tables": tables, "carries": {}}
    if waiting:
        own, names = state.get(_WAITING, {}), sorted(waiting)
        totals = _totals([own[n].double() if n in own else _zeros(waiting[n]) for n in names], add_up)
        kinds = [own[name].dtype if name in own else torch.float32 for name in names]
        changed[_WAITING] = {
            name: total.div_(ranks).to(kind) for name, total, kind in zip(names, totals, kinds, strict=True)
        }
    return checksums.sealed({name: part for name, part in state.items() if name != checksums.KEY} | changed)


def _zeros(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.float64, device="cpu")


def _totals(tensors: Sequence[Tensor], add_up: Callable[[Tensor], object]) -> list[Tensor]:
    """Return the sums over ranks of tensors, which lie one after the other: so few sums take all of them."""
    found: dict[int, Tensor] = {}
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        places = [place for place, tensor in enumerate(tensors) if tensor.dtype is dtype]
        whole = torch.cat([tensors[place].reshape(-1) for place in places])
        add_up(whole)
        found.update(zip(places, whole.split([tensors[place].numel() for place in places]), strict=True))
    return [found[place].view(tensor.shape) for place, tensor in enumerate(tensors)]


@dataclass(frozen=True)
class Carried:
    """How much of what a rank has kept counts among other ranks.

    Attributes:
        waits: what waits is multiplied by this.
        owned: and this, what is kept as the owner of elements.
        kinds: those which are owned.
        coded: names of tables that hold codes.
    """

    waits: float
    owned: float
    kinds: Collection[str]
    coded: Collection[str]

    def factor(self, kind: str) -> float:
        """Return what a kind of state is multiplied by."""
        return 1.0 if kind in MOMENTA else self.owned if kind in self.kinds else self.waits


def resized(
    fresh: Mapping[str, Any], mine: Mapping[str, Any] | None, common: Mapping[str, Any], carried: Carried
) -> dict[str, Any]:
    """Return the state with which a rank goes on among other ranks.

    Args:
        fresh: its state there, with nothing kept.
        mine: what it had among those of before; None if it was not there.
        common: the state of a rank that was: what is equal on all ranks is taken from it.
        carried: how much of ``mine`` counts.
    """
    rest = {name: part for name, part in common.items() if name not in _LEFT_OUT}
    if "tuned" in rest and common["world"] != fresh["world"]:
        rest["tuned"] = False  # other ranks have other times
    own = mine or {}
    kept = {
        kind: {
            name: _carried(
                zeros, (common if kind == LAST else own).get("state", {}).get(kind, {}).get(name), carried.factor(kind)
            )
            for name, zeros in tensors.items()
        }
        for kind, tensors in fresh["state"].items()
    }  # fmt: skip
    same = fresh["plan"] == common["plan"]
    tables = {
        name: _carried(zeros, (own if _holds_codes(name, carried.coded) else common).get("tables", {}).get(name), 1.0)
        if same
        else zeros
        for name, zeros in fresh["tables"].items()
    }
    changed = {"rank": fresh["rank"], "world": fresh["world"], "state": kept, "tables": tables, "carries": {}}
    if waiting := own.get(_WAITING):
        changed[_WAITING] = {name: tensor * carried.waits for name, tensor in waiting.items()}
    return checksums.sealed(rest | changed)


def common_of(state: Mapping[str, Any], coded: Collection[str]) -> dict[str, Any]:
    """Return of a state what is equal on all ranks."""
    equal = {name: part for name, part in state.items() if name not in _LEFT_OUT}
    tables = {name: table for name, table in state["tables"].items() if not _holds_codes(name, coded)}
    return checksums.sealed(equal | {"state": {LAST: state["state"].get(LAST, {})}, "tables": tables, "carries": {}})


def of_one_rank(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return of a state what is this rank's own, adds, and would be lost with it."""
    kept = {kind: tensors for kind, tensors in state["state"].items() if kind not in MOMENTA}
    return {"state": kept, _WAITING: state.get(_WAITING, {})}


def added(mine: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with what was another rank's own, among the same ranks."""

    def both(own: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {**theirs, **{name: tensor + theirs[name] if name in theirs else tensor for name, tensor in own.items()}}

    changed: dict[str, Any] = {
        "state": {kind: both(tensors, other["state"].get(kind, {})) for kind, tensors in mine["state"].items()}
    }
    if waiting := both(mine.get(_WAITING, {}), other[_WAITING]):
        changed[_WAITING] = waiting
    return checksums.sealed({name: part for name, part in mine.items() if name != checksums.KEY} | changed)


def _carried(zeros: Tensor, kept: Tensor | None, factor: float) -> Tensor:
    """Return what goes on of a tensor."""
    if kept is None or checksums.kind_of(kept) != checksums.kind_of(zeros):
        return zeros
    return kept if factor == 1.0 else kept * factor
