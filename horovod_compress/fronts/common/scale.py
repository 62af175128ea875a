"""What is kept follows a gradient scaler: gradients arrive multiplied by its scale, so residuals contain it too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ...engine.reducer import Reducer
from ...errors import ConfigError


class Scale:
    """The scale that what is kept stands for, and the scaler that changes it.

    Attributes:
        scaler: the gradient scaler that is followed, None for none.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self.scaler: Any = None
        self._scale, self._bridged = 0.0, False  # 0 for not known; whether it is the scaler's

    def follow(self, scaler: Any) -> None:
        """Follow a scaler from now on."""
        stock, self.scaler = scaler.update, scaler

        def update(new_scale: Any = None) -> None:
            before = float(scaler.get_scale())
            stock(new_scale)
            self._rescale(before, float(scaler.get_scale()))

        scaler.update = update
        for name in ("unscale_", "step"):
            if method := getattr(scaler, name, None):
                setattr(scaler, name, _after_the_exchange(method))

    def _rescale(self, before: float, after: float) -> None:
        if after != before and before > 0:
            self._reducer.kept.scale(after / before)
        self._scale = after

    def bridge(self) -> None:
        """Before the first step, or the first after a resume: what is kept may be of another scale."""
        if self.scaler is not None and not self._bridged:
            self._bridged = True
            self._rescale(self._scale, float(self.scaler.get_scale()))
        elif self.scaler is None:
            self._scale = 0.0  # of steps without one nothing is known

    def state(self) -> dict[str, float]:
        return {"scale": self._scale} if self.scaler is not None or self._scale else {}

    def load(self, saved: float) -> None:
        """Take the scale that a loaded state was saved with, 0 for not known."""
        self._scale, self._bridged = saved, False


def _after_the_exchange(whole: Callable[..., Any]) -> Callable[..., Any]:
    """Return a scaler's method that refuses gradients which are being exchanged: it would read and divide them."""

    @functools.wraps(whole)
    def call(optimizer: Any, *given: Any, **options: Any) -> Any:
        if getattr(optimizer, "_handles", None):  # Horovod's, of results that it has not fetched
            raise ConfigError(
                "the gradient scaler was used while gradients are being exchanged; call optimizer.synchronize() "
                "first, then scaler.unscale_(optimizer), and scaler.step(optimizer) within "
                "optimizer.skip_synchronize()"
            )
        return whole(optimizer, *given, **options)

    return call


def check_scaler(scaler: Any) -> None:
    """Refuse what is no gradient scaler.

    Raises:
        ConfigError: says what it should be.
    """
    if not all(callable(getattr(scaler, name, None)) for name in ("update", "get_scale")):
        raise ConfigError(f"follow() takes a gradient scaler such as torch.amp.GradScaler(), got {scaler!r:.200}")
