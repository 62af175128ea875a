"""A second moment that is held: what lets Adam learn from compressed gradients as from exact ones.

Adam divides by the root of a running mean of squares. Compressed gradients carry what earlier steps left and what the
code rounds off, and both enter that mean as if they were gradient: the steps become smaller, and differ from element
to element. Here the second moment moves in exact rounds only, which are few, and is held in between:

    exact round    r = mean of the ranks' gradients, uncompressed;  V = b2^n V + (1 - b2^n) r^2, n steps since the last
    other rounds   r = d * decode(encode(gradient / d)),  d = sqrt(V / (1 - b2^s)) + eps, at least a tenth of its row's

Every rank has the same r, so V is equal everywhere and costs no bytes. The optimizer stays torch's own: before its
step the state is set so that its own formula gives what is held. (Kin to 1-bit Adam, Tang et al. 2021, section 3,
which freezes the second moment for good.)
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .errors import ConfigError
from .reducer import Reducer

#: A divisor is at least this part of the root mean square of its row: an element that has hardly moved yet must
#: neither set its row's scale nor be divided by almost nothing.
FLOOR = 0.1
#: What codecs divide by is at least this part of the root mean square of the tensor.
LEAST = 1e-6
#: No element moves by more than so many learning rates in a step, as in Adam itself (Kingma and Ba 2015, section 2.1).
BOUND = 10.0


#: How often the second moment moves, if nobody says.
REBUILD_EVERY = 50
#: Classes whose update this is; others keep their own second moment.
FAMILY = (torch.optim.Adam, torch.optim.AdamW)

_log = logging.getLogger("horovod_compress")


def hold(
    optimizer: Any,
    reducer: Reducer,
    named: Iterable[tuple[str, nn.Parameter]],
    second_moment: str,
    warmup_steps: int,
    rebuild_every: int,
) -> HeldSecondMoment | None:
    """Return what holds the second moment of an optimizer, or None where it is left alone.

    Raises:
        ConfigError: these options have no meaning, or not with this optimizer.
    """
    if second_moment not in ("auto", "shared", "own"):
        raise ConfigError(f'second_moment should be "auto", "shared" or "own", got {second_moment!r}')
    for name, value in (("warmup_steps", warmup_steps), ("rebuild_every", rebuild_every)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} should be a whole number from 1 on, got {value!r}")
    adam = isinstance(optimizer, FAMILY)
    if second_moment == "shared" and not adam:
        raise ConfigError(f'second_moment="shared" is for Adam and AdamW, got {type(optimizer).__mro__[1].__name__}')
    needed = any(divides != "never" for divides in reducer.divides().values())
    if second_moment == "own" or not adam or not needed:
        return None
    if reducer.rank == 0:
        _log.info(
            "the second moment of %s is shared: the first %d rounds and then one in %d are exact and move it, in the "
            'others it is held; attach(optimizer, second_moment="own") leaves it to the optimizer',
            *(type(optimizer).__name__, warmup_steps, rebuild_every),
        )
    return HeldSecondMoment(optimizer, reducer, dict(named), warmup_steps, rebuild_every)


@dataclass
class _Held:
    """The second moment of one parameter, corrected for its bias, and what is derived from it."""

    moment: Tensor  # V / (1 - b2^s)
    steps: float  # s, the steps that it stands for
    since: float  # the optimizer's step of the last exact round
    eps: float
    divisor: Tensor | None = None  # d in the units of its root mean square, flat
    root: Tensor | None = None  # d without eps, which the optimizer adds itself

    def derive(self) -> None:
        """Find what to divide by."""
        rows = _rows(self.moment)
        root = rows.sqrt()
        least = FLOOR * rows.mean(1, keepdim=True).sqrt()
        self.root = torch.maximum(root, least, out=root).view_as(self.moment)
        divisor = (self.root + self.eps).view(-1)
        # Of the order of 1, so that what is encoded has the size of gradients, in float16 too.
        size = divisor.square().mean().sqrt().clamp_(min=torch.finfo(divisor.dtype).tiny)
        self.divisor = divisor.div_(size).clamp_(min=LEAST)


class HeldSecondMoment:
    """Holds the second moment of an attached Adam or AdamW, and tells codecs what to divide by.

    Args:
        optimizer: Horovod's, around Adam or AdamW; only its state is written.
        warmup: so many steps begin the training with exact rounds; at least 1.
        every: after these, one round in so many is exact.
    """

    def __init__(
        self, optimizer: Any, reducer: Reducer, named: Mapping[str, nn.Parameter], warmup: int, every: int
    ) -> None:
        self._optimizer, self._reducer, self._names = optimizer, reducer, {id(p): name for name, p in named.items()}
        self._warmup, self._every = warmup, every
        self._held: dict[str, _Held] = {}
        self._prepared = reducer.step - 1
        optimizer.register_step_pre_hook(lambda *given: self.prepare())

    def is_exact(self, step: int) -> bool:
        return step < self._warmup or (step - self._warmup) % self._every == 0

    # ---- state ----

    def state_dict(self) -> dict[str, dict[str, Any]]:
        return {
            name: {"moment": held.moment.clone(), "steps": held.steps, "since": held.since, "eps": held.eps}
            for name, held in self._held.items()
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]], residuals: str) -> None:
        """Restore what :meth:`state_dict` returned; what waits is in its units, unless it was reset."""
        self._held, self._prepared = {}, self._reducer.step - 1
        for name, saved in state.items():
            held = _Held(saved["moment"].clone(), saved["steps"], saved["since"], saved["eps"])
            held.derive()
            self._held[name] = held

    # ---- before the first gradient of a step ----

    def begin(self, step: int) -> None:
        """Choose what the step exchanges, and show codecs what to divide by."""
        self._reducer.hold(step, self.is_exact(step))
        divides = self._reducer.divides()
        wanted = {n: h.divisor for n, h in self._held.items() if h.divisor is not None and divides.get(n) == "before"}
        self._reducer.divide_by(wanted)

    # ---- before the optimizer's own step ----

    @torch.no_grad()
    def prepare(self) -> None:
        """Set the state of Adam so that its own step divides by what is held.

        The hook comes twice in a step, as Horovod's optimizer calls torch's; once the results are there.
        """
        step = self._reducer.next_step() - 1
        if step <= self._prepared or not self._reducer.idle():
            return
        self._prepared = step
        exact, divides = self.is_exact(step), self._reducer.divides()
        for group, parameter, name in self._parameters():
            if divides.get(name, "never") == "never":
                self._held.pop(name, None)
            elif exact:
                self._rebuild(group, parameter, name, again=not self.is_exact(step + 1))
            elif (found := self._held.get(name)) and found.root is not None:
                grad = self._gradient(group, parameter)
                self._write(group, self._optimizer.state[parameter], grad, found.root)

    def _parameters(self) -> Iterator[tuple[dict[str, Any], nn.Parameter, str]]:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and id(parameter) in self._names:
                    yield group, parameter, self._names[id(parameter)]

    def _rebuild(self, group: dict[str, Any], parameter: nn.Parameter, name: str, again: bool) -> None:
        """Move the second moment of one parameter, in an exact round.

        Args:
            again: it is to be held in the next step.
        """
        state, (_, beta2), held = self._optimizer.state[parameter], map(float, group["betas"]), self._held.get(name)
        grad, now = self._gradient(group, parameter), _steps(state) + 1
        if held is not None and now - held.since > 1:
            keep, share = beta2 ** (now - held.since), 1 - beta2**held.steps
            held.steps += now - held.since
            held.moment.mul_(keep * share).addcmul_(grad, grad, value=1 - keep).div_(1 - beta2**held.steps)
            self._write(group, state, grad, held.moment.sqrt())
        elif again:  # Adam has moved its own until now
            before = state["exp_avg_sq"].float() * beta2 if state else torch.zeros_like(grad)
            moment = before.addcmul_(grad, grad, value=1 - beta2).div_(1 - beta2**now)
            held = self._held[name] = _Held(moment, now, now, float(group["eps"]), held.divisor if held else None)
        if held is not None:
            held.since = now
            if again:
                self._derive(held, name)

    def _derive(self, held: _Held, name: str) -> None:
        """Find what to divide by, and carry what waits over to its units."""
        before = held.divisor
        held.derive()
        assert held.divisor is not None
        self._reducer.convert_kept(name, held.divisor.reciprocal() if before is None else before / held.divisor)

    @staticmethod
    def _write(group: dict[str, Any], state: dict[str, Any], grad: Tensor, root: Tensor) -> None:
        """Set the second moment of Adam so that its next step, with this gradient, divides by ``root`` + eps.

        Or by more, where its first moment would move an element by more than :data:`BOUND`.
        """
        (beta1, beta2), now = map(float, group["betas"]), _steps(state) + 1
        least = state["exp_avg"].float().lerp(grad, 1 - beta1).abs_().div_((1 - beta1**now) * BOUND)
        wanted = torch.maximum(root, least, out=least).square_().mul_(1 - beta2**now)
        state["exp_avg_sq"].copy_(wanted.addcmul_(grad, grad, value=beta2 - 1).div_(beta2).clamp_(min=0.0))

    def _gradient(self, group: dict[str, Any], parameter: nn.Parameter) -> Tensor:
        """Return the gradient as Adam's moments see it."""
        assert parameter.grad is not None
        grad = parameter.grad.float()
        if (scale := getattr(self._optimizer, "grad_scale", None)) is not None:  # of a fused step
            grad = grad / scale
        grad = -grad if group["maximize"] else grad
        decoupled = group.get("decoupled_weight_decay", isinstance(self._optimizer, torch.optim.AdamW))
        if group["weight_decay"] and not decoupled:
            grad = grad.add(parameter, alpha=float(group["weight_decay"]))
        return grad


def _steps(state: dict[str, Any]) -> float:
    return float(state["step"]) if state else 0.0


def _rows(tensor: Tensor) -> Tensor:
    return tensor.view(tensor.shape[0], -1) if tensor.dim() > 1 else tensor.view(1, -1)
