"""A model in DistributedDataParallel: its communication hook hands over one bucket after the other, and never waits."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ...engine.optimizer.step_hooks import uncompiled
from ...errors import ConfigError, HorovodCompressError
from ..session import Session, drop_zeros
from . import checks
from .backward import Backward, Fetching, Unused, at_the_end, looks_for_unused


class Wrapped:
    """Exchanges the buckets of one model.

    Args:
        begin_step: begins a step of the compression, before its first gradient is handed over.
        look: called at the end of each pass.
        group: the process group, in which torch reduces sparse gradients.

    Attributes:
        fetching: to be closed with the compression.
        model: returns the model, None where nobody said which one it is.
    """

    def __init__(
        self, session: Session, begin_step: Callable[[], object], look: Callable[[], None], group: Any
    ) -> None:
        self._session, self._begin_step, self._look, self._group = session, begin_step, look, group
        self.fetching = Fetching(session.job.number)
        self.model: Callable[[], DistributedDataParallel | None] = lambda: None
        self._backward: Backward | None = None
        self._left_out: Unused | None = None  # where a step may leave parameters out
        self._layouts = Layouts(session.steps.named)
        self._take = uncompiled(Wrapped._exchange)

    def follow(self, model: DistributedDataParallel) -> None:
        """Take note of the model whose buckets will come; it holds the hook, and so this."""
        if looks_for_unused(model):
            self._left_out = Unused(model, self._session.reducer.kept)
        sparse = checks.sparse_in(model)
        steps = self._session.steps
        steps.sparse = [name for name, parameter in steps.named if id(parameter) in sparse]
        model.join_hook = checks.RefusedJoin(model)  # type: ignore[method-assign]
        self.model = weakref.ref(model)

    def exchange(self, bucket: dist.GradBucket) -> Any:
        """Accept a bucket; return a future of its memory.

        Raises:
            ConfigError: it cannot be exchanged.
            ExchangeError: an earlier exchange failed.
        """
        try:
            return self._take(self, bucket)
        except HorovodCompressError as error:
            self._refuse_to_go_on(error)
            raise

    def _refuse_to_go_on(self, error: HorovodCompressError) -> None:
        if model := self.model():
            checks.refuse_to_go_on(model, error)

    def _exchange(self, bucket: dist.GradBucket) -> Any:
        session, buffer = self._session, bucket.buffer()
        backward = self._begin_backward(bucket)
        numbers = checks.numbers(bucket.parameters(), session.steps.index, session.job.number)
        if buffer.is_sparse:
            reduced, offered, reducer = checks.mean_of(buffer, self._group), [], session.reducer
            for at in numbers:  # torch reduces them
                reducer.skip(at)
            backward.sparse += numbers
            # A bucket of sparse gradients only is awaited by nobody else.
            backward.settle = partial(reducer.wait_idle, reducer.options.longest_seconds)
        else:
            grads = self._layouts.gradients(bucket)
            if self._left_out:
                self._left_out.set_aside(bucket.parameters(), numbers, grads)
            offered = [(at, session.offer(at, grad)) for at, grad in zip(numbers, grads, strict=True)]
        future = backward.add(buffer, offered)
        if bucket.is_last() or backward.has_all(session.steps.parameters):
            # DistributedDataParallel hands nothing over for what was frozen before the model was wrapped.
            brought, parameters = backward.offered(), session.steps.parameters
            left = [at for at, p in enumerate(parameters) if at not in brought and not p.requires_grad]
            backward.add_to_last([(at, session.offer(at, torch.zeros_like(parameters[at]))) for at in left])
            self._backward = None
            backward.close()
            self.fetching.hand_over(backward)
        return reduced if buffer.is_sparse else future

    def _begin_backward(self, bucket: dist.GradBucket) -> Backward:
        """Return the backward pass that a bucket belongs to; the first bucket begins one, and a step."""
        backward, brought = self._backward, {id(parameter) for parameter in bucket.parameters()}
        if backward and (bucket.index() or backward.brought.isdisjoint(brought)):
            # In the first step of a static graph all buckets are number 0, and none is said to be the last.
            backward.unnumbered = backward.unnumbered or not bucket.index()
        else:
            self._backward = backward = Backward(self._session.result, self.fetching.alive)
            backward.gives_up = self._refuse_to_go_on
            at_the_end(backward.end)
            at_the_end(self._look)  # when all gradients of this pass are there
            if self._left_out:
                self._left_out.begin()
                backward.afterwards = partial(self._left_out.settle, backward.brought)
            self._begin_step()
            drop_zeros(self._session.steps.frozen)
        backward.brought |= brought
        return backward


# ---- how gradients lie in buckets ----

#: Look at so many buckets at most to learn how a gradient lies in them: one whose values are equal does not show it.
_LOOKS = 20


class Layouts:
    """Takes the gradients out of buckets, each element in its place.

    Torch writes a gradient as its parameter lay when the buckets were made, which is when the model is wrapped, and in
    some models once more before the second step. ``GradBucket.gradients()`` takes all for contiguous ones.

    Args:
        named: the parameters that are exchanged.
    """

    def __init__(self, named: Sequence[tuple[str, Tensor]]) -> None:
        self._named = named
        self._strides: dict[int, tuple[int, ...]] = {}  # of parameters, by identity, as they are
        self._laid: dict[int, tuple[int, ...]] = {}  # as they were first, see _strides()
        self._looks: dict[int, int] = {}  # how many buckets have still to be looked at

    def gradients(self, bucket: dist.GradBucket) -> list[Tensor]:
        """Return the gradients of a bucket, with the layouts of their parameters.

        Raises:
            ConfigError: a parameter lies otherwise than when the buckets were made.
        """
        found = []
        for parameter, flat in zip(bucket.parameters(), bucket.gradients(), strict=True):
            dense = not parameter.is_contiguous() and _is_dense(parameter)
            found.append(grad := flat.view(-1).as_strided(parameter.size(), parameter.stride()) if dense else flat)
            if self._changed(parameter) or (self._looks[id(parameter)] and self._lies_apart(parameter, grad)):
                name = next(name for name, other in self._named if other is parameter)
                raise ConfigError(
                    f"{name} no longer lies in memory as it did when DistributedDataParallel made its buckets, as "
                    "after model.to(memory_format=torch.channels_last): gradients would go to the wrong elements; "
                    "change the format first, then wrap the model"
                )
        return found

    def _changed(self, parameter: Tensor) -> bool:
        """Return whether a parameter lies otherwise than when it was first seen."""
        key, strides = id(parameter), parameter.stride()
        if self._strides.get(key) == strides:
            return False
        self._strides[key], laid = strides, _strides(parameter)
        self._looks.setdefault(key, _LOOKS if len(laid) > 1 and parameter.numel() else 0)
        return self._laid.setdefault(key, laid) != laid

    def _lies_apart(self, parameter: Tensor, grad: Tensor) -> bool:
        """Return whether a bucket has the values of ``.grad`` for other elements; equal values show nothing."""
        own, key = parameter.grad, id(parameter)
        if own is None or own.is_sparse:
            return False
        self._looks[key] -= 1
        if not _alike(own, grad):
            return _alike(own.flatten().sort().values, grad.flatten().sort().values)  # else it is of an earlier pass
        if bool(own.isfinite().all()) and bool(own.min() != own.max()):
            self._looks[key] = 0
        return False


def _alike(left: Tensor, right: Tensor) -> bool:
    """Return whether all values are equal, NaN too."""
    return bool(((left == right) | (left.isnan() & right.isnan())).all())


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor; those of dimensions of one element mean nothing."""
    return tuple(stride for stride, count in zip(tensor.stride(), tensor.size(), strict=True) if count != 1)


def _is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor is a contiguous one whose dimensions were permuted."""
    size = 1
    for stride, count in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if count != 1:
            if stride != size:
                return False
            size *= count
    return True
