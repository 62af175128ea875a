"""What the next exchange begins with: the ranks compare their step, buckets, weights and frozen tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from ..errors import DigestError, MismatchError
from ..exchange import gather
from ..exchange.wire import NonFiniteCount
from ..ops.checksums import hash_of_text, signed
from .agreement.common_start import CommonStart
from .agreement.ranks import minority
from .buckets import Buckets
from .context import Context


class Start:
    """Compares before the first exchange, and after each change that all ranks have to make alike."""

    def __init__(self, context: Context, buckets: Buckets) -> None:
        self._context, self._buckets = context, buckets
        self._common = CommonStart(context.transport)
        self._compared: tuple[int, str] = (0, "")  # what else they compare then, and what it stands for
        self._norms: Callable[[], str] = str
        self._masks: dict[str, int] = {}  # hashes of masks, by tensor

    @property
    def due(self) -> bool:
        """Whether the next exchange begins with a comparison."""
        return self._common.due

    def again(self) -> None:
        """Let the next exchange begin with a comparison across ranks; between two steps, and on every rank."""
        with self._context.changed:
            self._common.due = True

    def compare_first(self, value: int, what: str) -> None:
        """Let the next exchange begin with a comparison across ranks; between two steps.

        Args:
            value: 64 bits that have to be equal on every rank.
            what: it stands for, in the plural.
        """
        with self._context.changed:
            self._compared = (signed(value), what)
            self.again()

    def also_compares(self, norms: Callable[[], str]) -> None:
        """Let ranks compare what they hand results back times, too, in words."""
        self._norms = norms

    def freeze(self, indices: frozenset[int]) -> None:
        """Let nothing be exchanged for these tensors; between two steps."""
        if indices != self._buckets.frozen:
            with self._context.changed:
                self._buckets.frozen = indices
                self.again()

    def mask(self, hashes: Mapping[str, int]) -> None:
        """Let the next exchange begin with a comparison of masks; between two steps.

        Args:
            hashes: by tensor; of the same tensors, in the same order, on every rank.
        """
        with self._context.changed:
            self._masks = dict(hashes)
            self.again()

    def check(self, done: int) -> None:
        """Refuse to wait for ranks that compare before a step in which this one exchanges already.

        Args:
            done: steps that this rank had exchanged when it began to wait.

        Raises:
            MismatchError: see :meth:`.common_start.CommonStart.check`.
        """
        self._common.check(done)

    def agree(self) -> None:
        """Compare step and plan at the start: ranks that resumed differently would misread each other.

        Raises:
            MismatchError: names each rank's step, or the ranks that are in the minority.
        """
        context = self._context
        self._common.begin(context.progress.done)
        plan = signed(int(self._buckets.plan.fingerprint(), 16))
        values = [
            context.progress.step,
            plan,
            self._compared[0],
            self._hash_of_frozen(),
            signed(hash_of_text(self._norms())),
        ]
        values += [signed(context.operands.digest), *self._masks.values()]
        exchange = context.exchange(0, "agree", NonFiniteCount())  # nothing here may depend on the plan
        exchange.step, exchange.transport = 0, context.transport.aside  # type: ignore[assignment]
        exchange.digest = 0  # what follows says more
        found, _ = gather.run(exchange, torch.tensor(values, dtype=torch.int64).view(torch.uint8))
        context.metrics.bytes_sent += exchange.bytes_sent
        self._compare(list(zip(*(data.view(torch.int64).tolist() for data in found), strict=True)))
        self._common.held()

    def _compare(self, found: Sequence[Sequence[int]]) -> None:
        (steps, plans, values, frozen, norms, operands, *masks), rank = found, self._context.rank
        if len(set(steps)) > 1:
            told = ", ".join(f"rank {rank} at step {step}" for rank, step in enumerate(steps))
            raise MismatchError(
                f"rank {rank}: the ranks do not start at the same step: {told}; call load_state_dict() on every rank, "
                "each with the state that it saved at the same step"
            )
        if odd := minority(plans):
            raise MismatchError(
                f"rank {rank}: the buckets differ between ranks, on rank(s) {odd} from the others; give every "
                f"rank the same schedule=, and call load_state_dict() on every rank or on none, with states of the "
                f"same step"
            )
        if odd := minority(values):
            raise MismatchError(
                f"rank {rank}: the {self._compared[1]} differ between ranks, on rank(s) {odd} from the others; "
                f"broadcast the parameters before the first step, and resume every rank from the same step"
            )
        if odd := minority(frozen):
            raise MismatchError(
                f"rank {rank}: the frozen parameters differ between ranks, on rank(s) {odd} from the others; call "
                "requires_grad_() in the same way on every rank, between the same two steps"
            )
        if (other := next((peer for peer, value in enumerate(operands) if value != operands[rank]), None)) is not None:
            raise DigestError(other)
        if odd := minority(norms):
            raise MismatchError(
                f"rank {rank}: the norms that results are given (match_norm) differ between ranks, on rank(s) {odd} "
                "from the others; give every rank the same optimizers and match_norm=, and load states of the same step"
            )
        named = zip(self._masks, masks, strict=True)
        if differ := {name: odd for name, hashes in named if (odd := minority(hashes))}:
            name, odd = next(iter(differ.items()))
            raise MismatchError(
                f"rank {rank}: the masks of {', '.join(list(differ)[:5])} differ between ranks, that of {name} on "
                f"rank(s) {odd} from the others: a mask is what is 0 in the weights; prune them in the same way on "
                "every rank, between the same two steps, and broadcast them from one rank"
            )

    def _hash_of_frozen(self) -> int:
        names = self._buckets.plan.names()
        return signed(hash_of_text("\n".join(sorted(names[index] for index in self._buckets.frozen))))
