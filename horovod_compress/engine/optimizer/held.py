"""A second moment that is held: what lets Adam learn from compressed gradients as from exact ones.

Adam divides by the root of a running mean of squares. Compressed gradients carry what earlier steps left and what the
code rounds off, and both enter that mean as if they were gradient: the steps become smaller, and differ from element
to element. Here the second moment moves in exact rounds only, which are few, and is held in between:

    exact round    r = mean of the ranks' gradients, in bfloat16;  V = b2^n V + (1 - b2^n) r^2, n steps since the last
    other rounds   r = d * decode(encode(gradient / d)),  d = sqrt(V / (1 - b2^s)) + eps, at least a tenth of its row's

Every rank has the same r, so V is equal everywhere and costs no bytes. The optimizer stays torch's own: before its
step the state is set so that its own formula gives what is held. (Kin to 1-bit Adam, Tang et al. 2021, section 3,
which freezes the second moment for good.)
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ... import ops
from ...errors import ConfigError
from ..reducer import Reducer
from .adam import FAMILY

#: A divisor is at least this part of the root mean square of its row: an element that has hardly moved yet must
#: neither set its row's scale nor be divided by almost nothing.
FLOOR = 0.1
#: What codecs divide by is at least this part of the root mean square of the tensor.
LEAST = 1e-6
#: No element moves by more than so many learning rates in a step, as in Adam itself (Kingma and Ba 2015, section 2.1).
BOUND = 10.0
#: How often the second moment moves, if nobody says.
REBUILD_EVERY = 50
#: How many exact rounds begin the training, if nobody says.
WARMUP_STEPS = 30

_log = logging.getLogger("horovod_compress")


def hold(
    optimizer: Any,
    reducer: Reducer,
    named: Iterable[tuple[str, nn.Parameter]],
    usual: int = REBUILD_EVERY,
    second_moment: str = "own",
    warmup_steps: int = WARMUP_STEPS,
    rebuild_every: int | None = None,
) -> HeldSecondMoment | None:
    """Return what holds the second moment of an optimizer, or None where it is left alone.

    Args:
        named: the parameters of the optimizer, as the reducer has them.
        usual: stands for ``rebuild_every`` where that is None.

    Raises:
        ConfigError: these options have no meaning, or not with this optimizer.
    """
    if second_moment not in ("auto", "shared", "own"):
        raise ConfigError(f'second_moment should be "auto", "shared" or "own", got {second_moment!r}')
    rebuild_every = usual if rebuild_every is None else rebuild_every
    for name, value in (("warmup_steps", warmup_steps), ("rebuild_every", rebuild_every)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} should be a whole number from 1 on, got {value!r}")
    adam = isinstance(optimizer, FAMILY) and not any(group.get("amsgrad") for group in optimizer.param_groups)
    if second_moment == "shared" and not adam:
        raise ConfigError(
            'second_moment="shared" is for Adam and AdamW without amsgrad, whose second moment is another; got '
            f'{type(optimizer).__name__}: leave it at "auto", or choose "own"'
        )
    needed = any(divides != "never" for divides in reducer.divides().values())
    if second_moment == "own" or not adam or not needed:
        return None
    if second_moment == "auto" and not _is_stock(optimizer):
        return None
    warmup_steps = max(warmup_steps, reducer.exact_until())
    if reducer.rank == 0:
        _log.info(
            "the second moment of %s is shared: the first %d rounds and then one in %d are exact and move it, in the "
            "others it is held",
            *(type(optimizer).__name__, warmup_steps, rebuild_every),
        )
    return HeldSecondMoment(optimizer, reducer, dict(named), warmup_steps, rebuild_every)


def _is_stock(optimizer: Any) -> bool:
    """Return whether the step is torch's own: another one may have another use for the state that is written here."""
    steps = [vars(kind)["step"] for kind in type(optimizer).__mro__ if "step" in vars(kind) and not _is_horovod_s(kind)]
    # Torch writes a wrapped step into each class of which it makes the first optimizer.
    return bool(steps) and inspect.unwrap(steps[0]) is inspect.unwrap(torch.optim.Adam.step)


def _is_horovod_s(kind: type) -> bool:
    return "_allreduce_grad_async" in vars(kind)


