"""What update mode does with Adam's second moment: local steps divide by what all ranks hold.

With an Adam of its own on every rank, the ranks' directions are not comparable: each divides by what it alone has
seen. Here the second moment V is that of :mod:`.second_moment`, moved in a few rounds by the
gradients' mean over ranks; each rank's first moment stays its own. So the directions fit for one bit: 1-bit Adam's
observation (Tang et al. 2021, section 3) with another exchange. Codecs divide nothing: updates are divided already.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import StateError
from ...ops.checksums import hash_of
from ..saved import checksums
from ..shards import local
from . import rare_rows, saved_moments, second_moment as moments
from .second_moment import Moment

#: A rank's own gradient is often many times the root of V. At least this part of the square that it adds to Adam's
#: second moment stays there, as differences of close numbers are rounded.
LEFT = 0.01
_ADAM = replace(moments.ADAM, left=LEFT)


class SharedSecondMoment:
    """The second moment of an Adam optimizer whose ranks do local steps.

    Args:
        optimizer: Adam or AdamW; only its state is written, which stays one of torch's own.
        named: its parameters by name.
    """

    def __init__(self, optimizer: Any, named: Mapping[str, nn.Parameter]) -> None:
        self._optimizer, self._places = optimizer, partial(moments.places, optimizer, moments.names_of(named.items()))
        self._shapes = {name: local(parameter).shape for name, parameter in named.items()}
        self._moments: dict[str, Moment] = {}
        self._moved = -1  # after so many local steps it moved last; -1: it is not held yet
        self._shown = ""  # see shown(); empty where that has changed

    @property
    def holds(self) -> bool:
        return self._moved >= 0

    def begin(self, steps: int) -> None:
        """Hold what the optimizer's steps on mean gradients have made, unless something is held already.

        Args:
            steps: local steps that have been done.
        """
        if self.holds:
            return
        for group, parameter, name in self._places():
            if (state := self._optimizer.state.get(parameter)) and float(state["step"]):
                self._moments[name] = Moment(*moments.ADAM.taken_over(group, state))
                self._moments[name].begin_stand_in()
        self._moved = steps

    def let_go(self) -> None:
        """Leave it to the optimizer of one rank alone; among several ranks, what that makes of it is held again."""
        self._moments, self._moved, self._shown = {}, -1, ""

    @torch.no_grad()
    def prepare(self) -> None:
        """Set the state of Adam so that its next step divides by what is held.

        A parameter that no rank had a gradient for when V moved has none: Adam's own serves until V moves again. So it
        does in the first step that this rank does with a parameter, as there is no state to be set yet.
        """
        for group, parameter, name in self._places():
            held, state = self._moments.get(name), self._optimizer.state.get(parameter)
            if held and state and parameter.grad is not None:
                grad, now = _ADAM.gradient(self._optimizer, group, parameter), float(state["step"]) + 1
                rare_rows.take_in(_ADAM, held, group, state, parameter, now)
                _ADAM.write(group, state, grad, held, now)

    def rebuild(self, steps: int) -> None:
        """Move V by the gradients, which are means over ranks; a parameter without one keeps its V, as in Adam.

        Args:
            steps: local steps that have been done.
        """
        for group, parameter, name in self._places():
            if parameter.grad is not None:
                if name not in self._moments:  # no rank has had a gradient for it yet
                    zeros = torch.zeros_like(moments.wide(parameter), memory_format=torch.contiguous_format)
                    self._moments[name] = Moment(zeros, 0.0)
                    self._moments[name].begin_stand_in()
                grad, held = _ADAM.gradient(self._optimizer, group, parameter), self._moments[name]
                held.move(grad, float(group["betas"][1]), steps - self._moved)
                if not (state := self._optimizer.state.get(parameter)):
                    held.stand_in = None  # its first step here is not done yet: what that leaves stands in then
                elif held.moment.dim() > 1 and held.moment.numel():
                    rare_rows.find(_ADAM, held, group, state, float(state["step"]))
        self._moved, self._shown = steps, ""

    def compared(self) -> list[Tensor]:
        """Return what is equal on every rank: what is held, before that the optimizer's whole state."""
        if not self.holds:
            states = [self._optimizer.state.get(parameter, {}) for _, parameter, _ in self._places()]
            return [local(state[kind]) for state in states for kind in sorted(state) if isinstance(state[kind], Tensor)]
        held = self._moments.items()
        mine = {name: [moment.moment, torch.tensor([moment.steps, self._moved], device="cpu")] for name, moment in held}
        return [tensor for _, _, name in self._places() for tensor in mine.get(name, ())]

    def shown(self) -> str | None:
        """Return what is held, for a comparison with other ranks; None for nothing."""
        if self.holds and not self._shown:
            steps = sorted({moment.steps for moment in self._moments.values()})
            value = hash_of(self.compared())
            self._shown = f"of {len(self._moments)} parameters, after steps {steps}, by its hash {value:016x}"
        return self._shown or None

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        held = self._moments.items()
        kept = {name: moment.state() | {"moment": moment.moment.clone()} for name, moment in held}
        return {"moved": self._moved, "moments": kept}

    def check(self, state: Mapping[str, Any], warming: bool) -> None:
        """Refuse a saved second moment that does not fit.

        Args:
            warming: the warm-up of this optimizer goes on at the saved step.

        Raises:
            ConfigError: says what was expected.
        """
        saved_moments.check_state(state["moments"], self._shapes, needs=("steps",))
        if warming and state["moved"] >= 0:
            raise StateError(
                f"the saved optimizer finished its warm-up within {state['moved']} local steps, and this warmup_steps "
                "would start it again, with first moments that differ between ranks; resume with the same options"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, once the optimizer's state is loaded."""
        devices = {name: parameter.device for _, parameter, name in self._places()}
        self._moved, self._shown = state["moved"], ""
        self._moments = {
            name: Moment(steps=saved["steps"], **saved_moments.tensors_of(saved, devices[name]))
            for name, saved in state["moments"].items()
        }


def check_form(state: object) -> None:
    """Refuse what is not the state of an update-mode optimizer.

    Raises:
        StateError: it is malformed.
        CorruptFrameError: it is not what was saved, by its checksums.
    """
    parts = state if isinstance(state, Mapping) else {}
    checksums.outline(parts)
    numbers = [parts.get(name) for name in ("steps", "since", "exchanges")]
    moment, resting = parts.get("second_moment", {"moved": 0, "moments": {}}), parts.get("resting", [])
    if (
        not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers)
        or not checksums.is_list(parts.get("base"), lambda base: isinstance(base, Tensor) and base.is_floating_point())
        or type(parts.get("due")) is not bool
        or not isinstance(moment, Mapping)
        or type(moment.get("moved")) is not int
        or not isinstance(moment.get("moments"), Mapping)
        or not checksums.is_list(resting, lambda name: isinstance(name, str))
    ):
        raise StateError(
            f"the saved state of an update-mode optimizer should have its counters and common weights, got "
            f"{state!r:.100}; load what its state_dict() returned"
        )
    checksums.check(parts)
