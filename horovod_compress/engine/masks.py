"""Weights that are masked: found by their zeros before each step, and left out of what rounds send."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..codecs.work import together
from ..errors import StateError
from ..ops.checksums import hash_of, signed
from .bucket.pruned import Rest, room
from .bucket.withheld import FIRST, GONE, LIVE, MASKED
from .kept import Kept
from .shards import local

#: Masked elements stay in payloads where they are fewer than one in so many. For every other change of a mask, other
#: buckets would cost more than they save: numbers of 16 bits become 0 by chance.
_FEW = 10


class Masks:
    """Looks at the weights of some parameters before each step, and lets rounds leave out those that are masked.

    Masks are read from the weights: a weight that is 0 in the first step, or becomes 0 later, has been pruned, and is
    masked as long as it is 0. A tensor that is wholly 0 at first, as biases often are, has not been pruned: its
    elements are masked once they become 0 again. Weights are equal on all ranks, and so are masks; whenever one
    changes, the next exchange begins with a comparison.

    Args:
        compare: lets ranks compare hashes of masks, by tensor, see :meth:`.comparison.Start.mask`.
        named: the parameters whose methods are masked.
    """

    def __init__(
        self, kept: Kept, compare: Callable[[Mapping[str, int]], None], named: Mapping[str, nn.Parameter]
    ) -> None:
        self._kept, self._compare, self._named = kept, compare, named
        self._kinds: dict[str, Tensor] = {}  # of every element, flat
        self._rest: dict[str, Rest] = {}  # what payloads have of tensors that are pruned
        self._rows = kept.rows()
        self._hashes = dict.fromkeys(sorted(named), 0)
        self._agree()

    def _agree(self) -> None:
        self._kept.mask(dict(self._kinds), dict(self._rest))
        self._compare(self._hashes)

    @torch.no_grad()
    def begin(self) -> None:
        """Look at the weights, before a step."""
        zeros = {name: (local(parameter) == 0).reshape(-1) for name, parameter in self._named.items()}
        differ = together([self._differs(name, zero) for name, zero in zeros.items()])  # one wait on a GPU
        changed = [name for name, differs in zip(zeros, differ, strict=True) if differs]
        for name in changed:
            self._take(name, zeros[name])
        if changed:
            self._agree()

    def _differs(self, name: str, zero: Tensor) -> Tensor | bool:
        known = self._kinds.get(name)
        return True if known is None else zero.ne(known != LIVE).any()

    def _take(self, name: str, zero: Tensor) -> None:
        known = self._kinds.get(name)
        first = zero.all() & zero if known is None else known == FIRST
        kinds = torch.where(first, FIRST, MASKED).where(zero, LIVE).to(torch.uint8)
        self._prune(name, kinds, torch.zeros_like(zero) if known is None else known == GONE)

    def _prune(self, name: str, kinds: Tensor, gone: Tensor) -> None:
        """Take a mask, and see whether payloads should have other elements of the tensor.

        Args:
            kinds: without :data:`GONE`.
            gone: what payloads have no room for until now.
        """
        masked, row, count = kinds == MASKED, self._rows.get(name, 0), kinds.numel()
        needed, there = room(masked, row), ~gone
        grown = bool((gone & ~masked).any())
        if grown or int((there & ~needed).sum()) * _FEW > int(there.sum()):
            there = needed if int((~needed).sum()) * _FEW > count else torch.ones_like(there)
            self._rest.pop(name, None)
        kinds[~there] = GONE
        if name not in self._rest and not bool(there.all()):
            self._rest[name] = Rest.of(there, row)
        self._kinds[name] = kinds
        self._hashes[name] = signed(hash_of([kinds]))

    # ---- state ----

    def state(self) -> dict[str, Any]:
        """Return what a resumed job has to know of earlier weights."""
        return {"masks": {name: kinds.clone() for name, kinds in self._kinds.items()}} if self._kinds else {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state that :func:`check_masks` has found good; the next step looks at the weights."""
        saved = state.get("masks", {})
        self._kinds.clear()
        self._rest.clear()
        self._hashes = dict.fromkeys(self._hashes, 0)
        for name, parameter in self._named.items():
            if name in saved:
                kinds = saved[name].to(parameter.device, copy=True)
                gone = kinds == GONE
                self._prune(name, kinds.masked_fill_(gone, MASKED), gone)
        self._agree()


def check_masks(state: Mapping[str, Any], named: Mapping[str, nn.Parameter]) -> None:
    """Refuse saved masks that are not of these parameters.

    Raises:
        StateError: names the parameter.
    """
    saved = state.get("masks", {})
    for name, kinds in saved.items() if isinstance(saved, Mapping) else [("all parameters", saved)]:
        count = local(named[name]).numel() if name in named else -1
        fits = isinstance(kinds, Tensor) and kinds.dtype is torch.uint8 and kinds.shape == (count,)
        if not fits or bool((kinds > GONE).any()):
            raise StateError(
                f"the saved mask of {name!r:.100} should be {max(count, 0)} bytes of 0 to {GONE}, got "
                f"{kinds!r:.100}; load the state of the same model"
            )
