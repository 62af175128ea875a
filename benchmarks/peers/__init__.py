"""The contestants: stock Horovod, PyTorch's DDP, this package, and files of the user's own."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.bandwidth import without_front

from . import base, names
from .base import Adapter
from .names import PeerError


def adapter(name: str) -> Adapter:
    """Return a contestant by its name, or by a method of this package with options.

    The names of others are those of ``names.STOCK`` and ``names.DDP``; everything else is read as
    ``[ddp:|plain:]METHOD [ring|fold|auto] [key=value ...]``, see :func:`benchmarks.peers.names.parse`.

    Raises:
        PeerError: there is no such method, or a word is not understood.
    """
    from . import ddp, ours, ours_ddp, stock  # they import Horovod, which the drivers need not have

    if name in names.STOCK:
        return stock.adapter(name)
    if name in names.DDP:
        return ddp.adapter(name)
    return ours.adapter(name) if name == without_front(name) else ours_ddp.adapter(name)


def adapters(wanted: Iterable[str], files: Iterable[str] = ()) -> list[Adapter]:
    """Return the contestants of a run.

    Raises:
        PeerError: one cannot be had, or two have the same name.
    """
    found = [adapter(name) for name in wanted]
    found += [loaded for path in files for loaded in base.load(path)]
    names_found = [contestant.name for contestant in found]
    for name in names_found:
        if names_found.count(name) > 1:
            raise PeerError(f"two contestants are named {name!r}; names are unique in a run")
    return found


def leave() -> None:
    """Let go of what outlives single contestants; all ranks together, before they exit."""
    from . import ddp

    ddp.leave()
