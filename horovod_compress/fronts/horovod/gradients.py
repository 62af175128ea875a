"""The gradients of Horovod's optimizer: whose each is, and the tokens that Horovod reduces in their place.

And what is refused at its steps, as it would train ranks apart without an error of Horovod's.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from torch import Tensor, nn

from ...engine.agreement import notes
from ...engine.optimizer.step_hooks import uncompiled
from ...engine.reducer import Reducer
from ...errors import ConfigError, HorovodCompressError, some_of
from ..reports import Unexchanged
from ..session import Session, gradient_of, outside
from .private import await_tokens, calling_optimizer, forget_step, owner_of_token, submit_rest, with_settling

_log = logging.getLogger("horovod_compress")
NO_ADASUM = "op=hvd.Adasum is not supported: it combines parameter updates, not gradients; use op=hvd.Average"


class Finder:
    """Finds parameters by the identity of their gradients.

    Args:
        parameters: in the order of the plan.
        rank: for people.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], rank: int) -> None:
        self._parameters, self._rank = parameters, rank
        self._order = list(range(len(parameters)))
        #: How many gradients of a step have come.
        self.calls = 0

    def look(self, tensor: Tensor, *, first: bool) -> int | None:
        """Return the index of the parameter whose gradient this is, None where it is of none.

        Gradients arrive in much the same order in every step, so the last order is tried first.

        Args:
            first: of a step.
        """
        if first:
            self.calls = 0
        place = self.calls % max(1, len(self._order))
        self.calls += 1
        if self._order and self._parameters[self._order[place]].grad is tensor:
            return self._order[place]
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is tensor:
                at = self._order.index(index)
                self._order[place], self._order[at] = index, self._order[place]
                return index
        return None

    def why_unknown(self, tensor: Tensor) -> str:
        if isinstance(tensor, nn.Parameter):
            return NO_ADASUM
        return (
            f"rank {self._rank}: compress() got a tensor of shape {tuple(tensor.shape)} that is not "
            f"the gradient of any of the {len(self._parameters)} parameters in named_parameters; give "
            f"the compression all parameters of the optimizer, created while they need a gradient, and use it with "
            f"that optimizer only"
        )


_RESULTS = (
    "optimizer.step() was called after optimizer.synchronize() without optimizer.skip_synchronize(): the gradients are "
    "left unchanged"
)
_OTHERS = (
    "gradients were handed over after optimizer.synchronize() without a backward pass, and they are not its results: "
    "these are exchanged. If they were made of the results, they are exchanged twice: write skip_synchronize()"
)