def check_state(state: Mapping[str, Mapping[str, Any]], shapes: Mapping[str, torch.Size]) -> None:
    """Refuse a saved second moment that is not of these parameters.

    Raises:
        ConfigError: names the parameter.
    """
    for name, saved in state.items():
        moment = saved["moment"]
        if name not in shapes or moment.shape != shapes[name] or not bool((moment.isfinite() & (moment >= 0)).all()):
            raise ConfigError(
                f"the saved second moment of {name} should be finite, of shape {tuple(shapes.get(name, ()))}, got "
                f"{tuple(moment.shape)}; load the state of the same model, saved at a step that went well"
            )


def give_back(state: Mapping[str, Mapping[str, Any]], reducer: Reducer) -> None:
    """Carry what waits over to the units of gradients, where a second moment was loaded that nobody holds."""
    factors = {name: _Held(**saved).divisor for name, saved in state.items()}
    reducer.convert_kept({name: factor for name, factor in factors.items() if factor is not None})


@dataclass
class _Held:
    """The second moment of one parameter, and what is derived from it; equal on every rank."""

    moment: Tensor  # V / (1 - b2^s)
    steps: float  # s, the steps that it stands for
    since: float  # the optimizer's step of the last exact round
    eps: float
    divides: bool  # gradients before they are encoded, not only in the optimizer
    divisor: Tensor | None = field(init=False)  # then it is d in units of its root mean square, flat
    root: Tensor = field(init=False)  # d without eps, which the optimizer adds itself

    def __post_init__(self) -> None:
        self.derive()

    def derive(self) -> None:
        """Find what to divide by."""
        rows = self.moment.flatten(1) if self.moment.dim() > 1 else self.moment.view(1, self.moment.numel())
        least = FLOOR * rows.mean(1, keepdim=True).sqrt()
        self.root = torch.maximum(rows.sqrt(), least).view_as(self.moment)
        self.divisor = None
        if not self.divides:
            return
        divisor = (self.root + self.eps).view(-1)
        # Of the order of 1, so that what is encoded has the size of gradients, in float16 too.
        size = divisor.square().mean().sqrt().clamp_(min=torch.finfo(divisor.dtype).tiny)
        self.divisor = divisor.div_(size).clamp_(min=LEAST)

    def move(self, grad: Tensor, beta2: float, now: float) -> None:
        """Take in the mean gradient of an exact round, for all steps since the last one."""
        keep, share = beta2 ** (now - self.since), 1 - beta2**self.steps
        self.steps, self.since = self.steps + now - self.since, now
        self.moment.mul_(keep * share).addcmul_(grad, grad, value=1 - keep).div_(1 - beta2**self.steps)
        self.derive()


