"""Warns of weights that differ between ranks, which equal results of exchanges never bring together.

Results are compared to find hardware that is broken; weights differ for reasons of the program's: they were not
broadcast, a checkpoint was loaded on one rank, or a rank has changed its results before its optimizer used them. The
training goes on with them as it would with Horovod alone, so this is no error.

The hashes are taken on the training thread, after a step of the optimizer where that is known, else at the first
gradient of the next one. There some methods of training have weights of their own on each rank: SAM climbs along each
rank's gradient before it makes the one that is exchanged. So a difference in the first comparison, before which the
optimizer made no step, is said only if it is still there in the next one. The hashes are compared at the end of the
step, by the exchange thread.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from ...ops.checksums import hash_of, signed
from .ranks import by_value

_log = logging.getLogger("horovod_compress")


class Weights:
    """The weights of one rank, as the others see them.

    Args:
        every: compare every this many steps, and at the first one; 0: never.
        warns: whether this rank is to log what all find.
    """

    def __init__(self, every: int, warns: bool) -> None:
        self._every, self._warns = every, warns
        self._first = True
        self._suspicion = ""  # what is to be said if the weights differ in the next step too
        self._step, self._hashes = -1, torch.zeros(0, dtype=torch.int64)
        #: Whether they were found to differ, after which they are not compared any more.
        self.differ = False
        #: In how many steps they were compared.
        self.compared = 0

    def resume(self) -> None:
        """Compare them in the next step: a state was loaded, and weights perhaps, too."""
        self._first, self._step, self._suspicion = True, -1, ""

    def due(self, step: int) -> bool:
        """Return whether they are compared in a step; the same on every rank."""
        return (
            bool(self._every)
            and not self.differ
            and (self._first or bool(self._suspicion) or (step + 1) % self._every == 0)
        )

    def take(self, step: int, weights: Sequence[Tensor]) -> None:
        """Look at the weights if they are compared in this step, which is about to begin.

        Args:
            weights: in the order of the plan.
        """
        if self.due(step) and step != self._step:
            with torch.no_grad():
                self._hashes = torch.tensor([signed(hash_of([weight])) for weight in weights], dtype=torch.int64)
            self._step = step

    def hashes(self, step: int, count: int) -> Tensor:
        """Return a hash of each tensor, int64; all 0 if this rank has not looked in this step."""
        return self._hashes if self._step == step else torch.zeros(count, dtype=torch.int64)

    def compare(self, step: int, of_ranks: Sequence[Tensor], names: Sequence[str]) -> None:
        """Warn if the hashes of all ranks differ; every rank comes to the same end."""
        first, self._first = self._first, False
        table = torch.stack(list(of_ranks))
        if not bool(table.any(dim=1).all()):
            return  # some rank has not looked
        self.compared += 1
        suspicion, self._suspicion = self._suspicion, ""
        odd = (table != table[0]).any(dim=0).nonzero().flatten().tolist()
        if not odd:
            return
        values = [f"{value & (1 << 64) - 1:016x}" for value in table[:, odd[0]].tolist()]
        text = suspicion or _warning(step, [names[index] for index in odd], len(names), values)
        if first:
            self._suspicion = text
            return
        self.differ = True
        if self._warns:
            _log.warning("%s", text)


def _warning(step: int, odd: Sequence[str], count: int, values: Sequence[str]) -> str:
    return (
        f"weights differ between ranks at the beginning of step {step}, in {len(odd)} of {count} parameters, the "
        f"first of them {odd[0]}, by its hash: {by_value(values)}. All ranks get the same gradients, so the weights "
        "will stay different. Usual causes: the weights were never broadcast (DistributedDataParallel does that; "
        "under Horovod call hvd.broadcast_parameters(model.state_dict(), root_rank=0)), or a checkpoint was loaded on "
        "one rank after that; the initial weights come from different seeds; gradients are clipped or changed between "
        "backward() and synchronize(), or differently on each rank before step(); a forward pass changes weights by "
        "its own data, as Embedding(max_norm=) does. See docs/troubleshooting.md. This warning appears only once"
    )
