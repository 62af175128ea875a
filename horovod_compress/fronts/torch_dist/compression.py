"""The compression object under torch.distributed: of a module as it is, or of one in DistributedDataParallel.

That is given the compression as the state of its communication hook, and the hook.

Annotations are no texts here: torch looks at those of the hook.
"""

import contextlib
import os
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...engine.job import Job
from ...engine.shards import is_divided
from ...errors import ConfigError, MismatchError
from ...observe.trace import MAX_EVENTS, Trace
from ..compression import begin_trace
from ..factories import RanksOption, add_factories, of_an_object
from ..reports import Strangers, Unexchanged
from ..session import Session, before_each_step, in_backward, weakly
from ..startup import Wrap
from ..update_options import TAKEN
from . import checks
from .alike import begin_alike
from .hooks import leave_other
from .job import TorchJob
from .of_group import TorchCompression
from .unwrapped import Unwrapped
from .wrapped import Wrapped

Model = TypeVar("Model", bound=nn.Module)

if TYPE_CHECKING:
    from .factory_types import Factories
else:
    Factories = object  # the functions are added below


class Compression(TorchCompression, Factories):
    """A compression for jobs that torchrun starts.

        compression = hvc.Compression.marsit(model.named_parameters())
        compression.register(model, optimizer)

    Create one by the name of a method after ``torch.distributed.init_process_group()`` and on every rank; the ranks
    then compare their options. A model that is in DistributedDataParallel is registered with that. Give the compression
    the parameters of the model itself, not of the wrapper: names are part of what is saved.

    ``hvc.available()`` lists the methods; ``help(hvc.Compression.marsit)`` shows a method's options, and those of
    all methods, with their defaults.

    Raises:
        ConfigError: an option or the parameter list cannot work, on this or another rank.
        MismatchError: the ranks were given different options, parameters or versions.
        ExchangeError: not every rank arrived in time.
    """

    _wrapped: Wrapped
    _what_copies_lack = (
        "a copy of a model has no compression; if it is trained, it exchanges nothing, or gradients uncompressed under "
        "DistributedDataParallel: create one, and write compression.register(model, optimizer)"
    )
    _how_to_use = (
        "a model, so each rank trains its own, unless DistributedDataParallel averages the gradients; write "
        "compression.register(model, optimizer), with the wrapped model if it is wrapped, before the first backward "
        "pass, or ddp_model.register_comm_hook(compression, hvc.ddp_hook); in update mode, "
        "optimizer = hvc.DistributedUpdateOptimizer(optimizer, model.named_parameters(), compression)"
    )
    _ranks_in_words = "process group"

    def _connect_with(self, method: Any, given: Any, options: Mapping[str, Any], wrap: Wrap, job: Job) -> None:
        try:
            super()._connect_with(method, given, options, wrap, job)
        except MismatchError as error:
            if "parameter" in error.about and any(is_divided(parameter) for _, parameter in given):
                raise MismatchError(f"{error}; {checks.INSTEAD}", error.about) from None
            raise

    def _begin(self, session: Session) -> None:
        self._wrapped = Wrapped(session, self._begin_step, self._look, self._job.group)
        self._closing.add(self._wrapped.fetching.close)
        self._strangers = Strangers(session)
        if not session.job.rank and session.job.size > 1:
            planned = "the compression, or DistributedDataParallel,"
            self._unexchanged = Unexchanged(lambda: session.others, planned, "both")
            self._closing.add(before_each_step(weakly(self._look_at_step), gradients=True))

    def _look_at_step(self, optimizer: Any) -> None:
        """Tell of an optimizer's gradients that are not exchanged, once that is for the compression to do."""
        if self._registered or self._here().compared:
            self._unexchanged.look(optimizer)

    # ---- the model and the optimizer ----

    def register(
        self,
        model: Model,
        optimizer: Any = None,
        *,
        second_moment: str = "auto",
        warmup_steps: int | None = None,
        rebuild_every: int | None = None,
        match_norm: bool = True,
        step: str = "auto",
    ) -> Model:
        """Exchange the gradients of a model from now on; return the model.

        Gradients are those of all ranks when ``backward()`` returns. Call this on every rank, before the first backward
        pass: earlier steps are not compressed.

        Args:
            model: the module whose parameters this compression was given, or DistributedDataParallel around it. A
                module as it is needs no more: its parameters and buffers become those of rank 0, and hooks take each
                gradient as soon as it is there. DistributedDataParallel is given a communication hook.
            optimizer: the one that applies the results, or a list of several; the other options are those of
                :meth:`attach`.

        Raises:
            ConfigError: the model has other parameters or other ranks, already has a hook or compression, or uses
                something that hooks do not support.
            MismatchError: a module as it is differs between ranks.
            ExchangeError: not every rank arrived in time.
        """
        session = self._session
        if not session:
            return model
        self._asked = True
        checks.refuse_no_optimizer(optimizer)
        self._prepare(session, model)
        self._attach_all(
            optimizer,
            second_moment=second_moment,
            warmup_steps=warmup_steps,
            rebuild_every=rebuild_every,
            match_norm=match_norm,
            step=step,
        )
        session.others = checks.not_exchanged(model, session.steps.named)
        if isinstance(model, DistributedDataParallel):
            self._wrapped.follow(model)
            model.register_comm_hook(self, ddp_hook)
        else:
            found = Unwrapped(model, session, self._begin_step, self._look, self._job.group)
            self._unwrapped = weakref.ref(found)
            self._closing.add(weakly(found.close))
            self._watch(model)
        self._registered = True
        return model

    def _prepare(self, session: Session, model: nn.Module) -> None:
        """Refuse a model that does not fit, and let all ranks begin with the same one, as the wrapper has seen to."""
        session.refuse_closed()
        if session.exchanges == "updates":
            raise ConfigError(TAKEN)
        if self._unwrapped():
            raise ConfigError("this compression has a module already; a compression serves one, and is registered once")
        if isinstance(model, DistributedDataParallel):
            _refuse_again(model)
            checks.check_model(model, self._job.group, session.steps.named, session.others)
        else:
            checks.check_unwrapped(model, session.steps.named, session.others)
            leave_other(model.parameters())
            begin_alike([*model.named_parameters(), *model.named_buffers()], session, self._job.group)

    def _for_updates(self, replicate: object) -> Session | None:
        if session := super()._for_updates(replicate):
            checks.refuse_divided(session.steps.named, self._job.group)
            checks.refuse_averaged(session.steps.parameters, self._job.group)
        return session

    @of_an_object
    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Within this, backward passes only add up gradients; the first one after it exchanges the sum.

            for number, batch in enumerate(batches):
                with compression.no_sync() if number + 1 < len(batches) else contextlib.nullcontext():
                    loss(model(batch)).backward()
            optimizer.step()

        Have the same passes in it on every rank, and forward passes too: DistributedDataParallel, whose ``no_sync()``
        this is for a model in it, looks there.

        Raises:
            ConfigError: no model was registered.
        """
        if not self._session:  # this rank takes no part
            return contextlib.nullcontext()
        if unwrapped := self._unwrapped():
            return unwrapped.paused()
        if ddp_model := self._wrapped.model():
            return ddp_model.no_sync()
        raise ConfigError("no_sync() is for a model that was registered: write compression.register(model, optimizer)")

    # ---- gradients ----

    def exchange(self, bucket: dist.GradBucket) -> Any:
        """Accept a bucket from DistributedDataParallel, as :func:`ddp_hook` does; never waits for results.

        Raises:
            ConfigError: it cannot be exchanged, or this is no backward pass.
            ExchangeError: an earlier exchange failed.
        """
        if not in_backward():
            raise ConfigError(checks.NO_JOIN)
        self._here()  # raises where this rank takes no part
        return self._wrapped.exchange(bucket)

    def _exchange_alone(self, grad: Tensor) -> Tensor:
        """Exchange the gradient of a model with one parameter outside a backward pass; for measurements."""
        session = self._begin_step()
        return session.result(0, session.offer(0, grad))


def trace(path: str | os.PathLike[str], steps: int | range | None = None, *, events: int = MAX_EVENTS) -> Trace:
    """Record a timeline of all compressions of this process, also of those created later.

        with hvc.trace("trace.json", steps=20):
            train()

    Each rank writes its own file, ``trace.rank3.json``. docs/timeline.md explains the rows, and the variable
    ``HVC_TRACE``, which does the same without changing the program.

    Args:
        path: of the file.
        steps: number of steps, from the next one on, or a range of step numbers; None for all, until ``close()``.
        events: largest number of events per compression; its recording then ends with a warning.

    Raises:
        ConfigError: the file cannot be written, ``steps`` is wrong, torch.distributed is not initialized, or another
            trace is being recorded.
    """
    if not dist.is_initialized():
        raise ConfigError("hvc.trace() needs the number of this rank: call init_process_group() first")
    return begin_trace(path, dist.get_rank(), steps, events)


_GROUP = "the ranks that take part, as given to DistributedDataParallel. Default: all."
add_factories(
    Compression,
    RanksOption("process_group", None, _GROUP, TorchJob),
    refused=("register", "attach", "follow"),
)


def _refuse_again(model: DistributedDataParallel) -> None:
    """Refuse a wrapper that has a compression, which it keeps for good."""
    for _, state in getattr(model, "_comm_hooks", ()):
        if isinstance(state, Compression):
            raise ConfigError(
                f"this DistributedDataParallel was registered before, with {state!r}, and a wrapper keeps its hook: "
                "register it once, or wrap the model again; docs/frameworks.md says how with the Trainer"
            )


def ddp_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Compress and exchange a bucket of DistributedDataParallel, for frameworks that take a hook and its state.

    ``compression.register(ddp_model, optimizer)`` does the same and also checks the model. With this hook alone, call
    ``compression.attach(optimizer)`` as well if the optimizer has momentum or a second moment.

    Args:
        state: a compression.
        bucket: the bucket that DistributedDataParallel passes to its hook.

    Returns:
        A future of the bucket's memory with the mean over ranks.
    """
    if not isinstance(bucket, dist.GradBucket):
        raise ConfigError(checks.PYTHON_REDUCER)
    return state.exchange(bucket)