class HeldSecondMoment:
    """Holds the second moment of Horovod's optimizer around Adam or AdamW, and tells codecs what to divide by.

    Args:
        optimizer: only its state is written.
        named: its parameters by name, as the reducer has them.
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

    @property
    def warmup(self) -> int:
        return self._warmup

    def settings(self) -> str:
        """Return what has to be equal on every rank, in words."""
        begun = f", of step {self._reducer.step} ({self._digest():016x})" if self._held else ""
        return f"shared with warmup_steps={self._warmup} and rebuild_every={self._every}{begun}"

    def _digest(self) -> int:
        value = 1
        for name in sorted(self._held):
            value = ops.hash64(self._held[name].moment.view(-1).view(torch.uint8), value)
        return value

    def is_exact(self, step: int) -> bool:
        return step < self._warmup or (step - self._warmup) % self._every == 0

    # ---- state ----

    def state_dict(self) -> dict[str, dict[str, Any]]:
        return {
            name: {kind: getattr(held, kind) for kind in ("steps", "since", "eps", "divides")}
            | {"moment": held.moment.clone()}
            for name, held in self._held.items()
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore what :meth:`state_dict` returned, beside what waits in the units that go with it."""
        self._prepared = self._reducer.step - 1
        where = {name: parameter.device for _, parameter, name in self._parameters()}
        self._held = {
            name: _Held(**{**saved, "moment": saved["moment"].clone().to(where[name])}) for name, saved in state.items()
        }

    # ---- before the first gradient of a step ----

    @torch.no_grad()
    def begin(self, step: int) -> None:
        """Choose what the step exchanges, and show codecs what to divide by."""
        exact = self.is_exact(step)
        if self._every == 1:  # it is the stock optimizer
            self._reducer.next_steps(plain=True)
            return
        self._reducer.hold(step, exact)
        if exact and (watch := self._reducer.watch):
            watch.spoil()  # what is measured now says nothing of the method
        divides = self._reducer.divides()
        factors: dict[str, Tensor] = {}
        for group, parameter, name in self._parameters():
            held, state = self._held.get(name), self._optimizer.state.get(parameter)
            # The schedule leaves its bucket uncompressed now; or the optimizer is of an earlier step than what is held.
            if held and (divides[name] == "never" or not state or float(state["step"]) < held.since):
                held = None
                _note(factors, name, self._held.pop(name).divisor, None)
            if not (exact or held) and state and divides[name] != "never":  # the optimizer has moved its own until now
                self._held[name] = held = _taken_over(group, state, divides[name] == "before")
                _note(factors, name, None, held.divisor)
        self._reducer.convert_kept(factors)
        self._reducer.divide_by({name: held.divisor for name, held in self._held.items() if held.divisor is not None})

    def _parameters(self) -> Iterator[tuple[dict[str, Any], nn.Parameter, str]]:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in self._names:
                    yield group, parameter, self._names[id(parameter)]

    # ---- before the optimizer's own step ----

    @torch.no_grad()
    def prepare(self) -> None:
        """Set the state of Adam so that its own step divides by what is held.

        The hook comes twice in a step, as Horovod's optimizer calls torch's; once the results are there.
        """
        step = self._reducer.next_step() - 1
        awaited = getattr(self._optimizer, "_handles", None)  # gradients whose results Horovod has not fetched yet
        if step <= self._prepared or awaited or not self._reducer.idle():
            return
        self._prepared = step
        factors: dict[str, Tensor] = {}
        for group, parameter, name in self._parameters():
            held, state = self._held.get(name), self._optimizer.state.get(parameter)
            if held is None or not state or parameter.grad is None:
                continue
            grad, now = self._gradient(group, parameter), float(state["step"]) + 1
            root = held.root
            if self.is_exact(step) and now > held.since and bool(grad.isfinite().all()):
                before = held.divisor
                held.move(grad, float(group["betas"][1]), now)
                _note(factors, name, before, held.divisor)
                root = held.moment.sqrt()
            _write(group, state, grad, root, now)
        self._reducer.convert_kept(factors)

    def _gradient(self, group: dict[str, Any], parameter: nn.Parameter) -> Tensor:
        """Return the gradient as Adam's moments see it."""
        assert parameter.grad is not None
        grad = _wide(parameter.grad)
        grad = -grad if group["maximize"] else grad
        decoupled = group.get("decoupled_weight_decay", isinstance(self._optimizer, torch.optim.AdamW))
        if group["weight_decay"] and not decoupled:
            grad = grad.add(parameter, alpha=float(group["weight_decay"]))
        return grad


def _taken_over(group: dict[str, Any], state: dict[str, Any], divides: bool) -> _Held:
    """Return the second moment that an optimizer has."""
    now = float(state["step"])
    moment = _wide(state["exp_avg_sq"]) / (1 - float(group["betas"][1]) ** now)
    return _Held(moment.contiguous(), now, now, float(group["eps"]), divides)


def _note(factors: dict[str, Tensor], name: str, before: Tensor | None, after: Tensor | None) -> None:
    """Note by what to multiply what waits for a tensor: it has other units now, None stands for those of gradients."""
    if before is not None:
        factors[name] = before if after is None else before / after
    elif after is not None:
        factors[name] = after.reciprocal()


def _write(group: dict[str, Any], state: dict[str, Any], grad: Tensor, root: Tensor, now: float) -> None:
    """Set the second moment of Adam so that its step number ``now``, with this gradient, divides by ``root`` + eps.

    Or by more, where its first moment would move an element by more than :data:`BOUND`, and where this gradient alone
    is more than that: Adam adds its square to what it is given, which cannot be less than nothing.
    """
    beta1, beta2 = map(float, group["betas"])
    least = _wide(state["exp_avg"]).lerp(grad, 1 - beta1).abs_().div_((1 - beta1**now) * BOUND)
    wanted = torch.maximum(root, least, out=least).square_().mul_(1 - beta2**now)
    state["exp_avg_sq"].copy_(wanted.addcmul_(grad, grad, value=beta2 - 1).div_(beta2).clamp_(min=0.0))


def _wide(tensor: Tensor) -> Tensor:
    """Return a tensor as numbers of at least 32 bits."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
