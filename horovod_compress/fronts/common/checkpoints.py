"""What is saved and loaded of a compression."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...engine import checkpoint
from ...errors import ConfigError
from . import saving
from .running import Running


class Checkpoints(Running):
    """A compression whose state can be saved: one rank's, or that of all ranks in a folder."""

    _exchanged = "gradients"

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's step and residuals; every rank saves its own, between two steps."""
        reducer = self._running()
        self._check_between_steps()
        return checkpoint.save(reducer, self._methods, self._steps.state() | {"exchanged": self._exchanged})

    def load_state_dict(self, state: Mapping[str, Any], residuals: str = "restore") -> None:
        """Restore a state, whole or not at all; every rank has to, between the same two steps.

        Args:
            residuals: "restore", or "reset" to continue with empty residuals, for example after a change of the number
                of ranks.

        Raises:
            ConfigError: a step is under way.
            StateError: the state is malformed, or not of this method, rank, number of ranks, model or plan.
            CorruptFrameError: it is not what was saved, by its checksums.
        """
        self.check_state(state, residuals)
        self._take_state(state, residuals)

    def check_state(self, state: Mapping[str, Any], residuals: str = "restore") -> None:
        """Refuse a state that could not be loaded; nothing is changed.

        Raises:
            ConfigError, CorruptFrameError: see :meth:`load_state_dict`.
        """
        self._check_between_steps()
        self._running()
        self._steps.check(state, residuals)
        if residuals == "restore":
            checkpoint.check_exchanged(self._exchanged, state)

    def _take_state(self, state: Mapping[str, Any], residuals: str) -> None:
        self._steps.load(state, residuals, begun=self._compared_ways)
        self._take_order()

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Save the state of all ranks in a folder that they share; every rank has to call it, between two steps.

        The folder holds one file a rank and a manifest, and changes from the checkpoint of before to the new one at
        once: a save that is cut off, or finds the disk full, leaves the one of before.

        Raises:
            ConfigError: some rank could not write its part, and says why; every rank raises it. Or another compression
                of this process saves there, whose files this would remove.
        """
        reducer, path = self._running(), Path(folder).resolve()

        def state() -> dict[str, Any]:
            _check_free(path, self)
            return self.state_dict()

        saving.save(folder, state, reducer.rank, lambda value: self.allgather_object(value, "hvc.save"))
        _savers[path] = self

    def load(self, folder: str | os.PathLike[str], residuals: str = "refuse") -> None:
        """Restore what :meth:`save` left in a folder; every rank has to call it, between the same two steps.

        Either every rank restores its part, or none changes anything.

        Args:
            residuals: with another number of ranks than at the time of saving, "refuse" is an error, "redistribute"
                deals out what waits to be sent, and "reset" begins with empty residuals, also with the same number.

        Raises:
            ConfigError: a step is under way on some rank.
            StateError: the checkpoint is not of this method, model, schedule or number of ranks, or there is none.
            CorruptFrameError: a file is not, byte for byte, what was written.
        """
        reducer = self._running()
        owned = self._methods.folded()
        state, how = saving.load(
            folder, residuals, (reducer.rank, reducer.world), owned, self.check_state,
            lambda value: self.allgather_object(value, "hvc.load"),
        )  # fmt: skip
        self._take_state(state, how)

    def _check_between_steps(self) -> None:
        if self._under_way:
            raise ConfigError(
                f"rank {self._job.number}: a step is under way; the compression state can be saved and loaded "
                f"between steps only: call the optimizer's step() or synchronize() first"
            )


_savers: weakref.WeakValueDictionary[Path, Checkpoints] = weakref.WeakValueDictionary()  # by their folders


def _check_free(folder: Path, saver: Checkpoints) -> None:
    """Refuse a folder in which the compression of another model has saved.

    Raises:
        ConfigError: it is in use.
    """
    other = _savers.get(folder)
    if other is None or other.is_over() or other._steps.index.keys() & saver._steps.index.keys():
        return
    raise ConfigError(
        f"{folder} holds the checkpoint of another compression of this process, which this one would remove; give each "
        "a folder of its own, or close() the other one first"
    )
