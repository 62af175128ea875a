"""Adam with a second moment that all ranks share and hold: what makes its direction fit for one bit.

With an Adam of its own on every rank, the ranks' directions are not comparable: each divides by what
it alone has seen. Here the second moment ``v`` is built from the gradients' mean over ranks, in a few
rounds only, and held in between; each rank's first moment ``m`` stays its own, and

    update = -lr * m / (1 - beta1^t) / (sqrt(v / (1 - beta2^s)) + eps)

is what is exchanged: 1-bit Adam's observation (Tang et al. 2021, section 3) with another exchange.
``s`` counts the steps that ``v`` stands for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ConfigError

#: Classes whose update this is; others keep their own second moment.
FAMILY = (torch.optim.Adam, torch.optim.AdamW)


class SharedSecondMoment:
    """The local steps of an Adam optimizer whose second moment is held.

    Args:
        optimizer: Adam or AdamW; its state is read and written, so that it can be saved as usual.

    Raises:
        ConfigError: an option of the optimizer has no meaning here.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._divisors: dict[nn.Parameter, Tensor] = {}
        for group in optimizer.param_groups:
            for name in ("amsgrad", "maximize", "capturable", "differentiable"):
                if group.get(name):
                    raise ConfigError(f'{name}=True is not supported with second_moment="shared"; choose "own"')

    def step(self) -> None:
        """Do one local step with every gradient that there is; ``v`` stays as it is.

        Where ``v`` is too small for a gradient that comes later, as for a word that was not seen
        before, no element moves further than Adam's own bound (Kingma and Ba 2015, section 2.1).
        """
        for group in self._optimizer.param_groups:
            (beta1, beta2), lr = map(float, group["betas"]), float(group["lr"])
            bound = max(1.0, (1 - beta1) / (1 - beta2) ** 0.5)
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self._state_of(parameter)
                grad = _decayed(group, parameter, isinstance(self._optimizer, torch.optim.AdamW))
                state["step"] += 1
                state["exp_avg"].lerp_(grad, 1 - beta1)
                direction = state["exp_avg"] / self._divisor(group, parameter, state)
                limit = bound * (1 - beta1 ** float(state["step"]))
                parameter.add_(direction.clamp_(-limit, limit), alpha=-lr * bound / limit)

    def rebuild(self, means: Iterable[tuple[nn.Parameter, Tensor]], steps: int) -> None:
        """Move ``v`` towards the squares of the gradients' means.

        Args:
            means: of this step's gradients over all ranks, by parameter.
            steps: how many steps this stands for, since the last time.
        """
        found = dict(means)
        for group in self._optimizer.param_groups:
            keep = float(group["betas"][1]) ** steps
            for parameter in group["params"]:
                if parameter not in found:
                    continue
                state = self._state_of(parameter)
                square = found[parameter].to(state["exp_avg_sq"].dtype).square()
                state["exp_avg_sq"].lerp_(square, 1 - keep)
                state["second_moment_steps"] += steps
        self.forget()

    def take_over(self) -> None:
        """Begin to hold ``v`` as the optimizer's own steps, on the ranks' mean gradients, have made it."""
        for state in self._optimizer.state.values():
            state["second_moment_steps"] = float(state["step"])
        self.forget()

    def forget(self) -> None:
        """Forget what was derived from the state, as it has changed."""
        self._divisors.clear()

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return the state of a parameter, begun if there is none yet."""
        state = self._optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state.setdefault("second_moment_steps", float(state["step"]))
        return state

    def _divisor(self, group: dict[str, Any], parameter: nn.Parameter, state: dict[str, Any]) -> Tensor:
        """Return ``sqrt(v / (1 - beta2^s)) + eps``, which is the same until ``v`` moves."""
        if parameter not in self._divisors:
            correction = 1 - float(group["betas"][1]) ** state["second_moment_steps"]
            divisor = state["exp_avg_sq"].sqrt()
            self._divisors[parameter] = divisor.div_(max(correction, 1e-30) ** 0.5).add_(float(group["eps"]))
        return self._divisors[parameter]


def _decayed(group: dict[str, Any], parameter: nn.Parameter, adamw: bool) -> Tensor:
    """Apply the weight decay: to the parameter with AdamW, else into the gradient, which is returned.

    Groups say themselves which it is from torch 2.7 on.
    """
    grad, decay = parameter.grad, float(group["weight_decay"])
    assert grad is not None
    if decay and group.get("decoupled_weight_decay", adamw):
        parameter.mul_(1 - float(group["lr"]) * decay)
    elif decay:
        grad = grad.add(parameter, alpha=decay)
    return grad
