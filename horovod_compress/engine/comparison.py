"""What the ranks compare: at the start, after each change that all have to make alike, and at the end of steps.

:class:`Start` compares before an exchange, :class:`Verification` the results of a step, and :class:`Weights` warns of
weights that differ, which equal results never bring together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..errors import DigestError, MismatchError, some_of
from ..exchange import everywhere
from ..exchange.wire import NonFiniteCount
from ..ops.checksums import hash_of, hash_of_text, signed
from .agreement.differences import by_value, explained, minority
from .buckets import Buckets, BucketState
from .context import Context

# ---- before an exchange --------------------------------------------------------------------------

_TOPIC = "start"


class Start:
    """Compares before the first exchange, and after each change that all ranks have to make alike.

    A rank that has loaded a state, or has frozen parameters, compares before its next exchange. One that has made no
    such change would send a gradient instead, which the first would take for its answer. So these answers have an order
    of messages to themselves (``Transport.aside``), and a rank leaves word before it waits for them: whoever sees that
    word and has made no such change knows that the two would wait for each other, and stops both.

    Args:
        norms: returns what ranks hand results back times, in words.

    Attributes:
        due: whether the next exchange begins with a comparison.
    """

    def __init__(self, context: Context, buckets: Buckets, norms: Callable[[], str]) -> None:
        self._context, self._buckets, self._norms = context, buckets, norms
        self.due = True
        self._agreed = 0  # comparisons so far
        self._compared: tuple[int, str] = (0, "")  # what else they compare then, and what it stands for
        self._masks: dict[str, int] = {}  # hashes of masks, by tensor

    def again(self) -> None:
        """Let the next exchange begin with a comparison across ranks; between two steps, and on every rank."""
        with self._context.changed:
            self.due = True

    def compare_first(self, value: int, what: str) -> None:
        """Let the next exchange begin with a comparison across ranks; between two steps.

        Args:
            value: 64 bits that have to be equal on every rank.
            what: it stands for, in the plural.
        """
        with self._context.changed:
            self._compared = (signed(value), what)
            self.again()

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
            MismatchError: names these ranks, and says what to do.
        """
        if self.due:
            return
        mine = self._context.rank
        for rank, word in sorted(self._context.transport.said(_TOPIC).items()):
            number, at = map(int, word.split())
            if rank != mine and number > self._agreed and at <= done:
                raise MismatchError(
                    f"rank {mine}: rank {rank} loaded a state, or froze or unfroze parameters, or changed a mask, or "
                    "added a parameter group, or cleared its optimizer's state, or left out a step of it or was "
                    f"interrupted in one, before a step in which rank {mine} did not; do the same on every rank, "
                    "between the same two steps"
                )

    def agree(self) -> None:
        """Compare step and plan at the start: ranks that resumed differently would misread each other.

        Raises:
            MismatchError: names each rank's step, or the ranks that are in the minority.
        """
        context = self._context
        if self._agreed:  # every rank begins with the first one, so that needs no word
            context.transport.say(_TOPIC, f"{self._agreed + 1} {context.progress.done}")
        plan = self._buckets.plan
        frozen = "\n".join(sorted(plan.names()[index] for index in self._buckets.frozen))
        values = [context.progress.step, signed(int(plan.fingerprint(), 16)), self._compared[0]]
        values += [signed(hash_of_text(text)) for text in (frozen, self._norms())]
        values += [signed(context.operands.digest), *self._masks.values()]
        step, bucket, _ = context.progress.place()
        context.recorder.note(step, bucket, "agree")
        exchange = context.exchange(0, "agree", NonFiniteCount())  # nothing here may depend on the plan
        exchange.step, exchange.transport = 0, context.transport.aside  # type: ignore[assignment]
        exchange.digest = 0  # what follows says more
        mine = torch.tensor(values, dtype=torch.int64, device="cpu")
        found, _ = everywhere.all_gather(exchange, mine.view(torch.uint8))
        context.metrics.bytes_sent += exchange.bytes_sent
        self._compare(list(zip(*(data.view(torch.int64).tolist() for data in found), strict=True)))
        self._agreed += 1
        self.due = False

    def _compare(self, found: Sequence[Sequence[int]]) -> None:
        (steps, plans, values, frozen, norms, operands, *masks), rank = found, self._context.rank
        if len(set(steps)) > 1:
            told = ", ".join(f"rank {rank} at step {step}" for rank, step in enumerate(steps))
            raise MismatchError(
                f"rank {rank}: the ranks do not start at the same step: {told}; call load_state_dict() on every rank, "
                "each with the state that it saved at the same step"
            )

        def refuse(what: str, of_ranks: Sequence[int], advice: str) -> None:
            if odd := minority(of_ranks):
                raise MismatchError(
                    f"rank {rank}: the {what} differ between ranks, on rank(s) {odd} from the others; {advice}"
                )

        advice = "give every rank the same schedule=, and call load_state_dict() on every rank or on none, with states "
        refuse("buckets", plans, f"{advice}of the same step")
        advice = (
            "broadcast the parameters before the first step of a training, and resume every rank from the same step, "
            "with the states of its model and of its optimizer"
        )
        refuse(self._compared[1], values, advice)
        advice = "call requires_grad_() in the same way on every rank, between the same two steps"
        refuse("frozen parameters", frozen, advice)
        if (other := next((peer for peer, value in enumerate(operands) if value != operands[rank]), None)) is not None:
            raise DigestError(other)
        advice = "give every rank the same optimizers and match_norm=, and load states of the same step"
        refuse("norms that results are given (match_norm)", norms, advice)
        named = zip(self._masks, masks, strict=True)
        if differ := {name: odd for name, hashes in named if (odd := minority(hashes))}:
            name, odd = next(iter(differ.items()))
            raise MismatchError(
                f"rank {rank}: the masks of {some_of(differ)} differ between ranks, that of {name} on "
                f"rank(s) {odd} from the others: a mask is what is 0 in the weights; prune them in the same way on "
                "every rank, between the same two steps, and broadcast them from one rank"
            )


