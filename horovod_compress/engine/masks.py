"""Weights that are masked: found by their zeros before each step, and left out of what rounds send."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..codecs.work import together
from ..errors import StateError
from ..ops.checksums import hash_of, signed
from .bucket.pruned import Rest, having_room
from .bucket.withheld import FIRST, GONE, LIVE, MASKED
from .kept import Kept
from .shards import local

#: Masked elements stay in payloads where they are fewer than one in so many. For every other change of a mask, other
#: buckets would cost more than they save: numbers of 16 bits become 0 by chance.
_FEW = 10


@dataclass
class _Found:
    """What was found of the weights, by name.

    Attributes:
        kinds: what every element is, flat.
        rest: what payloads have of tensors that are pruned.
        hashes: of the kinds.
    """

    kinds: dict[str, Tensor] = field(default_factory=dict)
    rest: dict[str, Rest] = field(default_factory=dict)
    hashes: dict[str, int] = field(default_factory=dict)

    def prune(self, name: str, kinds: Tensor, gone: Tensor, row: int) -> None:
        """Take a mask, and see which elements of the tensor payloads have room for.

        They get it for a weight as soon as that is live, and lose no other for it; they lose room only if more than a
        tenth of it is for masked elements, and that leaves more than a tenth of the tensor out.

        Args:
            kinds: without :data:`GONE`.
            gone: what payloads have no room for until now.
            row: see :func:`.bucket.pruned.rows_of`.
        """
        masked, there, count = kinds == MASKED, ~gone, kinds.numel()
        if bool((gone & (~masked if row else gone)).any()):
            there = having_room(gone & masked, row)
        if int((masked & there).sum()) * _FEW > int(there.sum()):
            needed = having_room(masked, row)
            if int((there & ~needed).sum()) * _FEW > int(there.sum()):
                there = needed
        if int((~there).sum()) * _FEW <= count:
            there = torch.ones_like(there)
        kinds[~there] = GONE
        self.kinds[name], self.hashes[name] = kinds, signed(hash_of([kinds]))
        if bool(there.all()):
            self.rest.pop(name, None)
        elif name not in self.rest or not torch.equal(there, ~gone):
            self.rest[name] = Rest.of(there, row)


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
        self._rows = kept.rows()
        self._found = _Found(hashes=dict.fromkeys(sorted(named), 0))
        self._agree(self._found)

    def _agree(self, found: _Found) -> None:
        """Let all go by what was found; if that fails, nothing was, so that a step that is tried again looks again."""
        self._kept.mask(dict(found.kinds), dict(found.rest))
        self._compare(found.hashes)
        self._found = found

    @torch.no_grad()
    def begin(self) -> None:
        """Look at the weights, before a step."""
        zeros = {name: (local(parameter) == 0).reshape(-1) for name, parameter in self._named.items()}
        differ = together([self._differs(name, zero) for name, zero in zeros.items()])  # one wait on a GPU
        changed = [name for name, differs in zip(zeros, differ, strict=True) if differs]
        if not changed:
            return
        known = self._found
        found = _Found(dict(known.kinds), dict(known.rest), dict(known.hashes))
        for name in changed:
            self._take(found, name, zeros[name])
        self._agree(found)

    def _differs(self, name: str, zero: Tensor) -> Tensor | bool:
        known = self._found.kinds.get(name)
        return True if known is None else zero.ne(known != LIVE).any()

    def _take(self, found: _Found, name: str, zero: Tensor) -> None:
        known = found.kinds.get(name)
        first = zero.all() & zero if known is None else known == FIRST
        kinds = torch.where(first, FIRST, MASKED).where(zero, LIVE).to(torch.uint8)
        found.prune(name, kinds, torch.zeros_like(zero) if known is None else known == GONE, self._rows.get(name, 0))

    # ---- state ----

    def state(self) -> dict[str, Any]:
        """Return what a resumed job has to know of earlier weights."""
        kinds = self._found.kinds
        return {"masks": {name: each.clone() for name, each in kinds.items()}} if kinds else {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state that :func:`check_masks` has found good; the next step looks at the weights."""
        saved, found = state.get("masks", {}), _Found(hashes=dict.fromkeys(self._found.hashes, 0))
        for name, parameter in self._named.items():
            if name in saved:
                kinds = saved[name].to(parameter.device, copy=True)
                gone = kinds == GONE
                found.prune(name, kinds.masked_fill_(gone, MASKED), gone, self._rows.get(name, 0))
        self._agree(found)


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
