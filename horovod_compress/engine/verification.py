"""What the ranks compare at the end of a step: the hashes of their results, and of their weights."""

from __future__ import annotations

import torch

from ..errors import MismatchError
from ..exchange import gather
from ..exchange.wire import NonFiniteCount
from ..ops.checksums import hash_of, signed
from .agreement.ranks import minority
from .agreement.weights import Weights
from .bucket.state import BucketState
from .buckets import Buckets
from .context import Context


class Verification:
    """Finds results that differ between ranks, which no exchange produces."""

    def __init__(self, context: Context, buckets: Buckets) -> None:
        self._context, self._buckets = context, buckets
        self._hashes: dict[int, int] = {}  # of results, by bucket
        #: Compares weights, where somebody shows them.
        self.weights: Weights | None = None

    def due(self) -> bool:
        """Return whether the results of the step under way are compared."""
        every = self._context.options.verify_every
        return bool(every) and self._context.world > 1 and (self._context.progress.step + 1) % every == 0

    def take(self, state: BucketState) -> None:
        """Look at the result of a bucket, before the training thread has it."""
        self._hashes[state.bucket.index] = self.hash(state)

    def hash(self, state: BucketState) -> int:
        """Return a hash of a bucket's result."""
        return signed(hash_of(grad for grad in state.memory.grads if grad is not None))  # sparse ones are not ours

    def compare_results(self) -> None:
        """Compare the hash of every bucket's result across ranks.

        Raises:
            MismatchError: names the bucket and the ranks whose result is in the minority.
        """
        context, count = self._context, len(self._buckets)
        mine = torch.tensor([self._hashes.get(bucket, 0) for bucket in range(count)], dtype=torch.int64)
        exchange = context.exchange(count, "verify", NonFiniteCount())
        with context.metrics.timed("verify", where=(context.progress.step,)):
            found, _ = gather.run(exchange, mine.view(torch.uint8))
        context.metrics.bytes_sent += exchange.bytes_sent
        context.metrics.verified += 1
        table = torch.stack([data.view(torch.int64) for data in found])
        for bucket in range(count):
            if odd := minority(table[:, bucket].tolist()):
                raise MismatchError(
                    f"rank {context.rank}: after step {context.progress.step} the result of bucket {bucket} on "
                    f"rank(s) {odd} differs from that of the others; the model "
                    f"would diverge. Suspect memory or hardware there, and resume from a checkpoint"
                )

    def compare_weights(self, step: int) -> None:
        """Show the other ranks the hashes of this one's weights, if it is time to."""
        weights, context = self.weights, self._context
        if not weights or not weights.due(step):
            return
        names = self._buckets.plan.names()
        exchange = context.exchange(len(self._buckets), "weights", NonFiniteCount())
        with context.metrics.timed("verify", where=(context.progress.step,)):
            found, _ = gather.run(exchange, weights.hashes(context.progress.step, len(names)).view(torch.uint8))
        context.metrics.bytes_sent += exchange.bytes_sent
        weights.compare(context.progress.step, [data.view(torch.int64) for data in found], names)
