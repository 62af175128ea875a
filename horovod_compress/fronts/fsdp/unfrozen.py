"""Parameters that were frozen when the replicas met, and are trained all the same: no other replica knows how.

Torch alone would average their gradients over all ranks from then on. What a rank's values are shows nothing: of a
small parameter, or in a pass that uses some rows, a rank may have no gradient but zeros, and another one not.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from ...engine.optimizer.step_hooks import builds_state
from ...errors import ConfigError, in_job, some_of
from ..fresh import needing_gradient
from ..session import Session, before_each_step, exchanged, weakly
from ..torch_dist.hooks import ParameterHook


class Unfrozen:
    """Refuses steps with gradients of such parameters, but for those that another compression has exchanged.

    Args:
        session: knows them.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._names = {id(parameter): name for name, parameter in session.others}
        self._alone: set[int] = set()  # what passes have brought gradients of, by identity
        hook = ParameterHook(weakly(self._note))
        self._handles = []
        for _, parameter in session.others:
            if (parameter.is_floating_point() or parameter.is_complex()) and not parameter.is_inference():
                with needing_gradient(parameter):  # which no other kind may have
                    self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
        # Also where nobody closes it: what is closed with a compression must not keep parameters, which may know it.
        self._end = weakref.finalize(self, _end, before_each_step(weakly(self._refuse), gradients=True), self._handles)
        self._end.atexit = False

    def close(self) -> None:
        """Refuse nothing any more; safe to call twice."""
        self._end()

    def _note(self, parameter: nn.Parameter) -> None:
        """Note a gradient as it comes: whoever exchanges the parameter later has not exchanged this one."""
        if exchanged(parameter):
            self._alone.discard(id(parameter))  # all of the sum that is there by now
        elif parameter.grad is not None:
            self._alone.add(id(parameter))

    def _refuse(self, optimizer: Any) -> None:
        """Refuse a step with such gradients, or others in their place, before it moves a weight.

        Raises:
            ConfigError: names the parameters.
        """
        # Torch's get_state_dict() makes a step with zeros, to build the state.
        if not self._alone or self._session.is_over() or builds_state():
            return
        found = []
        for group in optimizer.param_groups:
            for one in group["params"]:
                if id(one) in self._alone and one.grad is not None:
                    found.append(self._names[id(one)])
                elif one.grad is None:
                    self._alone.discard(id(one))
        if not found:
            return
        error = ConfigError(
            f"rank {self._session.job.number}: an optimizer makes a step with gradients that are not exchanged, as the "
            f"parameters were frozen when the compression was created: {some_of(found)}; create it while they need a "
            "gradient, and freeze them later; or, to train them from here on, close() it, and create and register "
            "another one"
        )
        self._session.failure.report("a step", in_job(error))
        raise error


def _end(end_look: Callable[[], object], handles: Iterable[Any]) -> None:
    end_look()
    for handle in handles:
        handle.remove()
