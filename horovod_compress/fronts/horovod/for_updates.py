"""What update mode asks of a compression."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...engine.optimizer import momentum
from ...engine.reducer import Reducer
from ...errors import ConfigError
from ...schedule.by_name import OPTIONAL
from ..common.base import BaseCompression
from .finding import Finder

TAKEN = (
    "a compression serves one optimizer: make another one for DistributedUpdateOptimizer or for "
    "hvd.DistributedOptimizer"
)


class ForUpdates(BaseCompression):
    """A compression that may serve update mode in place of an optimizer of Horovod's."""

    _how_to_use = "an optimizer; write hvd.DistributedOptimizer(..., compression=compression)"
    _what_copies_lack = (
        "a copy of an optimizer of Horovod's has no compression, and cannot be used: create compression and optimizer "
        "for the copied model"
    )
    _in_updates = False
    _optimizer: Any = None  # the one that attach() was given
    _finder: Finder

    def begin_updates(self) -> Reducer:
        """Hand the reducer to :func:`DistributedUpdateOptimizer`; gradients are refused from then on.

        Raises:
            ConfigError: the compression is in use already.
        """
        self.check_updates()
        self._in_updates, self._exchanged, self._unused = True, "updates", False
        self._reports.updates = True
        if self._steps.tuner:
            self._steps.tuner.stop()
        self._optimizer = self  # nobody waits for tokens
        self._running().result_scale = 1.0
        return self._running()

    def _report(self) -> None:
        """Make the reports that are due, between two exchanges of updates."""
        self._reports.look()

    def check_updates(self) -> None:
        """Refuse what update mode cannot work with.

        Raises:
            ConfigError: the compression is in use already, or has an option that would hide errors.
        """
        reducer = self._running()
        if self._in_updates or self._optimizer is not None or self._finder.calls or reducer.step:
            raise ConfigError(TAKEN)
        if self._steps.scale.scaler is not None:
            raise ConfigError(
                "this compression follows a gradient scaler, and updates are not scaled; leave follow() out"
            )
        if self._methods.masked:
            raise ConfigError(
                "masked() leaves out elements of gradients, and local weights differ between ranks; give update mode "
                "the method without it"
            )
        if self._steps.tuner and reducer.options.schedule != OPTIONAL:
            raise ConfigError(
                "adaptive schedules hide exchanges behind the backward pass, which update mode does not "
                'have; choose a fixed schedule such as "size:25MB"'
            )
        if any(bucket.plain for bucket in reducer.plan.buckets):
            raise ConfigError(
                "this plan leaves buckets uncompressed, which was chosen for gradients; give update mode a fixed "
                'schedule such as "size:25MB"'
            )
        if reducer.options.nonfinite == "zero":
            raise ConfigError(
                'nonfinite="zero" has no meaning for weight updates: momentum and local weights would stay '
                'non-finite; choose "propagate" or "raise"'
            )

    def _follows_none(self) -> bool:
        return self._in_updates or super()._follows_none()

    def included(self) -> bool:
        """Return whether this rank takes part."""
        return self._job.included()

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters in the order of the plan; none on a rank that takes no part."""
        return list(self._steps.parameters) if self._reducer else []

    def communication_delay(self) -> int:
        """Return after how many local steps the method's settings exchange updates."""
        return self._methods.communication_delay()

    def full_precision_every(self) -> int:
        """Return the period of the method's full-precision rounds, 0 if it has none."""
        return self._methods.full_precision_every()

    def check_momentum(self, optimizer: Any) -> None:
        """Refuse momentum in the updates of an optimizer upon a method's own.

        Raises:
            ConfigError: says which of them to leave out.
        """
        momentum.refuse_twice(optimizer, self._methods, self._steps.named, updates=True)