# ---- weights -------------------------------------------------------------------------------------

_log = logging.getLogger("horovod_compress")


class Weights:
    """The weights of one rank, as the others see them: warns once if they differ between ranks.

    Results are compared to find hardware that is broken; weights differ for reasons of the program's: they were not
    broadcast, a checkpoint was loaded on one rank, or a rank has changed its results before its optimizer used them.
    The training goes on with them as it would with Horovod alone, so this is no error.

    The hashes are taken on the training thread, after a step of the optimizer where that is known, else at the first
    gradient of the next one. There some methods of training have other weights on each rank: SAM climbs along each
    rank's gradient before it makes the one that is exchanged. So a difference in the first comparison, before which the
    optimizer made no step, is said only if it is still there in the next one. The hashes are compared at the end of the
    step, by the exchange thread.

    Args:
        every: compare every this many steps, and at the first one; 0: never.
        warns: whether this rank is to log what all find.
        ranks_in_words: what the numbers of ranks mean, see :class:`.context.Hooks`.
    """

    def __init__(self, every: int, warns: bool, ranks_in_words: str = "") -> None:
        self._every, self._warns, self._ranks_in_words = every, warns, ranks_in_words
        self._first = True
        self._suspicion = ""  # what is to be said if the weights differ in the next step too
        self._step, self._hashes = -1, torch.zeros(0, dtype=torch.int64, device="cpu")
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
                hashes = [signed(hash_of([weight])) for weight in weights]
                self._hashes = torch.tensor(hashes, dtype=torch.int64, device="cpu")
            self._step = step

    def hashes(self, step: int, count: int) -> Tensor:
        """Return a hash of each tensor, int64; all 0 if this rank has not looked in this step."""
        return self._hashes if self._step == step else torch.zeros(count, dtype=torch.int64, device="cpu")

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
            _log.warning("%s", explained(text, self._ranks_in_words))


