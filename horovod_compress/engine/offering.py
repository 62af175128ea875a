"""The first part of a gradient's way: offered by the training thread, taken in by a thread of its own.

On a device taking in only queues work, so the training thread does it, on the stream of the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..errors import ConfigError, ExchangeError, HorovodCompressError
from ..exchange.device import Device
from ..ops.keys import Key
from ..schedule.plan import TensorSpec
from .bucket.state import BucketState
from .buckets import Buckets
from .context import Context
from .failure import Failure
from .norms import Norms


class Offering:
    """Takes gradients, and hands them to the codecs of their buckets; nothing here blocks."""

    def __init__(self, context: Context, buckets: Buckets, failure: Failure, norms: Norms) -> None:
        self._context, self._buckets, self._failure, self._norms = context, buckets, failure, norms
        #: Called before a gradient is taken; raises where the job that the ranks connected in is another one now.
        self.check_usable: Callable[[], None] = lambda: None
        self.worker = failure.worker("hvc-offer", "taking in gradients")

    # ---- the training thread ----

    def offer(self, index: int, grad: Tensor) -> int:
        """Take one gradient; return its step. See :meth:`Reducer.offer`."""
        state, position = self._buckets.where(index)
        self._check_fits(state.bucket.tensors[position], grad, state.device)
        self._claim(state, position)
        if index in self._buckets.frozen:
            return self._offer_frozen(index, grad)
        key = self._key(state)  # not of the exchange thread's step: the last bucket may still be under way
        self._context.overlap.offered(key.step)
        if state.device.is_accelerator:  # queued on the stream that the gradient comes from
            self._take_in(index, grad, key)
        else:
            self.worker.put(partial(self._take_in_later, index, grad, key))
        return key.step

    def skip(self, index: int) -> None:
        """Count a tensor in that has no dense gradient in this step, on any rank."""
        state, position = self._buckets.where(index)
        self._claim(state, position)
        self._count_in(state, position, 0)

    def _offer_frozen(self, index: int, grad: Tensor) -> int:
        """Count a frozen tensor in: its result is 0, and what is kept for it stays as it is."""
        state, position = self._buckets.where(index)
        step = state.finished + 1
        with torch.no_grad():
            state.leave_out(position, grad)
        if watch := self._context.watch:
            watch.offered(index)
        self._count_in(state, position, 0)  # last: another step may begin then
        return step

    def _check_fits(self, tensor: TensorSpec, grad: Tensor, where: Device) -> None:
        rank = self._context.rank
        if tuple(grad.shape) != tensor.shape or str(grad.dtype) != f"torch.{tensor.dtype}":
            raise ConfigError(
                f"rank {rank}: the gradient of {tensor.name} should be {tensor.dtype} of shape "
                f"{tensor.shape}, got {grad.dtype} of shape {tuple(grad.shape)}"
            )
        if grad.device != where.where:
            raise ConfigError(
                f"rank {rank}: the gradient of {tensor.name} is on {grad.device}, its parameter was on "
                f"{where.where} when the compression was made; move the model to its device first"
            )

    def _claim(self, state: BucketState, position: int) -> None:
        rank = self._context.rank
        self.check_usable()  # first: an elastic job would retry the failure of the run before without end
        self._failure.raise_if_failed()
        if self._failure.closing:
            raise ConfigError(f"rank {rank}: this compression was closed; create a new one")
        with self._context.changed:
            if not state.claim(position, self._context.result_scale):
                raise ConfigError(
                    f"rank {rank}: the gradient of {state.bucket.tensors[position].name} was offered twice in step "
                    f"{state.finished + 1}; call the optimizer's step() or synchronize() after each backward pass. If "
                    "two distributed optimizers share this model or compression, for example because a notebook cell "
                    "ran twice, create model, compression and optimizer again"
                )

    def _key(self, state: BucketState) -> Key:
        return self._context.key(state.finished + 1, state.bucket.index)

    # ---- the thread that takes gradients in; on a device, the training thread ----

    def _take_in(self, index: int, grad: Tensor, key: Key) -> None:
        context = self._context
        state, position = self._buckets.where(index)
        context.recorder.note(key.step, key.bucket, "offer")
        where = (key.step, state.bucket, state.bucket.tensors[position].name)
        with context.metrics.timed("offer", where=where), torch.no_grad():
            self._norms.fold(state, position, grad, key.step)
            count = state.offer(position, grad, key, context.options.nonfinite == "zero")
        if watch := context.watch:
            watch.offered(index)
        self._count_in(state, position, count)  # last: another step may begin then

    def _take_in_later(self, index: int, grad: Tensor, key: Key) -> None:
        """Do so on the thread for it, where an error has no traceback that leads to the gradient."""
        try:
            self._take_in(index, grad, key)
        except HorovodCompressError:
            raise
        except Exception as error:
            state, position = self._buckets.where(index)
            raise ExchangeError(
                f"rank {self._context.rank}: the gradient of {state.bucket.tensors[position].name}, in bucket "
                f"{key.bucket} of step {key.step}, could not be processed: {type(error).__name__}: {error}; restart "
                f"the job from a checkpoint"
            ) from error

    def _count_in(self, state: BucketState, position: int, nonfinite: int | Tensor) -> None:
        with self._context.changed:
            state.count_in(position, nonfinite)
            is_last = state.offers.waits
            if state.offers.full:
                self._context.changed.notify_all()
        if is_last:
            self._offer_waiting(state)

    def _offer_waiting(self, state: BucketState) -> None:
        """Hand a bucket's gradients to the codec that waited for the last one; the thread that brought it does."""
        context, key = self._context, self._key(state)
        where = (key.step, state.bucket, "all that waited")
        with context.metrics.timed("offer", where=where), torch.no_grad(), state.device.offering():
            try:
                counts = state.offer_waiting(key)
            except BaseException as error:
                state.offers.refused = error  # for whoever waits for the bucket all the same
                raise
        with context.changed:
            state.count_waiting(counts)
            context.changed.notify_all()
