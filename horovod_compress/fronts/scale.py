"""What is kept follows a gradient scaler: gradients arrive multiplied by its scale, and residuals are of such."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..engine.reducer import Reducer
from ..errors import ConfigError


class Scale:
    """The scale that what is kept stands for, and the scaler that changes it.

    Attributes:
        scaler: the gradient scaler that is followed, None for none.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._rank, self._kept, self._norms, self._failure = reducer.rank, reducer.kept, reducer.norms, reducer.failure
        self.scaler: Any = None
        self._scale, self._bridged = 0.0, False  # 0 for not known; whether it is the scaler's
        self._coming: Mapping[str, Any] = {}  # a state for the scaler that is followed later

    def follow(self, scaler: Any) -> None:
        """Follow a scaler from now on."""
        self.scaler = scaler
        if scaler not in _followers:
            _tell_followers(scaler)
        _followers[scaler].add(self)
        self.load_scaler(self._coming)
        if not self._scale:
            self._scale = float(scaler.get_scale())

    def value(self) -> float:
        """Return the scale of the scaler, 1 for none."""
        return float(self.scaler.get_scale()) if self.scaler is not None else 1.0

    def followed(self) -> float | None:
        """Return the scale that the scaler has last told, None for none: on a GPU, asking it would wait for the GPU."""
        return self._scale if self.scaler is not None else None

    def rescale(self, now: float) -> None:
        """Let what is kept stand for this scale."""
        if self._failure.closing or self._failure.failed():
            return
        if self._scale and now != self._scale:
            self._kept.scale(now / self._scale)
            self._norms.ratio.rescale(now / self._scale)
        self._scale = now

    def bridge(self) -> None:
        """Before the first step, or the first after a resume: what is kept may be of another scale.

        Raises:
            ConfigError: it is of the scale of a scaler, and none is followed.
        """
        if self.scaler is not None and not self._bridged:
            self._bridged = True
            self.rescale(float(self.scaler.get_scale()))
        elif self.scaler is None and self._scale:
            kept = self._kept
            if self._scale == 1.0 or not (kept.states() or kept.tables() or kept.withholding.waiting()):
                self._scale = 0.0  # of steps without a scaler nothing is known
                return
            raise ConfigError(
                f"rank {self._rank}: the loaded state was saved with gradients multiplied by {self._scale:g}, "
                "and no gradient scaler is followed now; call compression.follow(scaler) before the first step, or, "
                'to train without one, load the state with residuals="reset"'
            )

    def state(self) -> dict[str, float]:
        return {"scale": self._scale} if self.scaler is not None or self._scale else {}

    def scaler_state(self) -> dict[str, Any]:
        """Return the state of the scaler; empty where none is followed, or its state is not numbers."""
        state = dict(self.scaler.state_dict()) if hasattr(self.scaler, "state_dict") else {}
        return state if all(isinstance(value, (int, float)) for value in state.values()) else {}

    def load_scaler(self, state: Mapping[str, Any]) -> None:
        """Give the scaler a state, also one that is followed later; an empty one changes nothing."""
        self._coming = state if self.scaler is None else {}
        if state and hasattr(self.scaler, "load_state_dict"):
            self.scaler.load_state_dict(dict(state))
            self.rescale(float(self.scaler.get_scale()))

    def load(self, saved: float) -> None:
        """Take the scale that a loaded state was saved with, 0 for not known."""
        self._scale, self._bridged = saved, False


#: By scaler; weakly, as a scaler may outlive compressions.
_followers: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Scale]] = weakref.WeakKeyDictionary()


def _tell_followers(scaler: Any) -> None:
    """Let a scaler tell its followers of each new scale, and refuse gradients that are being exchanged.

    These are partials, and no closures: a copy of the scaler, or one that was pickled, then has its own.
    """
    _followers[scaler] = weakref.WeakSet()
    scaler.update = partial(_update, scaler, scaler.update)
    for name in ("unscale_", "step"):
        if method := getattr(scaler, name, None):
            setattr(scaler, name, partial(_after_the_exchange, method))


def _update(scaler: Any, stock: Callable[..., None], new_scale: Any = None) -> None:
    stock(new_scale)
    for follower in _followers.get(scaler, ()):
        follower.rescale(float(scaler.get_scale()))


def _after_the_exchange(stock: Callable[..., Any], optimizer: Any, *given: Any, **options: Any) -> Any:
    """Call a scaler's method, but refuse gradients which are being exchanged: it would read and divide them."""
    if getattr(optimizer, "_handles", None):  # Horovod's, of results that it has not fetched
        raise ConfigError(
            "the gradient scaler was used while gradients are being exchanged; call optimizer.synchronize() "
            "first, then scaler.unscale_(optimizer), and scaler.step(optimizer) within "
            "optimizer.skip_synchronize()"
        )
    return stock(optimizer, *given, **options)
