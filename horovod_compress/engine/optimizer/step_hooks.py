"""Hooks around the steps of an optimizer: they prepare a step once its gradients are there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import Any, TypeVar

from torch.optim import Optimizer

Wrapped = TypeVar("Wrapped", bound=Callable[..., Any])


def uncompiled(hook: Wrapped) -> Wrapped:
    """Return a hook that a compiled step calls as it is.

    What hooks look at changes in every step: they would be compiled again and again, up to torch's limit.
    """
    import torch._dynamo  # not with the package: it takes a second, and any optimizer has brought it

    found: Wrapped = torch._dynamo.disable(hook)
    return found


#: Functions that make a step without gradients, by package, and how far outside of its hooks they are at most.
_BUILDERS, _FRAMES = {"broadcast_optimizer_state": "horovod", "_init_optim_state": "torch"}, 12


def builds_state() -> bool:
    """Return whether an optimizer steps only to build its state, which uses no exchange."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame is None:
            break
        package = _BUILDERS.get(frame.f_code.co_name)
        if package and str(frame.f_globals.get("__name__")).startswith(f"{package}."):
            return True
        frame = frame.f_back
    return False


def in_a_step() -> bool:
    """Return whether an optimizer of this thread is in a step: between its first hook and the end of its last one.

    The handler of a signal may ask at any moment, and so may whatever an optimizer calls.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # torch's own function around each step and its hooks
        if frame.f_code.co_name == "wrapper" and frame.f_globals.get("__name__") == Optimizer.__module__:
            return True
        frame = frame.f_back
    return False


def calls_hooks(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's hooks are its own: the wrappers of frameworks may have none."""
    return "_optimizer_step_pre_hooks" in vars(optimizer)  # not by hasattr(): they may pass on what they wrap


def in_words(optimizer: object) -> str:
    """Return what was given for an optimizer; torch shows one in as many lines as it has options."""
    return type(optimizer).__name__ if isinstance(optimizer, Optimizer) else f"{optimizer!r:.200}"


def stepping(optimizer: Any) -> Any:
    """Return the optimizer whose step moves the weights, where it is in a wrapper of Accelerate's or Lightning's."""
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(optimizer, Optimizer) and isinstance(inner, Optimizer) and not calls_hooks(optimizer):
        return stepping(inner)
    return optimizer


#: A hook before an optimizer's step, as torch calls it.
Hook = Callable[[Any, tuple[Any, ...], dict[str, Any]], "tuple[Any, Any] | None"]


def before_step(prepare: Callable[[], None]) -> Hook:
    """Return a hook that prepares a step, once its gradients are there: a closure makes them inside of the step."""

    def hook(optimizer: Any, given: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any] | None:
        return None if builds_state() else with_gradients(prepare, given, options)

    return uncompiled(hook)


def with_gradients(
    call: Callable[[], object], given: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Any, Any] | None:
    """Call something in a hook before a step, once the gradients are there: after the closure, if there is one.

    Returns:
        What the hook has to return.
    """
    closure = options.get("closure", given[1] if len(given) > 1 else None)
    if not callable(closure):  # or a step of somebody's own takes something else
        call()
        return None

    @wraps(closure)
    def then_call(*given: Any, **options: Any) -> Any:
        loss = closure(*given, **options)
        call()
        return loss

    if "closure" in options:
        return given, {**options, "closure": then_call}
    return (given[0], then_call, *given[2:]), options


def prepare_last(optimizer: Any, prepare: Callable[[], None]) -> None:
    """Let a hook prepare the steps of an optimizer, after all others that it has: they may change gradients.

    A second call moves the hook to the end again.
    """
    hooks = optimizer._optimizer_step_pre_hooks
    for number, hook in hooks.items():
        if getattr(hook, "prepares", None) == prepare:
            hooks.move_to_end(number)
            return
    made: Any = before_step(prepare)
    made.prepares = prepare
    optimizer.register_step_pre_hook(made)


def unprepared(optimizer: Any, prepare: Callable[[], None]) -> None:
    """Remove the hook that :func:`prepare_last` has given to an optimizer."""
    hooks = optimizer._optimizer_step_pre_hooks
    for number in [number for number, hook in hooks.items() if getattr(hook, "prepares", None) == prepare]:
        del hooks[number]


def ready(optimizer: Any, step: int, done: int, settled: Callable[[], bool]) -> bool:
    """Return whether an optimizer is about to use the results of a step for the first time.

    A hook comes twice in a step, as Horovod's optimizer calls torch's; once the results are there. It is the second
    time where Horovod has yet to fetch results, or will give the same ones once more: ``step()`` after
    ``synchronize()`` does so.

    Args:
        done: the last step whose results it has used.
        settled: waits for the end of the step: nobody else waits for a bucket of sparse gradients only, which ends at
            another time on each rank.
    """
    return step > done and not synchronizes(optimizer) and settled()


def synchronizes(optimizer: Any) -> bool:
    """Return whether Horovod will fetch results in this step, before it calls torch's."""
    again = getattr(optimizer, "_synchronized", False) and getattr(optimizer, "_should_synchronize", False)
    return bool(getattr(optimizer, "_handles", None) or again)