def _warning(step: int, odd: Sequence[str], count: int, values: Sequence[str]) -> str:
    return (
        f"weights differ between ranks at the beginning of step {step}, in {len(odd)} of {count} parameters, the "
        f"first of them {odd[0]}, by its hash: {by_value(values)}. All ranks get the same gradients, so the weights "
        "will stay different. Usual causes: the weights were never broadcast (DistributedDataParallel does that; "
        "under Horovod call hvd.broadcast_parameters(model.state_dict(), root_rank=0)), or a checkpoint was loaded on "
        "one rank after that; the initial weights come from different seeds; gradients are clipped or changed between "
        "backward() and synchronize(), or differently on each rank before step(); a rank skips a step that others "
        "make, or sets its learning rate by a metric of its own; a forward pass changes weights by its own data, as "
        "Embedding(max_norm=) does. See docs/troubleshooting.md. This warning appears only once"
    )


# ---- at the end of a step ------------------------------------------------------------------------


class Verification:
    """Compares hashes at the end of a step: of results, which no exchange makes different, and of weights."""

    def __init__(self, context: Context, buckets: Buckets, ranks_in_words: str) -> None:
        self._context, self._buckets, self._ranks_in_words = context, buckets, ranks_in_words
        self._hashes: dict[int, int] = {}  # of results, by bucket
        #: Compares weights, where somebody shows them: see :meth:`watch_weights`.
        self.weights: Weights | None = None

    def resume(self) -> None:
        """Compare weights in the next step: a state was loaded."""
        if self.weights:
            self.weights.resume()

    def watch_weights(self) -> None:
        """Compare weights from now on; on every rank alike, before the first step."""
        if self._context.world > 1:
            every, warns = self._context.options.verify_every, self._context.rank == 0
            self.weights = Weights(every, warns, self._ranks_in_words)

    def take_weights(self, step: int, weights: Sequence[Tensor]) -> None:
        """Look at the weights of a step that is about to begin, if they are compared there.

        Args:
            weights: in the order of the plan.
        """
        if self.weights:
            self.weights.take(step, weights)

    def take(self, state: BucketState) -> None:
        """Look at the result of a bucket, before the training thread has it."""
        self._hashes[state.bucket.index] = self.hash(state)

    def hash(self, state: BucketState) -> int:
        """Return a hash of a bucket's result."""
        return signed(hash_of(grad for grad in state.grads if grad is not None))  # sparse ones are not ours

    def compare_results(self) -> None:
        """Compare the hash of every bucket's result across ranks.

        Raises:
            MismatchError: names the bucket and the ranks whose result is in the minority.
        """
        context, count = self._context, len(self._buckets)
        mine = torch.tensor([self._hashes.get(bucket, 0) for bucket in range(count)], dtype=torch.int64, device="cpu")
        table = torch.stack(self._gathered("verify", mine))
        context.metrics.verified += 1
        for bucket in range(count):
            if odd := minority(table[:, bucket].tolist()):
                raise MismatchError(
                    f"rank {context.rank}: after step {context.progress.step} the result of bucket {bucket} on "
                    f"rank(s) {odd} differs from that of the others; the model "
                    f"would diverge. Suspect memory or hardware there, and resume from a checkpoint"
                )

    def compare_weights(self, step: int) -> None:
        """Show the other ranks the hashes of this one's weights, if they are compared and it is time to."""
        if self.weights and self.weights.due(step):
            names = self._buckets.plan.names()
            found = self._gathered("weights", self.weights.hashes(step, len(names)))
            self.weights.compare(step, found, names)

    def _gathered(self, label: str, mine: Tensor) -> list[Tensor]:
        """Return the hashes of all ranks, int64."""
        context = self._context
        exchange = context.exchange(len(self._buckets), label, NonFiniteCount())
        context.recorder.note(context.progress.step, len(self._buckets) - 1, label)
        with context.metrics.timed("verify", where=(context.progress.step,)):
            found, _ = everywhere.all_gather(exchange, mine.view(torch.uint8))
        context.metrics.bytes_sent += exchange.bytes_sent
        return [data.view(torch.int64) for data in found]
