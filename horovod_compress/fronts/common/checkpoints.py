"""What is saved and loaded of a compression."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...engine import names
from ...engine.saved import checkpoint
from ...engine.saved.state_folder import Known
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
        """Restore a state, completely or not at all; call it on every rank, between the same two steps.

        Args:
            residuals: "restore", or "reset" to continue with empty residuals, for example after a change of the number
                of ranks.

        Raises:
            ConfigError: a step is under way.
            StateError: the state is malformed, or belongs to another method, rank, number of ranks, model or plan.
            CorruptFrameError: its checksums show that it has changed since it was saved.
        """
        self.check_state(state, residuals)
        self._take_state(state, residuals)

    def check_state(self, state: Mapping[str, Any], residuals: str = "restore") -> None:
        """Refuse a state that could not be loaded; nothing is changed.

        Raises:
            ConfigError, CorruptFrameError: see :meth:`load_state_dict`.
        """
        self._check_between_steps()
        state = names.in_state(state, self._running().plan.names())
        self._steps.check(state, residuals)
        if residuals == "restore":
            checkpoint.check_exchanged(self._exchanged, state)

    def _take_state(self, state: Mapping[str, Any], residuals: str) -> None:
        state = names.in_state(state, self._running().plan.names())
        self._steps.load(state, residuals, begun=self._compared_ways)
        self._take_order()

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Save the state of all ranks in a folder that they share; call it on every rank, between two steps.

        The folder holds one file per rank and a manifest, and switches from the previous checkpoint to the new one
        atomically: a save that is interrupted, or finds the disk full, leaves the previous one in place.

        If the folder holds a checkpoint that this job has neither saved nor loaded, rank 0 warns, and that one
        stays there under another name.

        Raises:
            ConfigError: some rank could not write its part, and says why; every rank raises it. Or another job has
                saved there since this one did, or another compression of this process saves there.
        """
        reducer, path = self._running(), Path(folder).resolve()

        def state() -> dict[str, Any]:
            _check_free(path, self)
            return self.state_dict()

        saving.save(folder, state, reducer.rank, lambda value: self.allgather_object(value, "hvc.save"), _known)
        _savers[path] = self

    def load(self, folder: str | os.PathLike[str], residuals: str = "refuse") -> None:
        """Restore what :meth:`save` left in a folder; call it on every rank, between the same two steps.

        Either every rank restores its part, or none changes anything.

        Args:
            residuals: if the number of ranks has changed since saving, "refuse" raises an error, "redistribute" divides
                the unsent residual among the ranks, and "reset" begins with empty residuals, whatever the number.

        Raises:
            ConfigError: a step is under way on some rank.
            StateError: the checkpoint is missing, or belongs to another method, model, schedule or number of ranks.
            CorruptFrameError: a file is not, byte for byte, what was written.
        """
        reducer = self._running()
        owned = self._methods.folded()
        state, how = saving.load(
            folder, residuals, (reducer.rank, reducer.world), owned, self.check_state,
            lambda value: self.allgather_object(value, "hvc.load"), _known,
        )  # fmt: skip
        self._take_state(state, how)

    def _check_between_steps(self) -> None:
        if self._under_way:
            raise ConfigError(
                f"rank {self._job.number}: a step is under way; the compression state can be saved and loaded "
                f"between steps only: call the optimizer's step() or synchronize() first"
            )


#: Of folders. The next compression of this process, after elastic training has begun again, is of the same job.
_known = Known()
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
        f"{folder} holds the checkpoint of another compression of this process, which saving here would remove; use a "
        "separate folder for each, or close() the other one first"
    )
