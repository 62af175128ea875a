"""What is true of a method whatever the bucket and the step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from .feedback import Feedback
from .law import Law

if TYPE_CHECKING:
    from .base import Codec

Divides = Literal["before", "after", "never"]


@dataclass(frozen=True)
class Properties:
    """What is true of a method with its options. A simple method says its law, its residual rule and ``divides``.

    Attributes:
        law: what it promises.
        feedback: the residual rule in use.
        divides: where a second moment that is held divides. Gradients "before" they are encoded, and results are
            multiplied again; or only in the optimizer, "after"; or "never", where results are so near the mean that
            the optimizer's own may move with them.
        batched: one kernel takes all tensors of a bucket, so gradients on a GPU wait for the last one.

        share_sent: which share of the elements a round sends, if the others wait.
        drains_residual: what waits in the residual of any element is sent in time, whoever left it there.
        has_private_state: something waits here that no other method would send: none may come after this one.
        stands_for_mean: results stand for the mean of what the ranks have; None for what the law says of it.
        small_tensors: the codec of tensors too small to be compressed, None for their gradients as they are. Where a
            method changes what a learning rate means, as momentum does, small tensors need the same.

        variants: every codec that ``for_step`` may return; none for the method itself.
        full_precision_every: the period of full-precision rounds, 0 for none.
        communication_delay: after how many local steps an exchange is due in update mode, if the user does not say.
        exact_until: the step of the first compressed round.

        counts_late: values that are not finite are counted in ``before``, not when gradients are submitted.
        adds_up: payloads merge by nothing but the addition of their numbers, in whatever order.
        folded: the state and the local arrays that merging works with. They are where payloads are exchanged, which
            may be the host while all else is on a GPU.
    """

    law: Law = field(default_factory=Law)
    feedback: Feedback = "none"
    divides: Divides = "never"
    batched: bool = False

    # what waits, and what may take the method's place
    share_sent: float = 1.0
    drains_residual: bool = True
    has_private_state: bool = False
    stands_for_mean: bool | None = None
    small_tensors: Codec | None = None

    # rounds that differ
    variants: tuple[Codec, ...] = ()
    full_precision_every: int = 0
    communication_delay: int = 1
    exact_until: int = 0

    # how the engine may run it
    counts_late: bool = False
    adds_up: bool = False
    folded: frozenset[str] = frozenset()

    @property
    def may_be_plain(self) -> bool:
        """Whether a bucket may travel uncompressed in any step without a change of what its results mean.

        The result has to stand for the mean of what the ranks have, and nothing but a residual may wait.
        """
        law, mean = self.law, self.stands_for_mean
        stands = law.unbiased or law.conserves if mean is None else mean
        return stands and self.small_tensors is None and not self.has_private_state