class Handed:
    """The gradients in which results were handed back, until the program replaces or clears them."""

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[Tensor]] = {}
        self._filled: tuple[int, int] = 0, 0  # a gradient that is not all zeros, by identity and version
        self._told: set[str] = set()

    def note(self, parameter: nn.Parameter) -> None:
        """Take note of a parameter's gradient, in which Horovod writes the result."""
        self._filled = 0, 0  # another one may have the same identity
        if parameter.grad is not None:
            self._known[id(parameter)] = weakref.ref(parameter.grad)

    def repeat(self, parameters: Collection[nn.Parameter]) -> bool:
        """Return whether gradients that are handed over after ``synchronize()`` are its results, and say so once."""
        if self._still_in(parameters):
            self._tell(_RESULTS)
            return True
        if _OTHERS not in self._told and any(p.grad is not None and bool(p.grad.any()) for p in parameters):
            self._tell(_OTHERS)
        return False

    def _still_in(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Return whether some parameter has a result still; zeros may be of a program that clears them in place."""
        for parameter in parameters:
            grad, known = parameter.grad, self._known.get(id(parameter))
            if known is None or grad is None or known() is not grad:
                continue
            now = id(grad), 0 if grad.is_inference() else grad._version
            if (now == self._filled and now[1]) or bool(grad.any()):
                self._filled = now
                return True
        return False

    def _tell(self, what: str) -> None:
        if what not in self._told:
            self._told.add(what)
            _log.warning("%s", what)


def take_gradients(optimizer: Any, compression: Any) -> None:
    """Replace the call by which an optimizer hands one gradient over; Horovod takes a callable as its handle."""
    stock = optimizer._allreduce_grad_async

    def hand_over(parameter: nn.Parameter) -> tuple[Any, Any]:
        session = compression._current()
        grad = gradient_of(parameter, session.is_sparse(parameter))
        if grad.is_sparse:
            if not optimizer.sparse_as_dense:
                # Where some rank has a dense one, waiting for it would be in vain.
                return with_settling(stock(parameter), lambda: compression._settle(session, session.step))
            grad = grad.to_dense()
        if id(parameter) not in session.steps.index:
            raise ConfigError(compression._finder.why_unknown(grad))
        if compression._is_repeat(session, optimizer):
            return (lambda: grad), None
        with session.lock, _forgetting(optimizer, session.failure.failed):
            if not session.under_way:
                compression._begin_step()
            index = session.steps.index[id(parameter)]  # not before: a step that begins may change buckets
            step = session.offer(index, grad)
        return (lambda: compression._result(session, index, step)), None

    optimizer._allreduce_grad_async = hand_over
    # The plan's buckets take the place of Horovod's groups, whose handles cannot be callables.
    optimizer._groups = None


@contextlib.contextmanager
def _forgetting(optimizer: Any, failed: Callable[[], bool]) -> Iterator[None]:
    """Let later backward passes end with the reason, too, once the ranks have failed in the middle of one."""
    try:
        yield
    except HorovodCompressError:
        if failed():
            forget_step(optimizer)
        raise


# ---- tokens ----


class Tokens:
    """One rank's tokens, one for each parameter.

    Args:
        rank: among those that take part.
        world: how many these are.
    """

    def __init__(self, rank: int, world: int, parameters: int) -> None:
        self._rank, self._world = rank, world
        self._gave_up = False
        self._owners = [owner_of_token() for _ in range(parameters)]

    @contextlib.contextmanager
    def whole_steps(self, compression: Any, failed: Callable[[], bool], places: Mapping[int, int]) -> Iterator[None]:
        """Hand over all tokens of a step if an error ends it in the middle of a backward pass.

        Else those of other ranks would wait for them, and their names could not be used again in this process.

        Args:
            compression: an optimizer calls it.
            failed: returns whether its ranks have failed: each of them gives up this step then.
            places: of the parameters' tokens, by identity.
        """
        try:
            yield
        except HorovodCompressError:
            optimizer = calling_optimizer(compression)
            if failed() and optimizer is not None:
                if not self._gave_up:
                    self._gave_up = True
                    with contextlib.suppress(HorovodInternalError, ValueError):  # it has ended, or a rank is behind
                        known = [p for p in optimizer._requires_update if id(p) in places]
                        submit_rest(optimizer, {p: self.of(places[id(p)]) for p in known})
                forget_step(optimizer)
            raise

    def of(self, index: int) -> Tensor:
        """Return the token of a parameter."""
        token = self._owners[index].grad
        assert token is not None
        return token.fill_(_value(self._rank))

    def result_scale(self, token: float, op: Any) -> float:
        """Return what Horovod's operation made of the ranks' tokens: 1 for the mean, the number of ranks for the sum.

        Args:
            op: the operation, None where it is not known.

        Raises:
            ConfigError: it is none of these, or some rank has joined.
        """
        values = [_value(rank) for rank in range(self._world)]
        total = sum(values)
        for result_scale in (1.0, float(self._world)):
            if abs(token - total * result_scale / self._world) < 1e-3:
                return result_scale
        if op in (hvd.Average, hvd.Sum) and (who := notes.joined(token, values, op == hvd.Average)):
            raise ConfigError(f"{who} called hvd.join() while rank {hvd.rank()} has a step left; {notes.ADVICE}")
        raise ConfigError(
            f"rank {hvd.rank()}: tokens with the sum {total:g} came back as {token:g} from {self._world} "
            f"ranks; only op=hvd.Average and op=hvd.Sum are supported"
        )


def take_operation(reducer: Reducer, op: Any) -> None:
    """Let results be what an optimizer's operation makes: means over ranks, or sums.

    Raises:
        ConfigError: it is none that can be served.
    """
    if op not in (hvd.Average, hvd.Sum):
        raise ConfigError(f"only op=hvd.Average and op=hvd.Sum are supported, got {op}")
    reducer.sum_up(op == hvd.Sum)


def _value(rank: int) -> float:
    """Return the value of a rank's tokens. They differ, so that no other operation gives their mean or sum."""
    return 3.0 if rank else 1.0


# ---- what is refused, at once or at an optimizer's step ----


def refuse_foreign(optimizers: Sequence[Any], compression: object) -> None:
    """Refuse optimizers that cannot be attached to a compression.

    Raises:
        ConfigError: says what to do.
    """
    for optimizer in optimizers:
        if getattr(optimizer, "_compression", None) is not compression:
            wrapped = hasattr(optimizer, "_compression")
            raise ConfigError(
                "attach() takes the optimizer that was created with this compression: "
                "hvd.DistributedOptimizer(..., compression=compression); this one "
                + ("was created with another compression, or none" if wrapped else "is not Horovod's")
            )
        if hasattr(optimizer, "_starting_models"):
            raise ConfigError(NO_ADASUM)
    if len({optimizer.op for optimizer in optimizers}) > 1:
        raise ConfigError("attach() takes optimizers with one op=, as they share an exchange; these have several")
    if len(passes := {optimizer.backward_passes_per_step for optimizer in optimizers}) > 1:
        raise ConfigError(
            f"attach() takes optimizers with one backward_passes_per_step=, as they share one, got {sorted(passes)}"
        )


def refuse_fewer(optimizers: Sequence[Any], session: Session) -> None:
    """Refuse optimizers that leave out parameters of the compression, whose gradients nobody would hand over.

    Raises:
        ConfigError: names some of them.
    """
    if session.reducer.world == 1:  # Horovod reduces nothing then
        return
    theirs = {id(parameter) for optimizer in optimizers for parameter in optimizer._requires_update}
    names = zip(session.reducer.plan.names(), session.steps.parameters, strict=True)
    missing = [name for name, parameter in names if parameter.requires_grad and id(parameter) not in theirs]
    if missing:
        raise ConfigError(
            f"rank {session.job.number}: the compression was given {len(missing)} parameter(s) that the optimizer does "
            f"not have: {some_of(missing)}; give the compression exactly the parameters of its optimizers, and "
            "freeze those that are to be trained later, once all are created"
        )


def watch_steps(optimizer: Any, reducer: Callable[[], Reducer], names: Mapping[int, str]) -> None:
    """Refuse closures of a Horovod optimizer from now on, and tell of parameters that nobody reduces.

    With one rank neither matters; others may come in an elastic job, and another rank be the one that tells.

    Args:
        reducer: returns the one of the ranks that are there.
        names: of parameters, by identity.
    """
    words = "optimizer and compression", "model, optimizer and compression"  # a model keeps the hooks of Horovod's
    exchanged = optimizer._requires_update
    unexchanged = Unexchanged(lambda: outside(optimizer.param_groups, exchanged.__contains__, names), *words)

    def look(watched: Any, given: tuple[Any, ...], options: dict[str, Any]) -> None:
        if (ranks := reducer()).world == 1:
            return
        refuse_closure(watched, given, options)
        if not ranks.rank and not optimizer._handles:  # else Horovod has not fetched the results yet
            unexchanged.look()

    optimizer.register_step_pre_hook(uncompiled(look))


def leave_frozen(optimizer: Any, frozen: Callable[[], Sequence[nn.Parameter]]) -> None:
    """Let an optimizer's own steps skip frozen parameters from now on, as torch alone does.

    Horovod has given them gradients of zeros, with which momentum and weight decay would move them.
    """

    def leave(*given: Any) -> None:
        if not optimizer._handles and (found := frozen()):  # else Horovod has not fetched the results yet
            own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            for parameter in found:
                if id(parameter) in own:
                    parameter.grad = None

    optimizer.register_step_pre_hook(uncompiled(leave))


def leave_before_loading(optimizer: Any, leave: Callable[[Any], bool]) -> None:
    """Give up the step under way before an optimizer loads a state, whereupon Horovod forgets that step.

    Args:
        leave: does so for the optimizer; returns whether all ranks have handed over all tokens of the step.
    """
    stock = optimizer.load_state_dict

    @functools.wraps(stock)
    def load(*given: Any, **options: Any) -> Any:
        if leave(optimizer):
            await_tokens(optimizer)
        return stock(*given, **options)

    optimizer.load_state_dict = load


def refuse_closure(optimizer: Any, given: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Refuse a closure, before a step: its gradients would come after Horovod has reduced those of the step.

    Raises:
        ConfigError: says what to do.
    """
    closure = options.get("closure", given[1] if len(given) > 1 else None)
    if closure is not None and optimizer._should_synchronize:  # else the closure may do so itself
        instead = "call the closure before step(), or use DistributedUpdateOptimizer, whose local steps accept one"
        if isinstance(optimizer, torch.optim.LBFGS):  # it calls the closure again and again
            instead = "use LBFGS without Horovod, under torchrun"
        raise ConfigError(
            "step(closure) would run its backward pass after the gradients were reduced, and ranks would drift apart; "
            f"{instead}"
        )
